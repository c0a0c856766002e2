// Targets, flights and prepared transfers: what stays the same in writes that are made again and again.
//
// A *target* is a list of members (remote region and counter of each) in the order in which this engine writes to them. A *flight* is one
// scatter under way: an operation for each member, whose constant fields are filled in once. Flights are used again, so a
// scatter allocates nothing once as many of them exist as are under way at a time.
//
// Threads. Callers fill flights in under the target's mutex. The worker owns a flight from the command ring until the last of its
// operations has drained, and the templates always. It gives flights back through a stack that callers empty as a whole (so there is no ABA).
//
// Life. `users` counts the open handle, and every flight and post under way; whoever takes it to zero frees what is inside and recycles
// the table's entry. From zero nobody gets up again: enter() refuses.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "proxy/operation.h"
#include "proxy/tables.h"

namespace te {

struct Target;

// Handle-counted use of an entry of a Table; see above.
struct Shared : TableEntry {
  std::atomic<uint32_t> users{0};
  std::atomic<bool> open{false};

  void born() {
    users.store(1, std::memory_order_relaxed);
    open.store(true, std::memory_order_release);
  }
  // True: `users` holds one more, and the object is the one that the handle means.
  bool enter(te_handle as_handle, bool* was_last) {
    *was_last = false;
    uint32_t now = users.load(std::memory_order_relaxed);
    do {
      if (now == 0) return false;
    } while (!users.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_relaxed));
    if (open.load(std::memory_order_acquire) && handle.load(std::memory_order_acquire) == as_handle) return true;
    *was_last = leave();
    return false;
  }
  void stay() { users.fetch_add(1, std::memory_order_relaxed); }  // by one who is inside
  // True for the last: to be recycled by the caller.
  bool leave() { return users.fetch_sub(1, std::memory_order_acq_rel) == 1; }
};

struct Member {
  Peer* peer = nullptr;  // null: missing, see te_target_replace
  RemoteRegion* remote = nullptr;
  RemoteCounter* counter = nullptr;
  te_handle remote_handle = TE_NONE, counter_handle = TE_NONE;
  uint64_t length = 0;  // of the remote region
  bool held = false;    // worker only: kept from being recycled
  bool only_notified = false;
};

// What a scatter sends to one member, all but the addresses, the length and the context: one request per NIC of ours, valid while the
// peer's epoch is the one under which it was filled in. Worker only.
struct Template {
  uint64_t epoch = 0;
  const RemoteRegion* remote = nullptr;
  const RemoteCounter* counter = nullptr;
  uint8_t nics = 0;                     // that can be used
  uint8_t nic_of[TE_MAX_NICS] = {};     // [0, nics): ours
  uint8_t remote_of[TE_MAX_NICS] = {};  // by our NIC: the peer's
};

struct Flight {
  Target* target = nullptr;
  Flight* next = nullptr;                // in the target's stacks
  Link<Flight> link;                     // among those that the worker has not gone through yet
  std::unique_ptr<Operation[]> entries;  // in the order of posting
  std::unique_ptr<Part[]> parts;
  te_transfer* transfer = nullptr;
  Region* region = nullptr;
  int64_t deadline_ns = 0;
  uint64_t cut_above = 0;  // members with more bytes are cut over NICs
  uint32_t posted = 0;     // entries that had their turn
  uint32_t remaining = 0;  // entries that have not drained, and 1 until all had their turn; worker only
  uint32_t cursor = 0;     // rotates over NICs
  bool flush = false;
};

struct Target : Shared {
  uint32_t count = 0;
  std::vector<uint32_t> order;  // [position] -> member
  std::vector<Member> members;  // [position]; `mutex`
  std::mutex mutex;
  std::vector<std::unique_ptr<Flight>> flights;  // all that were made; `mutex`
  Flight* spare = nullptr;                       // `mutex`
  // Scatters that have not ended. Those that have, but have not drained (their peer does not answer), keep their flight and
  // do not count: the windows of the lost session bound how many they can be.
  std::atomic<uint32_t> under_way{0};
  std::atomic<Flight*> returned{nullptr};

  // Worker only.
  std::vector<Template> templates;    // [position]
  std::vector<WorkRequest> requests;  // [position * NICs + NIC]
  std::vector<Member> claimed;        // [position]: what is kept from being given up while the target is open
  uint32_t round = 0;                 // of scatters
};

// A transfer that was checked once. Pages are shared by all posts of it.
struct Prepared : Shared {
  OperationKind kind = OperationKind::kWrite;
  te_handle region_handle = TE_NONE;
  Region* region = nullptr;
  Member member;
  bool flush = false;
  uint64_t source_offset = 0, target_offset = 0, length = 0, page_count = 0;
  PageList* pages = nullptr;
  // kScatter
  te_handle target = TE_NONE;
  uint32_t shard = TE_SHARD_AUTO;
  std::vector<int64_t> source_offsets, lengths, target_offsets;
};

}  // namespace te
