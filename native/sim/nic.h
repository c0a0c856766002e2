// One simulated NIC: its registrations, paths, operations in flight, posted receives and completion queue.
//
// Called with the fabric's mutex held; the only exceptions are idle(), serial() and wait_fd(). Time is the number of
// polls of this NIC that found work. An operation is in its path's list from post to end, and besides in at most one
// place: the schedule (a heap by due time) or its path's `stalled` (nothing can happen until somebody wakes the path).
// In neither: it waits for its predecessor (ordered mode).
//
// Files: nic.cc (memory, paths, receives), nic_post.cc (posting, ending, resetting), nic_progress.cc (schedule, polling,
// sleeping), landing.cc (what an operation does at its target).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "native/provider.h"
#include "native/sim/fabric.h"
#include "native/sim/host.h"

namespace te::sim {

struct Registration {
  std::byte* address = nullptr;
  uint64_t length = 0;
  uint64_t base = 0;  // what remote addresses count from
  bool live = true;
  std::vector<std::byte> shadow;  // where writes with a dead key land once the memory is gone
};

enum class Stage : uint8_t {
  kConnecting,  // not a work request: a path that comes up
  kReady,       // posted, or partly landed
  kLanded       // in the target's memory; the completion is under way
};

struct Path;

struct Operation {
  WorkRequest request;
  Path* path = nullptr;
  Operation* previous = nullptr;  // the path's list of unfinished operations
  Operation* next = nullptr;
  uint64_t serial = 0;       // order of posting
  uint64_t due = 0;          // the poll at which something happens next
  uint64_t order = 0;        // among those due at the same poll
  uint64_t incarnation = 0;  // of the target, when posted
  uint64_t epoch = 0;        // of this NIC, when posted: "nic_down" starts a new one
  Stage stage = Stage::kReady;
  Fate fate = Fate::kGood;
  bool departed = false;   // its fate is decided
  bool reported = false;   // its completion is in the queue; the context belongs to the engine again
  bool scheduled = false;  // in the heap
  uint32_t pieces = 1;
  uint32_t landed_count = 0;
  uint32_t landed_mask = 0;
  std::vector<std::byte> snapshot;  // the source, for what lands after its completion

  bool is_write() const { return request.opcode == Opcode::kWrite || request.opcode == Opcode::kWriteImmediate; }
  bool begun() const { return landed_count > 0 || stage == Stage::kLanded; }
};

struct Path {
  PathId id = kNoPath;
  std::shared_ptr<Endpoint> endpoint;
  uint64_t incarnation = 0;  // of the peer when opened
  Operation* first = nullptr;
  Operation* last = nullptr;
  bool up = true;
  bool down_told = false;  // connected: kPathDown has been queued

  // Ordered mode: only the oldest operation that has not landed is scheduled or stalled. An error breaks the path, as
  // it breaks an RC queue pair or a TCP connection: what was posted behind it is flushed, and so is all that is posted
  // until the engine has polled every error. So no immediate lands behind a write that failed.
  bool busy = false;  // there is such an operation; whatever follows it in the list waits for it
  uint64_t last_due = 0, last_completion_due = 0;
  uint64_t unread_errors = 0;
  uint64_t break_epoch = 0;  // errors queued before a reset do not count

  std::vector<Operation*> stalled;
  bool waits = false;  // the endpoint has a Waiter for this path
};

class Nic {
 public:
  Nic(Fabric& fabric, Host& host, uint32_t index, std::string name, std::shared_ptr<Endpoint> endpoint);
  ~Nic();
  Nic(const Nic&) = delete;

  // --- memory, paths, receives (nic.cc) ---
  Error register_memory(const MemorySpan& span, MemoryKey* key);
  Error deregister_memory(const MemoryKey& key);
  Error open_path(const te_nic_address& remote, PathId* path);
  void close_path(PathId id);
  PostResult post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context);
  bool proven_dead(PathId id) const;
  NicInfo info() const;
  void set_down();
  void set_up();
  void detach(Fabric::End end);  // leaves the fabric: nothing of this NIC lands afterwards
  uint64_t serial() const { return serial_; }
  uint64_t in_flight() const { return in_flight_; }

  // --- posting and ending (nic_post.cc) ---
  PostResult post(std::span<const WorkRequest> requests);
  Error reset_path(PathId id);
  void cancel_all();

