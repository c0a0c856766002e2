// What kernels use to raise watchers and to wait for flags. May be included in any CUDA C++ 17 source; needs no other header and
// sm_70 or newer.
//
// Memory order. A word that CPU, NIC and GPU share is written with release and read with acquire, both at system scope. What a
// thread wrote or saw before raise() is visible to whoever saw the word's new value with acquire; writes of other threads of the
// block are among that after __syncthreads(), those of the whole grid after a grid-wide barrier or in a later kernel of the
// stream. What follows wait() in the same thread, or behind __syncthreads() in its block, sees what was there before the epoch
// was raised.
#pragma once

namespace te {

using word = unsigned long long;

// Words of a flag's control cell, which lies in mapped host memory. The host writes the first, and the device does only where it
// finds kNone; an abort word is never taken back while waits may look at it.
inline constexpr int kAbortWord = 0;    // why waits are to end without their epoch
inline constexpr int kMissedWord = 1;   // how many have ended so
inline constexpr word kNone = 0;        // not at all
inline constexpr word kPeerLost = 1;    // a peer was lost
inline constexpr word kDeadline = 2;    // the time-out passed on the device
inline constexpr word kClosed = 3;      // the engine was closed

inline constexpr unsigned kPollsPerLook = 8;  // polls of the epoch for each look at the abort word: some 10 us over PCIe

__device__ inline word load_acquire_sys(const word* from) {
  word value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline void store_release_sys(word* to, word value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Adds `by` to a word that the host watches. An increment instead of a store: a captured graph raises it at each replay.
__device__ inline void raise(word* watched, word by) {
  asm volatile("red.release.sys.add.u64 [%0], %1;" ::"l"(watched), "l"(by) : "memory");
}

__device__ inline word nanoseconds() {
  word value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

// Says that a wait ends without its epoch.
__device__ inline void count_missed(word* control) {
  asm volatile("red.release.sys.add.u64 [%0], %1;" ::"l"(control + kMissedWord), "l"(word{1}) : "memory");
}

// Sets the abort word to `reason` unless it is set already. Towards memory of the host this is atomic among threads of one device,
// which is enough: when the host sets another reason at the same moment either may stay, and both end the waits.
// True: it was this thread that set it.
__device__ inline bool abort_waits(word* control, word reason) {
  word before;
  asm volatile("atom.acq_rel.sys.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(control + kAbortWord), "l"(word{kNone}), "l"(reason)
               : "memory");
  return before == kNone;
}

// Spins until the epoch is at least `target`. False: it ended because of the abort word, which it set itself once `timeout_ns` had
// passed (0: no time-out). The epoch has the last word: what has come counts, whatever else happened. For one thread.
__device__ inline bool wait_until(const word* epoch, word* control, word target, word timeout_ns) {
  const word begin = timeout_ns ? nanoseconds() : 0;
  for (unsigned polls = 1;; ++polls) {
    if (load_acquire_sys(epoch) >= target) return true;
    if (polls % kPollsPerLook) continue;
    if (load_acquire_sys(control + kAbortWord) == kNone) {
      if (!timeout_ns || nanoseconds() - begin < timeout_ns) continue;
      abort_waits(control, kDeadline);
    }
    if (load_acquire_sys(epoch) >= target) return true;
    count_missed(control);
    return false;
  }
}

// Takes the next `advance` epochs of a flag: `taken` counts, in memory of the device, those that waits have taken so far, so that
// nothing which changes is captured by a graph. The waits of one flag must not overlap: one stream, or streams in order. For one
// thread. False: see wait_until; the epochs count as taken all the same.
__device__ inline bool wait(const word* epoch, word* control, word* taken, word advance, word timeout_ns) {
  word target;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(target) : "l"(taken) : "memory");
  target += advance;
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(taken), "l"(target) : "memory");
  return wait_until(epoch, control, target, timeout_ns);
}

}  // namespace te
