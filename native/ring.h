// A bounded ring, many producers to one consumer, without locks. Producers never overwrite and the consumer never waits for a
// lock. After Dmitry Vyukov's bounded queue: each cell has a sequence number that says whose turn it is.
//
// Ordering. Let the capacity be C (a power of two). Cell i starts with sequence i.
//   A producer that wants position p reads cell p % C: sequence p means free. It claims p by a compare-exchange on tail_
//   (relaxed: it orders nothing but the claim), writes the value, then stores sequence p + 1 with release.
//   The consumer at position p loads the sequence with acquire; p + 1 means filled, and by release/acquire the value is visible.
//   It takes the value and stores p + C with release, which frees the cell for position p + C; the producer's acquire load of
//   the sequence orders its write after the consumer's read.
// Positions are 64-bit and do not wrap in practice (1 ns each: 584 years).
// A producer that was preempted between claim and store holds up the consumer at that cell only until it runs again; nothing is lost.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>

namespace te {

template <typename T>
class Ring {
 public:
  explicit Ring(uint32_t capacity)
      : mask_(std::bit_ceil(capacity < 2 ? 2u : capacity) - 1), cells_(new Cell[mask_ + 1]) {
    for (uint64_t i = 0; i <= mask_; ++i) cells_[i].sequence.store(i, std::memory_order_relaxed);
  }

  // False when full.
  bool push(T value) {
    uint64_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const uint64_t sequence = cell.sequence.load(std::memory_order_acquire);
      const auto lead = static_cast<int64_t>(sequence - position);
      if (lead == 0) {
        if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          cell.value = value;
          cell.sequence.store(position + 1, std::memory_order_release);
          return true;
        }
      } else if (lead < 0) {
        return false;
      } else {
        position = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  // One thread only. False when empty.
  bool pop(T* value) {
    Cell& cell = cells_[head_ & mask_];
    if (cell.sequence.load(std::memory_order_acquire) != head_ + 1) return false;
    *value = cell.value;
    cell.sequence.store(head_ + mask_ + 1, std::memory_order_release);
    ++head_;
    return true;
  }

  // The consumer's view: may miss a push that is under way.
  bool empty() const { return cells_[head_ & mask_].sequence.load(std::memory_order_acquire) != head_ + 1; }

 private:
  struct Cell {
    std::atomic<uint64_t> sequence{0};
    T value{};
  };

  const uint64_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<uint64_t> tail_{0};
  alignas(64) uint64_t head_ = 0;
};

}  // namespace te
