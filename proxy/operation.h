// An operation: one command from a caller to the worker, and the cursor with which the worker turns it into work requests.
// Filled in by the submitting thread, handed over through the command ring, then owned by the worker.
//
// Cutting. A write or page list is cut into parts, one per NIC used; a part into units, each one work request:
//   write: unit u of a part is its u-th chunk.     pages: unit u is chunk u % c of page u / c, with c chunks in a page.
// The units of a part go out in two phases: first the *body*, plain writes; then the *final* units, which carry the immediates.
// Without a counter all units are body. On a transport that keeps order the final units follow at once; otherwise they wait until
// the body has completed with delivery semantics.
//
// Counting pages. A part of n pages has f = ceil(n / 65536) final units, whose immediates carry counts that add up to n.
// When a final immediate arrives, every body unit is in memory, and so is its own unit. Let p be the final units not yet placed: at
// most p pages are incomplete, and each of those p immediates carries a count of at least 1, so what has been counted is
// at most n - p: never more than the pages that are wholly in memory, whatever the order of arrival.
// With TE_PAGES_EACH (unordered transports, short lists) each page carries its own immediate with count 1 and all is body; this
// needs pages of one chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "native/immediate.h"
#include "native/list.h"
#include "native/sharding.h"
#include "proxy/tables.h"
#include "proxy/transfer.h"

namespace te {

enum class OperationKind : uint8_t {
  kWrite,
  kPages,
  kBatch,    // a chain of writes and page lists that share one transfer
  kScatter,  // a flight: see proxy/group.h
  kMessage,
  kConnect,
  kDisconnect,
  kFence,
  kCounterReached,
  kCloseRegion,
  kCloseCounter,
  kClaimTarget,   // keeps what a target names
  kReleaseTarget  // and lets it go
};

enum class Phase : uint8_t { kBody, kFinal, kFlush };

// Which list of its peer an operation hangs in.
enum class Queue : uint8_t { kNone, kWaiting, kReady, kMessages };

// Index arrays as they were at the call. Blocks are reused: see Engine::page_lists.
struct PageList {
  PageList* next = nullptr;  // in the stack of retired blocks
  uint64_t capacity = 0;     // bytes behind this header
  uint64_t source_stride = 0, target_stride = 0;
  uint8_t source_index_bytes = 8, target_index_bytes = 8;
  uint64_t target_begin = 0;  // byte offset of the target indices behind the header

  uint8_t* data() { return reinterpret_cast<uint8_t*>(this + 1); }
  static uint64_t load(const uint8_t* at, uint64_t i, uint8_t width) {
    if (width == 8) {
      uint64_t value;
      std::memcpy(&value, at + 8 * i, 8);
      return value;
    }
    uint32_t value;
    std::memcpy(&value, at + 4 * i, 4);
    return value;
  }
  uint64_t source(uint64_t page) { return load(data(), page, source_index_bytes) * source_stride; }
  uint64_t target(uint64_t page) { return load(data() + target_begin, page, target_index_bytes) * target_stride; }
};

// One NIC's share of an operation.
struct Part {
  uint64_t begin = 0;   // bytes (write) or pages (page list)
  uint64_t extent = 0;  // likewise
  uint64_t units = 0;
  uint64_t next = 0;    // the first unit that was not posted
  uint32_t finals = 0;  // how many of the units are final
  uint8_t nic = 0;
};

struct Operation;
struct Flight;
struct Target;
struct Prepared;

// The entries of a batch live in one heap block, freed when the last has drained.
struct BatchBlock {
  uint32_t remaining = 0;
  std::unique_ptr<Operation[]> entries;
  std::unique_ptr<Part[]> parts;
};

struct Operation {
  Link<Operation> queue_link;   // waiting, ready or message list of its peer
  Link<Operation> active_link;  // all that the worker knows: deadlines
  Operation* chain = nullptr;   // kBatch: the first entry; entries: the next one
  static constexpr uint32_t kNoSlab = 0xFFFFFFFFu;
  uint32_t slab_index = kNoSlab;  // entries of a batch have none
  BatchBlock* block = nullptr;    // and this instead
  Flight* flight = nullptr;       // entries of a flight: and this; kScatter: the flight
  Target* target = nullptr;       // kClaimTarget, kReleaseTarget
  Prepared* prepared = nullptr;   // whose pages these are
  static constexpr uint32_t kNoMember = 0xFFFFFFFFu;
  uint32_t member = kNoMember;  // entries of a flight: its number

