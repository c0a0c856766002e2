// A stand-in for CUDA's driver, for tests: a shared library with those symbols of libcuda that native/gpu/cuda.cc binds, and no GPU. It is
// loaded in place of the real one (TE_LIBCUDA names it), so what is above it is what ships.
//
// Device memory is not the CPU's: at its address nothing is mapped, so a stray access ends the process, also after the memory was
// freed. The bytes are behind it, in an anonymous file of each allocation: copies and fills reach them, so does what maps a dma-buf, and a
// test (standin_cuda_view). An address that was freed comes back with the next allocation of as many pages, under a new buffer id.
//
// Each stream has a thread, which carries out copies, fills and records of events in order and ends in cuStreamDestroy. Stream 0 waits for
// all streams but the non-blocking ones and is done when the call returns. cuMemFree and cuMemFreeHost wait for all streams.
//
// Stricter than a driver, where a program could depend on what happens to work:
//   - an async copy from or to pageable memory is refused (1); so is one from or to host memory of another context that is not portable
//   - streams and events need their own context to be current (400), handles are never used twice, and destroying one twice is refused (400)
//   - a device range that is not within one live allocation is an illegal address (700)
//   - host memory has a device pointer only if it was asked for (2 in the flags of cuMemHostAlloc)
// The first two and a handle of the wrong kind are also counted as *violations* and told on stderr.
//
// An error 700 sticks to its context: every call that needs the context fails with it, no event becomes ready and no stream does
// anything more. Freeing and destroying still work (and return it). After cuInit, nothing works in a child (3).
//
// TE_STANDIN_CUDA, read when the library is loaded: options, "key=value,key=value" (defaults in tests/cuda/options.h):
//   devices          how many; with 0, cuInit fails with 100
//   version          of the driver, 1000 * major + 10 * minor
//   init             what cuInit answers; 0: success
//   dmabuf           0: no dma-buf for device memory (attribute 0, 801)
//   ordering         none, owner, all: who sees writes of other devices in order without a flush
//   flush            0: the host cannot flush such writes (801)
//   memory           bytes of each device
//   offset           bytes between the start of an allocation's pages and its own, as where a driver puts small ones side by side
//   copy_delay_us    time that each copy takes at least
//   copy_fail_after  the Nth async copy (from 1, since the options were set) is an illegal address when it is carried out; 0: none
//   host_alloc_fail  1: cuMemHostAlloc fails (2)
//   hold             1: streams hold what is given to them until this is 0 again
//   quiet            1: violations are counted and not told
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The options as they were at the start, and then these. 0, or EINVAL: not understood, nothing is changed.
int standin_cuda_configure(const char* options);

// Device or managed memory, from and to a buffer of the CPU, at once. 0, or EFAULT: not within one live allocation.
int standin_cuda_read(uint64_t at, void* out, size_t bytes);
int standin_cuda_write(uint64_t at, const void* from, size_t bytes);

// Where the CPU sees this byte of device memory; null: it is none, also if it is managed. All of an allocation's pages of 64 KiB, also
// where they go on before and after its own bytes, are there, one after the other. Valid until it is freed.
void* standin_cuda_view(uint64_t at);

// Managed memory of the current context, as of cuMemAllocManaged: the CPU and the device reach it at one address. 0: failed.
uint64_t standin_cuda_allocate_managed(size_t bytes);

// UINT64_MAX: no such name. At this moment: allocations (of devices, managed ones, too), host_allocations, streams, events, references (to
// primary contexts); since the start: copies, fills, flushes, violations.
uint64_t standin_cuda_statistic(const char* name);

// Contexts in which an error stuck work again.
void standin_cuda_clear_errors(void);

#ifdef __cplusplus
}
#endif
