#include "proxy/transfer.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <vector>

namespace te {
namespace {

class Pool {
 public:
  te_transfer* take() {
    const std::lock_guard lock(mutex_);
    if (free_ == nullptr && !grow()) return nullptr;
    te_transfer* item = free_;
    free_ = item->next;
    alive_.fetch_add(1, std::memory_order_relaxed);
    return item;
  }

  void give_back(te_transfer* item) {
    const std::lock_guard lock(mutex_);
    item->next = free_;
    free_ = item;
    alive_.fetch_sub(1, std::memory_order_relaxed);
  }

  std::mutex* mutex() { return &mutex_; }
  uint32_t alive() const { return alive_.load(std::memory_order_relaxed); }

 private:
  bool grow() {
    constexpr size_t kChunk = 256;
    auto* chunk = new (std::nothrow) te_transfer[kChunk];
    if (chunk == nullptr) return false;
    for (size_t i = 0; i < kChunk; ++i) {
      chunk[i].next = free_;
      free_ = &chunk[i];
    }
    return true;
  }

  std::mutex mutex_;
  te_transfer* free_ = nullptr;
  std::atomic<uint32_t> alive_{0};
};

// Never destroyed: transfers may be released by interpreters that are shutting down.
Pool& pool() {
  static Pool* instance = [] {
    Pool* made = new Pool;
    hold_across_forks(made->mutex());
    return made;
  }();
  return *instance;
}

}  // namespace

te_transfer* acquire_transfer(Engine* engine, uint32_t operations) {
  te_transfer* t = pool().take();
  if (t == nullptr) return nullptr;
  t->state.store(0, std::memory_order_relaxed);
  t->references.store(2, std::memory_order_relaxed);
  t->cancel_requested.store(false, std::memory_order_relaxed);
  t->engine = engine;
  t->submitted_ns = now_ns();
  t->unfinished = operations;
  t->undrained = operations;
  t->under_way = nullptr;
  t->trigger = nullptr;
  t->trigger_posted = false;
  t->status = Status::kOk;
  t->provider_status = 0;
  t->nic = -1;
  t->peer = -1;
  t->detail[0] = '\0';
  t->taken_ns = t->first_post_ns = t->posted_ns = t->finished_ns = 0;
  t->user = 0;
  t->next = nullptr;
  return t;
}

void release_transfer(te_transfer* transfer) {
  if (transfer->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  while (te_transfer::FailedMember* failed = transfer->first_failed) {
    transfer->first_failed = failed->next;
    delete failed;
  }
  transfer->last_failed = nullptr;
  pool().give_back(transfer);
}

uint32_t transfers_alive() { return pool().alive(); }

void note_failure(te_transfer* t, Status status, int provider_status, int nic, int peer, const char* detail) {
  if (t->status != Status::kOk) return;
  t->status = status;
  t->provider_status = provider_status;
  t->nic = static_cast<int16_t>(nic);
  t->peer = peer;
  std::snprintf(t->detail, sizeof t->detail, "%s", detail);
}

// Where memory is short, the member is missing from the list; the transfer has failed all the same.
void note_member(te_transfer* t, uint32_t member, Status status, int provider_status, int nic, int peer, int64_t now,
                 const char* detail) {
  auto* failed = new (std::nothrow) te_transfer::FailedMember{member, te_error{}, nullptr};
  if (failed == nullptr) return;
  te_error& error = failed->error;
  error.status = static_cast<int32_t>(status);
  error.nic = nic;
  error.provider_status = provider_status;
  error.peer = peer;
  error.elapsed_ns = std::max<int64_t>(1, now - t->submitted_ns);  // zero means "never submitted"; `now` may be older
  std::snprintf(error.message, sizeof error.message, "%s", detail);
  (t->last_failed == nullptr ? t->first_failed : t->last_failed->next) = failed;
  t->last_failed = failed;
}

bool wait_for_bits(te_transfer* t, uint32_t bits, int64_t timeout_ns) {
  const auto set = [&] { return (t->state.load(std::memory_order_acquire) & bits) != 0; };
  if (set()) return true;
  if (timeout_ns == 0) return false;
  const int64_t deadline = timeout_ns < 0 ? INT64_MAX : deadline_after(now_ns(), timeout_ns);
  if (spin_until(set)) return true;
  for (;;) {
    const uint32_t old = t->state.fetch_or(te_transfer::kSleeper, std::memory_order_acq_rel);
    if ((old & bits) != 0) return true;
    const int64_t left = deadline - now_ns();
    if (left <= 0) return false;
    futex_wait(&t->state, old | te_transfer::kSleeper, left);
  }
}

void export_result(const te_transfer& t, te_error* out) {
  if (out == nullptr) return;
  *out = te_error{};
  out->status = static_cast<int32_t>(t.status);
  out->nic = t.nic;
  out->provider_status = t.provider_status;
  out->peer = t.peer;
  out->elapsed_ns = t.finished_ns - t.submitted_ns;
  std::snprintf(out->message, sizeof out->message, "%s", t.detail);
}

}  // namespace te
