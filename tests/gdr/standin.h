// A stand-in for GDRCopy's libgdrapi, for tests: windows to the device memory of the stand-in for CUDA's driver, which it finds as the library
// that TE_LIBCUDA names, if that is loaded. It is loaded in place of the real one (TE_LIBGDRAPI names it).
//
// What is pinned begins and ends at multiples of 64 KiB (EINVAL) and is device memory of one allocation, whose pages it may take in whole
// (EINVAL: managed or host memory, or none). A window begins at a multiple of 64 KiB, too, so what is in it lies as in the device's pages.
// It shows the very bytes; when the memory is freed, there is nothing any more, and an access ends the process.
//
// Told on stderr and counted as *violations*: a handle that is not, or of another gdr_t (EINVAL), mapping twice (EAGAIN), unmapping
// what is not mapped, elsewhere or at another length (EINVAL), unpinning what is mapped and closing with what is pinned: both do as
// they were told, as the library does. A child must not use what was loaded before the fork.
//
// TE_STANDIN_GDRAPI, read when the library is loaded: options, "key=value,key=value":
//   version  MAJOR.MINOR (2.5)
//   open     gdr_open fails with this errno (0: it does not); 13 is how it is without permission
//   pin      gdr_pin_buffer fails with this errno; 12 is how it is where no more fits into the BAR
//   map      gdr_map does
//   quiet    1: violations are counted and not told
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The options as they were at the start, and then these. 0, or EINVAL: not understood, nothing is changed.
int standin_gdrapi_configure(const char* options);

// UINT64_MAX: no such name. At this moment: opened, pinned, mapped; since the start: pins, maps, violations.
uint64_t standin_gdrapi_statistic(const char* name);

#ifdef __cplusplus
}
#endif
