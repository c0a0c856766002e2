#include "native/system.h"

namespace te {
namespace {

std::atomic<uint32_t> forks{0};

const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint32_t fork_generation() {
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace te
