// A lock-free stack of free indices: any thread takes, any thread gives back.
//
// ABA. The head is 64 bits: index (32) and a tag (32) that grows with every push and every pop. A pop reads head (i, t) and
// next[i], then exchanges (i, t) for (next[i], t + 1). If another thread popped i and pushed it again in between, the tag has changed
// and the exchange fails, so a stale next[i] is never installed, unless exactly 2^32 operations fell into that window.
// next[] holds atomics, since a loser of the race may read next[i] while the winner's owner already writes it.
// Release on push, acquire on pop: whoever takes an index sees what its former owner wrote to the object behind it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace te {

class FreeList {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  // Indices 0..count-1 are free; up to capacity may be added later by push.
  FreeList(uint32_t count, uint32_t capacity) : next_(new std::atomic<uint32_t>[capacity]) {
    for (uint32_t i = 0; i < capacity; ++i) next_[i].store(i + 1 < count ? i + 1 : kNone, std::memory_order_relaxed);
    head_.store(count == 0 ? kNone : 0, std::memory_order_relaxed);
  }

  uint32_t pop() {
    uint64_t head = head_.load(std::memory_order_acquire);
    for (;;) {
      const auto index = static_cast<uint32_t>(head);
      if (index == kNone) return kNone;
      const uint32_t next = next_[index].load(std::memory_order_relaxed);
      const uint64_t wanted = tag_after(head) | next;
      if (head_.compare_exchange_weak(head, wanted, std::memory_order_acquire, std::memory_order_acquire)) return index;
    }
  }

  void push(uint32_t index) {
    uint64_t head = head_.load(std::memory_order_relaxed);
    for (;;) {
      next_[index].store(static_cast<uint32_t>(head), std::memory_order_relaxed);
      const uint64_t wanted = tag_after(head) | index;
      if (head_.compare_exchange_weak(head, wanted, std::memory_order_release, std::memory_order_relaxed)) return;
    }
  }

 private:
  static uint64_t tag_after(uint64_t head) { return ((head >> 32) + 1) << 32; }

  const std::unique_ptr<std::atomic<uint32_t>[]> next_;
  alignas(64) std::atomic<uint64_t> head_{0};
};

}  // namespace te
