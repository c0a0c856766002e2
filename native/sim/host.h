// One simulated engine: what its NICs share. Guarded by the fabric's mutex.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "native/provider.h"
#include "native/sim/fabric.h"
#include "native/sim/options.h"
#include "native/sim/random.h"

namespace te::sim {

// What becomes of one write. All but the first end in a kTransport error at the initiator.
enum class Fate : uint8_t {
  kGood,
  kClean,    // nothing lands, and the provider knows it
  kUnknown,  // nothing lands, landed_unknown is set
  kPartial,  // one piece lands, without the immediate; landed_unknown
  kLanded,   // it lands, immediate included; landed_unknown
  kLate,     // the error comes first, then it lands; landed_unknown
};

struct Counts {
  uint64_t writes = 0, immediates = 0, reads = 0, sends = 0;  // landed, as seen by the initiator
  uint64_t errors = 0;                                        // completions with an error
  uint64_t busy = 0;                                          // posts refused for now
  uint64_t not_ready = 0;                                     // sends that met no posted receive
  uint64_t flipped = 0;                                       // pieces damaged by flip_next
  uint64_t stale_live = 0;    // dead keys used here that landed in memory registered again under another key
  uint64_t stale_shadow = 0;  // dead keys used here that landed in memory that is no longer registered (in its shadow)
  uint64_t stale_lost = 0;    // dead keys used here that vanished with success
  uint64_t overruns = 0;      // completion queues that ran over: their NICs are dead
  uint64_t tampered = 0;      // contexts whose scratch was changed, or that were posted twice, while in flight
};

struct Host {
  Options options;
  Capabilities capabilities;
  Identity identity{};
  uint64_t generation = 0;
  Random random{0};
  Counts counts;

  bool paused = false;
  bool killed = false;
  uint64_t errors_due = 0;             // the next so many writes fail ...
  Fate errors_fate = Fate::kGood;      // ... in this manner; kGood: by chance
  std::optional<uint64_t> fail_after;  // so many writes leave before errors_due counts
  uint64_t flips_due = 0;
  uint64_t registration_failures_due = 0;

  std::vector<std::unique_ptr<Nic>> nics;
};

}  // namespace te::sim
