// The stand-in's options: "key=value,key=value", one key for each member. See tests/cuda/standin.h.
#pragma once

#include <cstdint>
#include <string_view>

#include "native/gpu/cuda.h"

namespace standin::cuda {

inline constexpr uint64_t kMostDevices = 16;

struct Options {
  uint64_t devices = 1, version = 13000, init = 0, dmabuf = 1, flush = 1, memory = uint64_t{1} << 36, offset = 0;
  uint64_t copy_delay_us = 0, copy_fail_after = 0, host_alloc_fail = 0, hold = 0, quiet = 0;
  int ordering = te::gpu::kOrderingOwner;
};

// false: an unknown key or a malformed value; what stands before it is set.
bool parse_options(std::string_view text, Options* options);

}  // namespace standin::cuda
