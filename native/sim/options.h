// Options of the simulated transport: "key=value,key=value", one key for each member.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "native/status.h"

namespace te::sim {

struct Options {
  uint64_t seed = 1;

  // --- schedule: time is counted in polls of the NIC that posted ---
  bool reorder = true;            // land and complete in random order; false: strict order per NIC and path
  uint64_t delay = 0;             // each operation waits 0..delay polls before it lands, and as long for its completion
  uint64_t mtu = 8192;            // longer writes and reads land in pieces (at most kMaxPieces), one a poll
  bool delivery_complete = true;  // false: completions are reported when an operation leaves, before it lands

  // --- limits ---
  uint64_t depth = 256;
  uint64_t receive_depth = 1024;
  std::optional<uint64_t> completion_depth;  // absent: what the engine asks for; 0: cannot overrun
  uint64_t max_write = 1 << 20;
  uint64_t max_send = 4096;

  // --- faults ---
  double busy = 0;   // chance that a post is refused for now
  double error = 0;  // chance that a write fails with kTransport

  // --- character ---
  bool wait_fd = true;
  bool reads = true;
  bool virtual_addresses = true;   // false: MemoryKey::base is 0, as on tcp
  bool keys_enforced = true;       // false: a write with a dead key completes well and lands nowhere, as on tcp
  bool stale_keys_land = false;    // a write with a dead key lands, as on shm; excludes keys_enforced
  bool require_peer = false;       // writes and reads need a path back at the target, as on efa-direct
  bool reports_dead_peer = false;  // operations towards a killed peer always fail, never hang
  bool connected = false;          // paths come up by kPathUp and stay down after an error, as on RC; needs reorder=0
  std::string address;             // a fixed address; empty: made of identity and generation
};

inline constexpr uint32_t kMaxPieces = 8;

Error parse_options(std::string_view text, Options* out);

}  // namespace te::sim