  // --- progress (nic_progress.cc) ---
  bool idle() const { return !active_.load(std::memory_order_acquire); }  // any thread
  uint32_t poll(std::span<Completion> out);
  bool arm();
  int wait_fd() const { return wait_fd_; }
  void wake(PathId id);
  void resume_all();  // every stalled operation looks again

 private:
  struct Receive {
    void* buffer;
    uint64_t length;
    uint64_t local_key;
    WorkContext* context;
  };
  struct Entry {
    Completion completion;
    uint64_t break_epoch = 0;  // the path's, when an error was queued
  };
  enum class Reach { kOpen, kSilent, kLost, kDown };
  enum class Placed { kYes, kVanished, kRefused };

  // nic.cc
  bool up() const { return !down_ && !overrun_; }
  Path* find(PathId id) const;
  bool covers(uint64_t local_key, const void* address, uint64_t length) const;
  void connect(Path& path);

  // nic_post.cc
  int refusal(const WorkRequest& request, bool last) const;
  void accept(const WorkRequest& request);
  bool full() const;
  void report(Operation& op, Status status, bool landed_unknown, int provider_status);
  void report_before(Operation& op, Status status, int provider_status);
  void fail(Operation& op, Status status, bool landed_unknown, int provider_status);
  void break_path(Operation& failed);
  void flush(Operation& op);
  void start_next(Path& path, Operation* next);
  void retire(Operation& op);
  void cancel(Path& path);
  Operation* allocate();
  void recycle(Operation* op);
  void link(Path& path, Operation& op);
  void unlink(Operation& op);

  // nic_progress.cc
  void progress();
  void advance(Operation& op);
  void schedule(Operation& op);
  void stall(Operation& op);
  void unstall(Path& path);
  void wake_path(Path& path);
  void activate();
  Reach reach(const Operation& op) const;
  bool queue(const Completion& completion);           // false: the completion queue ran over, and this NIC is dead
  void queue_own(Path& path, Completion completion);  // never lost: an overrun turns it into an error
  void queue_event(const Completion& completion);
  bool has_room() const;
  void overrun();

  // landing.cc
  bool depart(Operation& op);
  Fate choose_fate();
  void leave_early(Operation& op);
  const std::byte* source(const Operation& op) const;
  void land(Operation& op, Nic& target);
  void land_piece(Operation& op, Nic& target);
  void deliver(Operation& op, Nic& target);
  void landed(Operation& op);
  void finish_connecting(Operation& op);
  uint32_t next_piece(const Operation& op);
  void copy_piece(const Operation& op, const std::byte* local, std::byte* remote, uint64_t begin, uint64_t length);
  Placed locate(const Operation& op, Nic& target, std::byte** memory);
  Placed locate_stale(const Operation& op, Nic& target, Registration& dead, std::byte** memory);

  Fabric& fabric_;
  Host& host_;
  const uint32_t index_;
  const std::string name_;
  std::shared_ptr<Endpoint> endpoint_;
  const uint64_t serial_;
  const bool ordered_;
  bool down_ = false;
  bool overrun_ = false;
  uint64_t epoch_ = 0;
  int wait_fd_ = -1;
  bool signalled_ = false;  // the descriptor is readable
  // False only while there is neither a completion nor anything that a poll could move. Written under the mutex; read
  // without it by poll, so that idle engines do not fight for the mutex. Release/acquire is not needed for the data
  // (the poll that sees true takes the mutex), only for a store to become visible, which it does.
  std::atomic<bool> active_{false};

  std::unordered_map<uint32_t, Registration> registrations_;
  std::vector<std::unique_ptr<Path>> paths_;             // by the low half of PathId; never reused
  std::unordered_map<const Endpoint*, uint32_t> known_;  // how many paths lead there
  std::deque<Receive> receives_;
  std::deque<Entry> completions_;
  std::deque<Completion> events_;  // of paths; on hardware they come from elsewhere and take no completion entry

  uint64_t tick_ = 0;
  uint64_t operation_serial_ = 0;
  uint64_t in_flight_ = 0;            // not yet reported
  uint64_t unfinished_ = 0;           // these and what has yet to land though reported
  std::vector<Operation*> schedule_;  // heap
  std::vector<PathId> ready_;         // paths whose stalled operations may go on
  std::vector<std::unique_ptr<Operation>> pool_;
  std::vector<Operation*> free_;
};

}  // namespace te::sim
