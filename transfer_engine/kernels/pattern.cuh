// Seeded contents for tests: a word by seed, round and index, in which neighbours, rounds and seeds differ everywhere.
// patterns.py computes the same.
#pragma once

namespace te {

// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
__host__ __device__ inline unsigned long long mixed(unsigned long long x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__host__ __device__ inline unsigned long long pattern(unsigned long long seed, unsigned long long round,
                                                      unsigned long long index) {
  return mixed(mixed(mixed(seed) + round) + index);
}

}  // namespace te
