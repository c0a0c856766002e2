// The stand-in's only source of chance: splitmix64 (Steele, Lea, Flood 2014), used under the fabric's mutex.
#pragma once

#include <cstdint>

namespace standin {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint32_t word() { return static_cast<uint32_t>(next() >> 32); }
  uint64_t below(uint64_t bound) { return bound <= 1 ? 0 : next() % bound; }
  // Draws nothing where the answer is certain, so that options that are off leave the schedule as it was.
  bool chance(double probability) {
    if (probability <= 0) return false;
    if (probability >= 1) return true;
    return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability;
  }

 private:
  uint64_t state_;
};

}  // namespace standin
