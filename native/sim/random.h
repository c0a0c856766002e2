// The simulator's only source of chance: a seeded splitmix64 (Steele, Lea, Flood 2014). One per engine, used under the
// fabric's mutex. The same seed and the same sequence of calls give the same schedule on every machine.
#pragma once

#include <cstdint>

namespace te::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // 0 <= result < bound; the bias of the remainder does not matter here.
  uint64_t below(uint64_t bound) { return bound <= 1 ? 0 : next() % bound; }

  // Draws nothing for 0 and 1, so that options that are off leave the schedule of the others as it was.
  bool chance(double probability) {
    if (probability <= 0) return false;
    if (probability >= 1) return true;
    return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability;
  }

 private:
  uint64_t state_;
};

}  // namespace te::sim