  OperationKind kind = OperationKind::kWrite;
  Phase phase = Phase::kBody;
  Queue queue = Queue::kNone;
  bool admitted = false;  // counted in remote->operations
  bool planned = false;   // the parts below are filled in
  bool stopped = false;   // nothing more is posted: failed, cancelled or timed out
  bool reported = false;  // the transfer has been told
  bool flush = false;
  bool templated = false;  // went out as one request from a template: see Worker::complete_member
  bool staged = false;     // goes in pieces: see proxy/staging.h
  bool each_page = false;  // TE_PAGES_EACH applies
  bool has_slot = false;
  bool triggered = false;  // of a trigger's firing: see Worker::firing_posted
  bool unknown = false;    // some part's outcome is unknown
  bool doubtful = false;   // ended as if the peer had died: see Worker::doubt
  int doubt_status = 0;    // of the provider
  int8_t doubt_nic = -1;
  uint8_t slot_posted = 0, slot_delivered = 0;
  uint16_t slot = 0;
  uint8_t parts = 0;
  uint8_t parts_wanted = 0;  // 0: by its length
  uint8_t first_nic = kAnyNic;
  static constexpr uint8_t kAnyNic = 0xFF;
  Status failure = Status::kOk;  // what it ended with, as far as that is known
  uint32_t in_flight = 0;

  te_transfer* transfer = nullptr;
  Peer* peer = nullptr;
  Region* region = nullptr;
  RemoteRegion* remote = nullptr;
  RemoteCounter* counter = nullptr;
  te_handle remote_handle = TE_NONE, counter_handle = TE_NONE;
  int64_t deadline_ns = 0;

  uint64_t source_offset = 0, target_offset = 0;
  uint64_t length = 0;  // kWrite: bytes; kPages: bytes of a page; kMessage: bytes
  uint64_t page_count = 0;
  uint64_t chunks = 1;                                         // per page
  uint64_t stage_next = 0, stage_pieces = 0, stage_bytes = 0;  // staged: the first piece not begun, all, bytes of one
  PageList* pages = nullptr;                                   // kPages
  std::unique_ptr<uint8_t[]> message;                          // kMessage: a copy
  uint64_t position = 0;                                       // kMessage: bytes sent
  Counter* local_counter = nullptr;                            // kCounterReached, kCloseCounter
  uint64_t threshold = 0;
  std::vector<int64_t> watched;  // kCounterReached: peers whose loss ends the wait; kFence: regions not yet certain
  bool started = false;          // kFence, kClose*: holders were asked; kMessage: its first fragment is out
  int64_t patience_ns =
      0;                 // kFence: until when the peer's own word is awaited; ended writes: when a fence is asked for
  uint32_t session = 0;  // of the peer: kFence, kDisconnect: when it began; writes: when it posted last

  // One per NIC of the engine: with several NICs they lie in the slab's (or the batch's) own array, so that operations stay small.
  Part* part = &only_part;
  Part only_part;

  Operation() = default;
  Operation(const Operation&) = delete;

  // As before it was first posted.
  void rewind() {
    phase = Phase::kBody;
    queue = Queue::kNone;
    admitted = planned = stopped = reported = templated = staged = has_slot = triggered = unknown = doubtful = false;
    slot_posted = slot_delivered = parts = parts_wanted = 0;
    first_nic = kAnyNic;
    failure = Status::kOk;
    in_flight = 0;
    patience_ns = 0;
    session = 0;
  }

  // Ready for the next caller. The parts are filled in anew by plan.
  void reset() {
    rewind();
    queue_link = active_link = {};
    chain = nullptr;
    block = nullptr;
    flight = nullptr;
    target = nullptr;
    prepared = nullptr;
    member = kNoMember;
    kind = OperationKind::kWrite;
    flush = each_page = started = false;
    transfer = nullptr;
    peer = nullptr;
    region = nullptr;
    remote = nullptr;
    counter = nullptr;
    remote_handle = counter_handle = TE_NONE;
    deadline_ns = 0;
    page_count = position = threshold = 0;
    pages = nullptr;
    message.reset();
    local_counter = nullptr;
    watched.clear();
  }
};

}  // namespace te
