// Flags, watchers, bindings and triggers: what CPU and GPU tell each other through shared words (native/gpu/words.h).
//
// Threads. Callers open, describe and close; they raise flags and watchers. The worker owns what it goes through in a round: the bindings
// of a counter, the watchers that it looks at, the triggers and what they owe. Callers hand such things over as *orders*, and wait for
// each: when closing a binding or cancelling a trigger returns, the worker has let go of it.
//
// Life. All four are Shared entries of tables: the open handle counts once, the worker's hold once, each transfer under way of a trigger
// once; bindings and triggers count in the flags that they raise. The last one to leave gives the words back and recycles the entry.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "native/alarm.h"
#include "native/gpu/words.h"
#include "native/list.h"
#include "proxy/group.h"
#include "proxy/inbox.h"
#include "proxy/tables.h"
#include "proxy/watch_block.h"

namespace te {

struct DeviceWords;
struct Trigger;

// Raised by the worker and by callers, at the same time; never falls.
//
// In host and mapped memory the word itself is the number: a raise is one read-modify-write on it, with release, so whoever reads the
// new epoch sees what came before each raise up to it (the raises form one release sequence).
// A gdr word can only be stored to, and its stores must not go backwards. There `epoch_` is the number, and one thread at a time stores
// it: a raise adds to `epoch_` and, unless somebody is `publishing_`, takes that part and stores until the word is what `epoch_` is.
//   All accesses to the two are seq_cst. If a raiser finds somebody publishing, its add stands before its look, and the look before that
//   thread's publishing_ = false, which that thread does before it reads epoch_ again: so it sees the add, and goes round once more.
//   Nobody waits: neither the worker for a caller nor the other way round.
struct Flag : Shared, Alarm {
  int32_t device = -1;
  DeviceWords* words = nullptr;  // where these are from
  gpu::Words* epochs = nullptr;  // of these, for the word
  gpu::Word word, control, taken;
  std::atomic<int32_t> abort_peer{-1};

  uint64_t value() const {
    return word.kind == gpu::WordKind::kGdr ? epoch_.load(std::memory_order_acquire)
                                            : word.host->load(std::memory_order_acquire);
  }
  void raise(uint64_t by) {
    if (word.kind != gpu::WordKind::kGdr)
      return wake_if_reached(word.host->fetch_add(by, std::memory_order_acq_rel) + by);
    const uint64_t now = epoch_.fetch_add(by, std::memory_order_seq_cst) + by;
    publish();
    wake_if_reached(now);
  }
  void forget_epoch() { epoch_.store(0, std::memory_order_relaxed); }

  // control[0] and [1]. Waits poll the first, on the device, too; the device writes both. The reason that came first stands, but for the end.
  std::atomic<uint64_t>& abort_word() const { return control.host[0]; }
  std::atomic<uint64_t>& early() const { return control.host[1]; }
  void abort(uint64_t why, int32_t peer) {
    if (why == TE_ABORT_CLOSED) {
      abort_word().store(why, std::memory_order_release);
    } else if (abort_word().load(std::memory_order_relaxed) == TE_ABORT_NONE) {  // one thread says so, the worker
      abort_peer.store(peer, std::memory_order_relaxed);  // before the word: who reads that one reads this
      uint64_t none = TE_ABORT_NONE;
      static_cast<void>(abort_word().compare_exchange_strong(none, why, std::memory_order_release));
    }
    wake();
  }

 private:
  void publish() {
    while (!publishing_.exchange(true, std::memory_order_seq_cst)) {
      const uint64_t now = epoch_.load(std::memory_order_seq_cst);
      gpu::store_word(word, now);
      publishing_.store(false, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) == now) return;
    }
  }
  std::atomic<uint64_t> epoch_{0};
  std::atomic<bool> publishing_{false};
};

// Counter -> flag. The worker's, but for its life.
struct Binding : Shared {
  Counter* counter = nullptr;  // null: not held by the worker
  te_handle counter_handle = TE_NONE;
  Flag* flag = nullptr;
  uint64_t every = 1;
  uint64_t next_at = 0;  // the counter's value with which the flag rises next
  std::vector<int32_t> peers;
  Link<Binding> link;  // among those that name peers

  // How often the flag rises with this value.
  uint64_t due(uint64_t value) {
    if (value < next_at) return 0;
    const uint64_t times = (value - next_at) / every + 1;
    next_at = times > (UINT64_MAX - next_at) / every ? UINT64_MAX : next_at + times * every;
    return times;
  }
};

