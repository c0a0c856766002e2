// What callers' threads and the worker share: regions, remote regions, counters and remote counters. Tables of fixed capacity whose
// entries never move; an entry is created under the table's mutex and read through an atomic pointer without one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "native/alarm.h"
#include "native/immediate.h"
#include "native/list.h"
#include "native/provider.h"
#include "native/system.h"

namespace te {

struct Peer;
struct Operation;
namespace gpu {
struct Cuda;
}

// Handle -> object. A handle is an index (20 bits) and a reuse count (44 bits: it never comes round). Objects are never freed while the engine lives, only
// recycled under a new handle, so a thread that holds a stale handle finds either nothing or an object whose handle differs from
// its own: never freed memory. Whoever acts on an object must therefore check the handle *after* it made its use known
// (Region::enter), or let the worker, the only one that recycles, check it (remote objects).
template <typename T>
class Table {
 public:
  static constexpr uint32_t kIndexBits = 20;
  static constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;
  static constexpr uint32_t kMaxCapacity = kIndexMask;  // its last index is that of TE_NONE

  explicit Table(uint32_t capacity) : capacity_(capacity), entries_(new std::atomic<T*>[capacity]) {
    for (uint32_t i = 0; i < capacity; ++i) entries_[i].store(nullptr, std::memory_order_relaxed);
  }
  ~Table() {
    for (uint32_t i = 0; i < used_; ++i) delete entries_[i].load(std::memory_order_relaxed);
  }
  Table(const Table&) = delete;

  // `prepare` fills the object in before its handle is published. Null when the table is full.
  template <typename F>
  T* add(F&& prepare) {
    const std::lock_guard lock(mutex_);
    uint32_t index;
    uint64_t reuse = 0;
    T* item;
    if (!free_.empty()) {
      index = free_.back();
      free_.pop_back();
      item = entries_[index].load(std::memory_order_relaxed);
      reuse = item->reuse + 1;
    } else if (used_ < capacity_) {
      index = used_++;
      item = new T;
      entries_[index].store(item, std::memory_order_release);
    } else {
      return nullptr;
    }
    item->reuse = reuse;
    prepare(*item);
    item->handle.store(index | reuse << kIndexBits, std::memory_order_release);
    ++live_;
    return item;
  }

  // Null for a handle that was never given or was recycled.
  T* get(te_handle handle) const {
    const uint32_t index = static_cast<uint32_t>(handle) & kIndexMask;
    if (index >= capacity_) return nullptr;
    T* item = entries_[index].load(std::memory_order_acquire);
    return item != nullptr && item->handle.load(std::memory_order_acquire) == handle ? item : nullptr;
  }

  // The object at the handle's place, whatever its handle is now.
  T* peek(te_handle handle) const {
    const uint32_t index = static_cast<uint32_t>(handle) & kIndexMask;
    return index < capacity_ ? entries_[index].load(std::memory_order_acquire) : nullptr;
  }

  // The object may be given out again. After this call get() of its old handle gives null.
  void recycle(T* item) {
    const std::lock_guard lock(mutex_);
    const te_handle handle = item->handle.exchange(TE_NONE, std::memory_order_acq_rel);
    free_.push_back(static_cast<uint32_t>(handle) & kIndexMask);
    --live_;
  }

  uint32_t capacity() const { return capacity_; }
  uint32_t live() const {
    const std::lock_guard lock(mutex_);
    return live_;
  }
  // Those that have a handle at the time of the call.
  template <typename F>
  void for_each(F&& visit) const {
    uint32_t used;
    {
      const std::lock_guard lock(mutex_);
      used = used_;
    }
    for (uint32_t i = 0; i < used; ++i) {
      T* item = entries_[i].load(std::memory_order_acquire);
      if (item != nullptr && item->handle.load(std::memory_order_acquire) != TE_NONE) visit(*item);
    }
  }

