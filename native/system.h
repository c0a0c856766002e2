// The few things the core asks of the operating system: time, randomness, futexes, a pause instruction, fork detection.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace te {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// now + timeout without overflow; negative timeouts are the caller's to resolve.
inline int64_t deadline_after(int64_t now, int64_t timeout_ns) {
  return timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

// A number that one thread changes and any thread may read: no locked instruction.
template <typename T>
class Published {
 public:
  Published() = default;
  Published(const Published& other) : value_(other.get()) {}
  Published& operator=(const Published& other) { return *this = other.get(); }
  Published& operator=(T value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  T get() const { return value_.load(std::memory_order_relaxed); }
  operator T() const { return get(); }
  Published& operator+=(T by) { return *this = get() + by; }
  Published& operator-=(T by) { return *this = get() - by; }
  Published& operator++() { return *this += 1; }
  Published& operator--() { return *this -= 1; }

 private:
  std::atomic<T> value_{0};
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits briefly for `done`, without a system call that sleeps: a wake-up costs tens of microseconds, a small write a few. Few pauses,
// then yields: where cores are scarce, the thread that is waited for may need this very core.
template <typename F>
bool spin_until(F&& done) {
  constexpr int kPauses = 32, kYields = 64;
  for (int i = 0; i < kPauses; ++i) {
    if (done()) return true;
    cpu_relax();
  }
  for (int i = 0; i < kYields; ++i) {
    if (done()) return true;
    sched_yield();
  }
  return done();
}

// Unpredictable bytes: identities, tokens, keys.
inline bool random_bytes(void* out, size_t length) {
  auto* bytes = static_cast<uint8_t*>(out);
  while (length > 0) {
    const ssize_t got = getrandom(bytes, length, 0);
    if (got <= 0) return false;
    bytes += got;
    length -= static_cast<size_t>(got);
  }
  return true;
}

// Owns a file descriptor.
class OwnedDescriptor {
 public:
  OwnedDescriptor() = default;
  explicit OwnedDescriptor(int fd) : fd_(fd) {}
  OwnedDescriptor(OwnedDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

// Sleeps while *word == expected, until a wake or the time-out. Spurious returns are allowed: callers loop.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns) {
  timespec t{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? nullptr : &t,
          nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// A mutex of the whole process that a fork must not catch half-way: it is held across forks, so that the child finds what it guards
// whole, and free. (An engine's own mutexes need no such care: children cannot use it.)
void hold_across_forks(std::mutex* mutex);

// How many forks lie between this process and the one that loaded the library: an engine remembers the value at
// its start, and a different one later means that the handle was inherited by a child.
uint32_t fork_generation();

}  // namespace te