// One thread raises the word at a time, or several threads of the CPU; the worker only reads it.
struct Watcher : Shared {
  int32_t device = -1;
  gpu::Words* words = nullptr;  // where the word is from
  gpu::Word word;
  std::atomic<uint64_t> seen{0};       // by the worker
  std::atomic<uint64_t> delivered{0};  // by te_watcher_take
  std::atomic<uint32_t> armed{0};      // triggers
  WatcherNotice notice{&handle};

  // Worker only.
  std::vector<Trigger*> triggers;
  bool notify = false;
  bool listed = false;  // in its block

  uint64_t value() const { return word.host->load(std::memory_order_acquire); }
};

// A prepared transfer that is posted by the worker when its watcher rises.
struct Trigger : Shared, Alarm {
  te_handle prepared = TE_NONE;
  Flag* posted_flag = nullptr;
  Flag* completed_flag = nullptr;
  uint64_t every = 1, first = 1;
  int64_t timeout_ns = 0;
  Published<uint64_t> fired, posted, completed;
  Published<uint64_t> asked;        // firings due with the value seen: never less than fired
  std::atomic<uint64_t> failed{0};  // with release, after first_error
  Published<int64_t> last_post_ns;
  te_error first_error{};  // written once, before `failed` leaves zero
  std::atomic<bool> active{false};

  // Worker only.
  Watcher* watcher = nullptr;  // null: cancelled
  Link<Trigger> owed_link;
};

// What a caller asks of the worker. It holds what it names until the worker is through with it.
struct Order {
  enum class Kind { kBind, kUnbind, kNotify, kForgetWatcher, kArm, kCancel };
  Kind kind = Kind::kBind;
  Binding* binding = nullptr;
  Watcher* watcher = nullptr;
  Trigger* trigger = nullptr;
  bool on = false;
};

// Both sides hold it: a caller that has waited long enough leaves.
struct PendingOrder {
  explicit PendingOrder(const Order& order) : order(order) {}
  const Order order;
  Status outcome = Status::kOk;  // before `done`
  const char* why = "";
  PendingOrder* next = nullptr;
  std::atomic<uint32_t> done{0};  // futex
  std::atomic<uint32_t> holders{2};

  void leave() {
    if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

// Pushed by any caller, taken as a whole by the worker: no ABA. Release on push, acquire on take. Once shut, nothing is pushed any more.
class Orders {
 public:
  bool push(PendingOrder* order) {
    PendingOrder* head = head_.load(std::memory_order_relaxed);
    do {
      if (head == &shut_) return false;
      order->next = head;
    } while (!head_.compare_exchange_weak(head, order, std::memory_order_seq_cst, std::memory_order_relaxed));
    return true;
  }
  bool empty() const { return head_.load(std::memory_order_seq_cst) == nullptr; }
  bool maybe_empty() const { return head_.load(std::memory_order_relaxed) == nullptr; }
  // Oldest first.
  PendingOrder* take(bool for_good = false) {
    PendingOrder* newest = head_.exchange(for_good ? &shut_ : nullptr, std::memory_order_acq_rel);
    PendingOrder* oldest = nullptr;
    while (newest != nullptr) {
      PendingOrder* next = newest->next;
      newest->next = oldest;
      oldest = newest;
      newest = next;
    }
    return oldest;
  }

 private:
  std::atomic<PendingOrder*> head_{nullptr};
  PendingOrder shut_{Order{}};
};

// The words of one device, or of the host. Made by callers, under Coordination::mutex; then they stay.
struct DeviceWords {
  DeviceWords(int device, uint32_t most);
  gpu::Words epochs;    // a line each: those who poll one are not disturbed by the raises of others
  gpu::Words controls;  // a line each
  gpu::Words taken;
  gpu::Words watched;  // dense
  // Of kind gdr, before `epochs` and `watched`; null where the CPU cannot store there, or is better off without.
  std::unique_ptr<gpu::Words> gdr_epochs, gdr_watched;
};

struct Coordination {
  static constexpr uint32_t kMost = 1u << 14;  // of each
  std::mutex mutex;                            // devices
  std::map<int32_t, std::unique_ptr<DeviceWords>> devices;
  Table<Flag> flags{kMost};
  Table<Binding> bindings{kMost};
  Table<Watcher> watchers{kMost};
  Table<Trigger> triggers{kMost};
  Orders orders;
};

}  // namespace te
