// Keeps registration out of the provider while the worker thread is inside. `net` and `tcp` of libfabric look a key up
// without the lock under which fi_mr_reg changes the table, whatever FI_THREAD_SAFE promises: traffic beside
// registration fails or crashes (1.17, measured). Only the tcp transport has a gate; its registration takes
// microseconds, and an uncontended pass is nothing beside the system call of a write.
#pragma once

#include <sched.h>

#include <atomic>
#include <mutex>

namespace te::efa {

class Gate {
 public:
  // The worker, around every call that may move data. It polls without pause and would win the mutex again and again,
  // so it steps back while somebody waits.
  void enter() {
    if (!enabled_) return;
    while (waiting_.load(std::memory_order_relaxed) > 0) [[unlikely]]
      sched_yield();
    mutex_.lock();
  }
  void leave() {
    if (enabled_) mutex_.unlock();
  }

  // Any thread that registers or deregisters.
  void lock() {
    if (!enabled_) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() { leave(); }

  void enable() { enabled_ = true; }  // before there are two threads

 private:
  bool enabled_ = false;
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

// Inside for the scope.
class Passage {
 public:
  explicit Passage(Gate& gate) : gate_(gate) { gate_.enter(); }
  ~Passage() { gate_.leave(); }
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

 private:
  Gate& gate_;
};

}  // namespace te::efa
