// Waking those who wait for a number that only rises.
//
// Waking costs a system call and a context switch, so it happens only when the lowest number that anybody waits for is reached.
// A waiter: reads `epoch` (acquire), lowers `wake_at` to its number (seq_cst), reads the value (seq_cst); if too low it sleeps while
//   `epoch` is what it read, and starts again when woken.
// Who raises: raises the value, fence (seq_cst), reads `wake_at`; if reached: wake_at = never, epoch + 1, wakes all.
// Value against wake_at: of the two accesses on each side, either the waiter sees the new value or the other the waiter's number.
// Registration against reset: if the waiter read the new epoch, its registration came after the reset and stands; if it
//   read the old one, it does not sleep, since the epoch has moved (or it is woken), and registers again.
#pragma once

#include <atomic>
#include <cstdint>

#include "native/system.h"

namespace te {

struct Alarm {
  std::atomic<uint32_t> epoch{0};
  std::atomic<uint64_t> wake_at{kNobody};
  static constexpr uint64_t kNobody = UINT64_MAX;

  void wait_for(uint64_t number) {
    uint64_t lowest = wake_at.load(std::memory_order_relaxed);
    while (lowest > number && !wake_at.compare_exchange_weak(lowest, number, std::memory_order_seq_cst)) {
    }
  }
  // After the value was raised.
  void wake_if_reached(uint64_t now) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (wake_at.load(std::memory_order_relaxed) <= now) wake();
  }
  // Everybody looks again.
  void wake() {
    wake_at.store(kNobody, std::memory_order_seq_cst);
    epoch.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&epoch);
  }
};

}  // namespace te
