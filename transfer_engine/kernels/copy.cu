// Copies by loads and stores of a kernel, over NVLink where one side is a peer's memory; and patterns to fill and verify with.
// Any grid and block: all threads share the work.
#include "pattern.cuh"

namespace {

using u64 = unsigned long long;

struct alignas(16) Vector {
  u64 low, high;
};

__device__ u64 first() { return blockIdx.x * u64{blockDim.x} + threadIdx.x; }
__device__ u64 stride() { return gridDim.x * u64{blockDim.x}; }

// Each thread has kDepth loads under way before it stores the first of them. Both pointers are multiples of 16.
template <int kDepth>
__device__ void copy(void* to, const void* from, u64 bytes) {
  Vector* target = static_cast<Vector*>(to);
  const Vector* source = static_cast<const Vector*>(from);
  const u64 vectors = bytes / sizeof(Vector), step = stride();
  u64 i = first();
  for (; i + (kDepth - 1) * step < vectors; i += kDepth * step) {
    Vector held[kDepth];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) held[k] = source[i + k * step];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) target[i + k * step] = held[k];
  }
  for (; i < vectors; i += step) target[i] = source[i];
  const u64 rest = vectors * sizeof(Vector);
  if (first() < bytes - rest) static_cast<char*>(to)[rest + first()] = static_cast<const char*>(from)[rest + first()];
}

// The word of the pattern with as many of its bytes as there are from word `i` on.
__device__ u64 kept(u64 value, u64 i, u64 bytes) {
  const u64 left = bytes - 8 * i;
  return left >= 8 ? value : value & ((u64{1} << (8 * left)) - 1);
}

}  // namespace

// Stores go to the peer. At least 16 threads in all, here and below.
extern "C" __global__ void te_push(void* to_peer, const void* from, unsigned long long bytes) {
  copy<4>(to_peer, from, bytes);
}

// Loads come from the peer: more of them under way, since each takes the way there and back.
extern "C" __global__ void te_pull(void* to, const void* from_peer, unsigned long long bytes) {
  copy<8>(to, from_peer, bytes);
}

// Fills `bytes` bytes with the pattern of a round; little-endian words, the last one cut. `to` is a multiple of 8.
extern "C" __global__ void te_fill(void* to, unsigned long long bytes, unsigned long long seed, unsigned long long round) {
  for (u64 i = first(); i < (bytes + 7) / 8; i += stride()) {
    const u64 value = te::pattern(seed, round, i);
    if (8 * i + 8 <= bytes) {
      static_cast<u64*>(to)[i] = value;
    } else {
      for (u64 at = 8 * i; at < bytes; ++at) static_cast<unsigned char*>(to)[at] = value >> (8 * (at & 7));
    }
  }
}

// Adds to `wrong` the number of words that differ from the pattern.
extern "C" __global__ void te_verify(const void* from, unsigned long long bytes, unsigned long long seed,
                                     unsigned long long round, unsigned long long* wrong) {
  u64 found = 0;
  for (u64 i = first(); i < (bytes + 7) / 8; i += stride()) {
    u64 value = 0;
    if (8 * i + 8 <= bytes) {
      value = static_cast<const volatile u64*>(from)[i];
    } else {
      for (u64 at = 8 * i; at < bytes; ++at)
        value |= u64{static_cast<const volatile unsigned char*>(from)[at]} << (8 * (at & 7));
    }
    found += value != kept(te::pattern(seed, round, i), i, bytes);
  }
  if (found) atomicAdd(wrong, found);
}