 private:
  const uint32_t capacity_;
  const std::unique_ptr<std::atomic<T*>[]> entries_;
  mutable std::mutex mutex_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;
  uint32_t live_ = 0;
};

struct TableEntry {
  std::atomic<te_handle> handle{TE_NONE};
  uint64_t reuse = 0;
};

// How the NICs get at a region: TE_REACH_*.
enum class Reach : uint8_t {
  kHost = TE_REACH_HOST,
  kDmabuf = TE_REACH_DMABUF,
  kPeerMemory = TE_REACH_PEER_MEMORY,
  kStaged = TE_REACH_STAGED
};

// A registered span of this engine's memory.
//
// Closing against use. A submitting thread does: users + 1 (seq_cst), then reads `open` (seq_cst); if closed it takes its 1 back and
// refuses. The closing thread does: open = false (seq_cst), then reads users (seq_cst). In the single total order of these four
// either the submitter sees the region closed, or the closer sees its use and waits for it. The worker takes the 1 back
// when the operation has drained.
struct Region : TableEntry {
  uint64_t serial = 0;
  MemorySpan span;
  OwnedDescriptor dmabuf;       // the one in `span`: new keys may be needed after the caller has closed its own
  MemoryKey keys[TE_MAX_NICS];  // changed by the worker only (new keys), under `mutex`; none where staged
  Reach reach = Reach::kHost;
  uint64_t buffer_id = 0;  // of GPU memory: what must still be there when it is used; 0: not known
  const gpu::Cuda* cuda = nullptr;
  std::atomic<bool> open{true};
  std::atomic<uint32_t> users{0};
  std::mutex mutex;        // keys against describe
  std::mutex close_mutex;  // one closing thread at a time

  // Worker only.
  std::vector<Peer*> holders;           // peers that have attached it
  std::vector<Peer*> waiting_holders;   // that asked while it was being re-keyed
  std::vector<Peer*> fence_requesters;  // that are told when it has new keys
  Operation* closing = nullptr;         // the operation that revokes it
  bool rekeying = false;
  bool deregistered = false;
  uint32_t arriving = 0;  // staged: copies into it that are under way

  bool staged() const { return reach == Reach::kStaged; }
  bool enter(te_handle as_handle) {
    users.fetch_add(1, std::memory_order_seq_cst);
    if (open.load(std::memory_order_seq_cst) && handle.load(std::memory_order_acquire) == as_handle) return true;
    users.fetch_sub(1, std::memory_order_release);
    return false;
  }
  void leave() { users.fetch_sub(1, std::memory_order_release); }
};

enum class Attachment : uint32_t { kNew, kAttaching, kAttached, kRevoked, kRefused };

// Something of a peer's that this engine uses: the initiator's half of the attach and revoke protocol.
// kRevoked is final: the owner closed it. Recycled by the worker once revoked and unused.
struct Remote : TableEntry {
  Peer* peer = nullptr;
  uint64_t serial = 0;
  std::atomic<Attachment> state{Attachment::kNew};
  // Of the life before this one: so that a stale handle can say why it is stale.
  std::atomic<te_handle> former_handle{TE_NONE};
  std::atomic<Peer*> former_peer{nullptr};
  std::atomic<bool> former_closed{false};  // by its owner; else it was given up to make room, and may be had anew
  uint64_t former_serial = 0, former_length = 0;  // worker only

  // Worker only.
  uint32_t in_flight = 0;       // work requests that use it
  bool listed = false;          // in the peer's map
  uint32_t operations = 0;      // admitted operations that point here
  bool revoke_pending = false;  // acknowledge when in_flight is 0
  bool exhausted = false;       // kRefused because the owner's ids or indices ran out
};

struct RemoteRegion : Remote {
  uint64_t length = 0;
  uint32_t slot_bytes = 0;  // not 0: reached through slots of so many bytes, whose keys these are; see proxy/staging.h
  // A fence that ended operations need: nothing new is posted, what can still complete does, then the owner is asked.
  enum class Fence : uint8_t { kNone, kDraining, kAsked };
  Fence fence = Fence::kNone;
  uint64_t base[TE_MAX_NICS] = {}, key[TE_MAX_NICS] = {};  // per NIC of the peer; worker only once attached
};

struct RemoteCounter : Remote {
  uint16_t id = 0;
  uint16_t counter_index = 0;
};

struct Binding;

// A counter of this engine. Only the worker raises it. Woken, too, when a peer was lost, and when the counter or the engine is closed.
struct Counter : TableEntry, Alarm {
  uint64_t serial = 0;
  std::atomic<uint64_t> value{0};
  std::atomic<bool> open{true};
  std::mutex close_mutex;

  // Worker only.
  struct Holder {
    Peer* peer = nullptr;
    uint16_t id = 0;
    uint16_t index = 0;
  };
  std::vector<Holder> holders;
  std::vector<Operation*> armed;   // te_counter_reached
  std::vector<Binding*> bindings;  // flags that rise with it
  Operation* closing = nullptr;
};

}  // namespace te
