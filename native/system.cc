#include "native/system.h"

namespace te {
namespace {

std::atomic<uint32_t> forks{0};

constexpr size_t kMostHeld = 8;
std::mutex* held[kMostHeld];
std::atomic<size_t> held_count{0};
size_t locked = 0;  // by the fork under way; forks take turns at the first of the mutexes

void before_fork() {
  const size_t count = held_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) held[i]->lock();
  locked = count;
}
void after_fork() {
  for (size_t i = locked; i > 0; --i) held[i - 1]->unlock();
}

const int registered = pthread_atfork(before_fork, after_fork, [] {
  after_fork();
  forks.fetch_add(1, std::memory_order_relaxed);
});

}  // namespace

void hold_across_forks(std::mutex* mutex) {
  static std::mutex adding;
  const std::lock_guard lock(adding);
  const size_t count = held_count.load(std::memory_order_relaxed);
  if (count == kMostHeld) return;
  held[count] = mutex;
  held_count.store(count + 1, std::memory_order_release);
}

uint32_t fork_generation() {
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace te
