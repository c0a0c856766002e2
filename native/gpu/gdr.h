// GDRCopy's libgdrapi, loaded at run time: windows through which the CPU reads and writes GPU memory directly (over the PCIe BAR).
// Declarations follow gdrapi.h of GDRCopy 2.x, whose binary interface is the same since 2.0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "native/status.h"

namespace te::gpu {

using GdrContext = struct GdrObject*;  // gdr_t
struct GdrHandle {                     // gdr_mh_t
  unsigned long h = 0;
};
struct GdrInfo {  // gdr_info_v2_t
  uint64_t va = 0;
  uint64_t mapped_size = 0;
  uint32_t page_size = 0;
  uint64_t tm_cycles = 0;
  uint32_t cycles_per_ms = 0;
  unsigned mapped : 1 = 0;
  unsigned wc_mapping : 1 = 0;
  int mapping_type = 0;  // of 2.5 and later; older libraries write less
};

inline constexpr uint64_t kGpuPageBytes = 65536;  // GPU_PAGE_SIZE: what is pinned begins and ends at multiples of it

struct Gdr {
  GdrContext (*open)() = nullptr;          // gdr_open
  int (*close)(GdrContext gdr) = nullptr;  // gdr_close
  int (*pin)(GdrContext gdr, unsigned long address, size_t bytes, uint64_t token, uint32_t space,
             GdrHandle* handle) = nullptr;                                           // gdr_pin_buffer
  int (*unpin)(GdrContext gdr, GdrHandle handle) = nullptr;                          // gdr_unpin_buffer
  int (*info)(GdrContext gdr, GdrHandle handle, GdrInfo* info) = nullptr;            // gdr_get_info_v2
  int (*map)(GdrContext gdr, GdrHandle handle, void** at, size_t bytes) = nullptr;   // gdr_map
  int (*unmap)(GdrContext gdr, GdrHandle handle, void* at, size_t bytes) = nullptr;  // gdr_unmap
  void (*runtime_version)(int* major, int* minor) = nullptr;                         // gdr_runtime_get_version

  std::string file;
  int major = 0, minor = 0;
};

// Loads the library that TE_LIBGDRAPI names (libgdrapi.so.2), once; what is loaded stays. kTransportUnavailable with the reason and the
// remedy otherwise: no library, too old, or a /dev/gdrdrv that is missing or not ours to open.
Error load_gdr(const Gdr** out);
// gdr_open, with the reason and the remedy where it fails.
Error open_gdr(const Gdr& gdr, GdrContext* out);

}  // namespace te::gpu
