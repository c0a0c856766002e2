// What the stand-in keeps: what was opened, and what is pinned and mapped through it, guarded by one mutex.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "native/gpu/gdr.h"
#include "tests/gdr/options.h"

namespace standin::gdr {

struct Pin {
  te::gpu::GdrContext owner = nullptr;
  uint64_t address = 0, bytes = 0;
  uint8_t* view = nullptr;    // where the CPU sees it
  uint64_t mapped_bytes = 0;  // 0: no window
};

struct Library {
  static Library& get();

  std::mutex mutex;
  Options initial, options;
  std::set<te::gpu::GdrContext> opened;
  std::map<unsigned long, Pin> pinned;  // by handle
  uint64_t last_handle = 0, pins = 0, maps = 0, violations = 0;

  // --- under the mutex ---
  void violation(const char* format, ...) __attribute__((format(printf, 2, 3)));

 private:
  Library();
};

}  // namespace standin::gdr
