// Where the worker leaves what applications pick up: received messages, and events for the dispatcher. Callers take a mutex here; the
// worker takes it only to hand over a message or a peer's loss, never for a write.
//
// Ended transfers that asked for an event are pushed on a lock-free stack through the record itself (te_transfer::next), so the hand-over cannot be
// full and allocates nothing; the dispatcher takes the whole stack at once and turns it round. An eventfd is written when the stack was
// empty before: one system call per burst.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>

#include "native/system.h"
#include "proxy/transfer.h"

namespace te {

struct Peer;

struct InboxMessage {
  Peer* peer = nullptr;
  int32_t peer_index = -1;
  uint32_t session = 0;
  uint8_t* data = nullptr;  // malloc'ed; null when length is 0
  uint64_t length = 0;
};

class Inbox {
 public:
  ~Inbox() {
    for (InboxMessage& message : messages_) std::free(message.data);
  }

  void push(const InboxMessage& message) {
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(message);
    }
    ready_.notify_one();
  }

  // False when none came in time or the inbox was shut.
  bool pop(InboxMessage* out, int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    const auto something = [&] { return !messages_.empty() || shut_; };
    if (!something() && timeout_ns > 0)
      ready_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(timeout_ns, kLongestWait)), something);
    if (messages_.empty()) return false;
    *out = messages_.front();
    messages_.pop_front();
    return true;
  }

  void shut() {
    {
      const std::lock_guard lock(mutex_);
      shut_ = true;
    }
    ready_.notify_all();
  }

 private:
  static constexpr int64_t kLongestWait = 3600LL * 1'000'000'000;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<InboxMessage> messages_;
  bool shut_ = false;
};

// A watcher's place in the event stack. It lies in an object that is never freed while the engine lives, so an event of a watcher that was
// closed meanwhile finds no handle, or that of the watcher which has its place now: then it says no more than "look".
//
// `pending` is set by the worker before it pushes (so it is in the stack once at most) and cleared by the fetching thread after it has
// read `next`. A change is either seen by who fetches, since both are read-modify-writes of one word and who takes the
// notice looks at the watcher's value afterwards, or finds `pending` clear and is pushed anew.
struct WatcherNotice {
  const std::atomic<te_handle>* handle = nullptr;
  std::atomic<bool> pending{false};
  WatcherNotice* next = nullptr;

  explicit WatcherNotice(const std::atomic<te_handle>* of) : handle(of) {}
};

class Events {
 public:
  Events() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Events() {
    if (fd_ >= 0) close(fd_);
  }
  bool ok() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  // Worker. The record's engine reference goes with it.
  void push(te_transfer* transfer) {
    te_transfer* head = stack_.load(std::memory_order_relaxed);
    do {
      transfer->next = head;
    } while (!stack_.compare_exchange_weak(head, transfer, std::memory_order_acq_rel, std::memory_order_relaxed));
    if (head == nullptr) wake();
  }
  // Worker.
  void push(WatcherNotice* notice) {
    if (notice->pending.exchange(true, std::memory_order_acq_rel)) return;
    WatcherNotice* head = notices_.load(std::memory_order_relaxed);
    do {
      notice->next = head;
    } while (!notices_.compare_exchange_weak(head, notice, std::memory_order_acq_rel, std::memory_order_relaxed));
    if (head == nullptr) wake();
  }
  void push_lost(int32_t peer) {
    {
      const std::lock_guard lock(mutex_);
      lost_.push_back(peer);
    }
    wake();
  }
  void push_message() {
    if (!message_.exchange(true, std::memory_order_acq_rel)) wake();
  }
  void shut() {
    shut_.store(true, std::memory_order_release);
    wake();
  }
  void wake() {
    const uint64_t one = 1;
    static_cast<void>(!write(fd_, &one, sizeof one));
  }

  // One thread at a time. TE_OK, TE_AGAIN or TE_ERR_CLOSED.
  int32_t fetch(int64_t timeout_ns, te_event* out, uint32_t capacity, uint32_t* count) {
    const bool was_shut = shut_.load(std::memory_order_acquire);  // before the look: what came until then is seen by it
    *count = take(out, capacity);
    if (*count > 0) return TE_OK;
    if (was_shut) return TE_ERR_CLOSED;
    pollfd p{fd_, POLLIN, 0};
    const int64_t ms = std::min<int64_t>((timeout_ns + 999'999) / 1'000'000, 3'600'000);
    poll(&p, 1, static_cast<int>(ms));
    uint64_t drained;
    static_cast<void>(!read(fd_, &drained, sizeof drained));
    *count = take(out, capacity);
    return *count > 0 ? TE_OK : TE_AGAIN;
  }

 private:
  uint32_t take(te_event* out, uint32_t capacity) {
    uint32_t count = 0;
    if (count < capacity && message_.exchange(false, std::memory_order_acq_rel))
      out[count++] = {TE_EVENT_MESSAGE, -1, 0, nullptr};
    {
      const std::lock_guard lock(mutex_);
      while (count < capacity && !lost_.empty()) {
        out[count++] = {TE_EVENT_PEER_LOST, lost_.front(), 0, nullptr};
        lost_.pop_front();
      }
    }
    if (pending_ == nullptr) {
      te_transfer* newest_first = stack_.exchange(nullptr, std::memory_order_acq_rel);
      while (newest_first != nullptr) {  // oldest first
        te_transfer* next = newest_first->next;
        newest_first->next = pending_;
        pending_ = newest_first;
        newest_first = next;
      }
    }
    while (count < capacity && pending_ != nullptr) {
      te_transfer* t = pending_;
      pending_ = t->next;
      out[count++] = {TE_EVENT_TRANSFER, t->peer, t->user, t};
    }
    if (taken_notices_ == nullptr) taken_notices_ = notices_.exchange(nullptr, std::memory_order_acq_rel);
    while (count < capacity && taken_notices_ != nullptr) {
      WatcherNotice* notice = taken_notices_;
      taken_notices_ = notice->next;  // from the next line on it may be pushed again
      notice->pending.exchange(false, std::memory_order_acq_rel);
      const te_handle handle = notice->handle->load(std::memory_order_acquire);
      if (handle != TE_NONE) out[count++] = {TE_EVENT_WATCHER, -1, handle, nullptr};
    }
    return count;
  }

  const int fd_;
  std::atomic<te_transfer*> stack_{nullptr};
  te_transfer* pending_ = nullptr;  // fetched but not yet delivered; the fetching thread's
  std::atomic<WatcherNotice*> notices_{nullptr};
  WatcherNotice* taken_notices_ = nullptr;  // likewise
  std::atomic<bool> message_{false}, shut_{false};
  std::mutex mutex_;
  std::deque<int32_t> lost_;
};

}  // namespace te
