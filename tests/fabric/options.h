// The stand-in's options: "key=value,key=value", one key for each member. See tests/fabric/standin.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace srd {

struct Options {
  uint64_t devices = 2, seed = 1, steps = 32, pieces = 4, reorder = 1;
  uint64_t direct = 1, unsolicited = 0, wait_fd = 1, hmem = 0, emulated = 0;
  uint64_t max_rma = 1 << 30, max_msg = 8192, tx_size = 256, rx_size = 1024, max_cq = 1 << 16;
  uint64_t retry_ticks = 1000, retries = 5, rnr_ticks = 64, rnr_retries = 100;
  uint64_t error_every = 0, error_status = 13;
  uint64_t free = 0, quiet = 0, abort = 1;
  double eagain = 0, ghosts = 0;
};

// false: an unknown key or a malformed value; what stands before it is set.
bool parse_options(std::string_view text, Options* options);

}  // namespace srd
