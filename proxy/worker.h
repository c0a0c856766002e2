// The worker: the one thread that posts, polls and owns all protocol state of an engine. Everything here runs on that thread, except
// start, stop and the two statistics readers.
//
// One round: take commands, poll every NIC, let every scheduled peer post a bounded burst, ring doorbells, look at the clock.
// It never blocks but in sleep(), and never takes a lock on the path of a write.
//
// Split by verb: worker.cc (loop, sleep, clock), worker_commands.cc (what callers ask for), worker_finish.cc (how operations end), worker_post.cc (operations to work
// requests), worker_scatter.cc (flights to work requests), worker_staging.cc and worker_arrivals.cc (what NICs do not reach), worker_complete.cc (completions, immediates), worker_control.cc (messages between engines), worker_session.cc
// (acquaintance and loss), worker_flags.cc (flags that rise with counters), worker_watchers.cc (watched words, and the transfers they trigger), worker_paths.cc (paths that come, break and are mended), worker_attach.cc (attach, revoke), worker_fence.cc (closing regions and counters, fences).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "proxy/engine.h"
#include "proxy/ids.h"
#include "proxy/watch_block.h"

namespace te {

struct NicState {
  uint32_t depth = 0;                   // work requests that may be in flight
  Published<uint32_t> in_flight;        // of live sessions
  Published<uint64_t> bytes_in_flight;  // likewise
  struct {
    std::atomic<uint64_t> writes{0}, write_bytes{0}, sends{0}, receives{0}, immediates{0}, reads{0}, errors{0}, busy{0};
  } statistics;
};

// A session that ended without the peer's word that it had drained: what it may still write to, until proof that it cannot.
struct Ghost {
  Peer* peer = nullptr;
  bool paths_open = false;
  PathId paths[TE_MAX_NICS] = {};
  std::vector<te_handle> regions;
  std::vector<uint16_t> ids;    // quarantined
  std::vector<uint16_t> slots;  // staging: that it may still write to
  bool dead = false;            // proven; our own queues still have to be drained
  int64_t dead_since_ns = 0;
  uint32_t quiet_rounds = 0;  // since then, with nothing polled
};

class Worker {
 public:
  explicit Worker(Engine* engine);
  ~Worker();
  Error start();
  // Once the thread has ended, before the provider goes.
  void deregister_memory();
  // Asks the thread to say goodbye and waits for its end. kUnconfirmed: some peer did not say in time that it had drained. kStuck: the
  // thread is held inside the provider; it is let go and must find its objects alive should it ever come back.
  enum class End { kClean, kUnconfirmed, kStuck };
  End stop(int64_t deadline_ns);

  const NicState& nic(uint32_t index) const { return nics_[index]; }
  int64_t last_round_ns() const { return last_round_.load(std::memory_order_relaxed); }
  uint64_t polls() const { return polls_.load(std::memory_order_relaxed); }
  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }
  uint64_t completed() const { return completed_.load(std::memory_order_relaxed); }
  uint64_t failed() const { return failed_.load(std::memory_order_relaxed); }
  uint64_t stray_messages() const { return stray_messages_.load(std::memory_order_relaxed); }
  uint64_t stray_immediates() const { return stray_immediates_.load(std::memory_order_relaxed); }
  uint64_t damaged_messages() const { return damaged_messages_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kBatch = 32;

  // --- worker.cc
  void run();
  bool round();
  void sleep();
  bool may_sleep();
  void tick();
  void check_deadlines();
  int64_t sleep_timeout();
  void schedule(Peer& peer);
  bool goodbye_finished();
  void shut_down();

  // --- worker_commands.cc
  bool take_commands();
  void begin(Operation* op);
  bool claim(Operation* op);
  void use(Peer& peer, RemoteRegion* region, RemoteCounter* counter);
  void admit(Operation* op);
  void readmit(Peer& peer);
  void enqueue(Peer& peer, Operation* op, Queue queue);
  void leave_queue(Operation* op);
  void plan(Operation& op);
  void plan_part(Operation& op, uint32_t index, uint32_t nic);
  void cancel_requested();
  void begin_connect(Operation* op);
  void begin_disconnect(Operation* op);
  void begin_reached(Operation* op);
  void check_armed(Counter& counter);

  // --- worker_scatter.cc
  void hold(Member& member);
  void let_go(Member& member);
  void claim_target(Operation* op);
  void release_target(Operation* op);
  void claim_prepared(Operation* op);
  void release_prepared(Operation* op);
  void finish_claim(Operation* op);
  void begin_scatter(Operation* command);
  void begin_flight(Flight& flight, te_transfer* transfer);
  bool post_flights();
  bool post_flight(Flight& flight);
  void finish_posting(Flight& flight);
  void begin_member(Flight& flight, Operation& op);
  bool post_member(Flight& flight, uint32_t position, Operation& op);
  bool fill_template(Target& target, uint32_t position, const Operation& op);
  void flush_member_batches();
  void flush_member_batch(uint32_t nic);
  Operation* undo_member(WorkItem* item);
  void complete_member(uint32_t nic, WorkItem* item);
  void leave_flight(Flight& flight);

  // --- worker_staging.cc
  bool serve_staging();
  void submit_copy(StagedCopy& copy);
  void plan_staged(Operation& op);
  uint32_t generate_staged(Peer& peer, Operation& op, uint32_t budget);
  bool start_piece(Peer& peer, Operation& op);
  bool own_slot_for(const Peer& peer, const Staging& own);
  void free_own_slot(Piece& piece);
  Piece& take_piece(Peer& peer, Operation& op);
  void end_piece(Piece& piece);
  void stop_staged(Operation& op, Status status, int provider_status, const char* why);
  void piece_copied(Piece& piece);
  bool post_pieces();
  bool post_piece(Piece& piece, uint32_t* full);
  void piece_written(uint32_t nic, const Completion& completion, WorkItem* item);
  void advance_staged(Operation* op);
  void send_tail(const Piece& piece);
  void take_staged_done(Peer& peer, const Record& record);
  template <typename F>
  void for_waiting_pieces(F&& visit);
  void lose_pieces(Peer& peer, bool drained);
  void let_source_go(Operation& op);
  bool pieces_wait(const Peer& peer);
  uint32_t orphaned_pieces(const Peer& peer);
  void ask_about_pieces(Peer& peer);
  void abandon_pieces(Operation& op, bool dead);
  void ask_for_slots(Peer& peer, const Operation& op);
  void take_stage_slots(Peer& peer, const std::vector<uint16_t>& ids);
  void return_slots(Peer& peer, std::vector<uint16_t> slots, bool unknown);
  void return_idle_slots(Peer& peer);

  // --- worker_arrivals.cc
  void know_incoming_slots();
  void take_stage_request(Peer& peer, uint32_t count);
  void grant_slots();
  bool holds_slot(const Peer& peer, uint16_t slot) const;
  void take_back_slot(Peer& peer, uint16_t slot);
  void take_stage_return(Peer& peer, const std::vector<uint16_t>& ids, bool unknown);
  void leave_slots(Peer& peer, bool drained, std::vector<uint16_t>* ghosts);
  void free_ghost_slots(const std::vector<uint16_t>& slots);
  void take_staged(Peer& peer, const Record& record);
  void take_tail(Peer& peer, const Record& record);
  void arrival_copied(Arrival& arrival);

  // --- worker_finish.cc
  void note(Operation& op, Status status, int provider_status, int nic, const char* detail);
  void report(Operation* op, Status status, int provider_status, int nic, const char* detail);
  void end_transfer(te_transfer* transfer);
  void finish(Operation* op);  // nothing of it is in flight; success unless it was reported before
  void fail(Operation* op, Status status, const char* detail, int provider_status = 0, int nic = -1);
  void forget_closing(Operation* op);
  void settle_quiesced(te_transfer* transfer);
  void release_operation(Operation* op);
  void replace_zombie(Operation* op);

  // --- worker_post.cc
  bool post_peer(Peer& peer);
  bool post_ready(Peer& peer);
  uint32_t generate(Peer& peer, Operation& op, uint32_t budget);
  uint32_t generate_flush(Peer& peer, Operation& op, uint32_t budget);
  bool has_room(const Peer& peer, uint32_t nic) const;
  bool needs_immediate(const Operation& op, const Part& part, uint64_t unit) const;
  bool take_slot(Peer& peer, Operation& op);
  void give_up(Operation& op, uint32_t nic);
  void append(Peer& peer, Operation& op, uint32_t part, WorkKind kind);
  void fill_write(Operation& op, const Part& part, uint64_t unit, WorkRequest* request);
  void fill_immediate(Operation& op, const Part& part, uint64_t unit, WorkItem* item, WorkRequest* request);
  void flush_batch(Peer& peer);
  void take_back(Peer& peer, uint32_t index);
  bool fully_posted(const Operation& op) const;
  void account(Peer& peer, WorkItem* item, int direction);

  // --- worker_complete.cc
  uint32_t poll_nic(uint32_t nic);
  void flush_devices();
  void fail_or_doubt(Peer& peer, Operation& op, const Completion& completion, int nic, bool current);
  void complete(uint32_t nic, const Completion& completion);
  void complete_write(uint32_t nic, const Completion& completion, WorkItem* item);
  void write_off(Peer& peer, uint32_t remote_nic, bool landed_unknown);
  void note_failed_request(Operation& op, const Completion& completion, int nic);
  void doubt(Peer& peer, Operation& op, const Completion& completion, int nic);
  void resolve_doubts();
  void settle_doubt(Operation* op);
  void complete_send(uint32_t nic, const Completion& completion, WorkItem* item);
  void advance(Operation* op);
  void immediate_arrived(uint32_t nic, uint32_t immediate);
  void slot_arrived(uint16_t id, IdEntry& entry, uint32_t immediate);
  void raise(Counter& counter, uint64_t by);
  void retire_slot(Operation& op);
  void take_slots(Peer& peer, const std::vector<uint16_t>& ids);

  // --- worker_control.cc
  bool post_control(Peer& peer);
  bool post_records(Peer& peer);
  bool post_fragments(Peer& peer);
  bool post_unsequenced(Peer& peer, MessageType type);
  MessageHeader header_for(const Peer& peer, MessageType type) const;
  bool send_buffer(Peer& peer, Buffer* buffer, uint32_t length, WorkKind kind, bool sequenced, Operation* op);
  bool acknowledgement_due(const Peer& peer) const;
  void received(uint32_t nic, const Completion& completion, WorkItem* item);
  bool receive_from(Peer& peer, const MessageHeader& header, Buffer* buffer);
  void take_sequenced(Peer& peer, const MessageHeader& header, std::span<const uint8_t> body);
  void take_records(Peer& peer, std::span<const uint8_t> body);
  void take_untaken(bool all_empty);
  void take_record(Peer& peer, const Record& record);
  void take_fragment(Peer& peer, const MessageHeader& header, std::span<const uint8_t> body);
  void take_retire_slot(Peer& peer, const Record& record);
  void take_counts(Peer& peer, std::span<const uint8_t> body);
  bool post_resends(Peer& peer);
  void drop_resends(Peer& peer);
  void post_receives();
  void push_record(Peer& peer, Record record);

  // --- worker_session.cc
  void ensure_connecting(Peer& peer);
  Error start_session(Peer& peer);
  uint32_t grant_window();
  Error open_paths(Peer& peer);

  // --- worker_paths.cc
  PathId* path_slot(Session& session, uint32_t nic, PathId path, uint32_t* remote_nic);
  void path_changed(uint32_t nic, const Completion& completion);
  void path_up(Peer& peer, uint32_t nic, uint32_t remote_nic);
  void path_down(Peer& peer, uint32_t nic, uint32_t remote_nic, PathId* slot, const Completion& completion);
  void mend_paths(Peer& peer);
  void nic_changed(uint32_t nic, bool up);
  uint32_t usable_nics(const Peer& peer) const;
  // A path may break and the peer live on: kPathDown decides.
  bool spares_peer() const { return capabilities_.connected_paths && nic_count_ > 1; }
  bool reroute(Peer& peer, Operation& op, Part& part);
  void service_session(Peer& peer);
  void send_hello(Peer& peer, bool acknowledgement);
  void take_hello(std::span<const uint8_t> body);
  void take_hello_ack(Peer& peer, std::span<const uint8_t> body);
  void answer_stray(Peer& peer);
  void take_reject(Peer& peer, std::span<const uint8_t> body);
  void reject(const te_address& to, uint32_t index, uint64_t token, RejectReason reason);
  void adopt(Peer& peer, const Hello& hello);
  void connected(Peer& peer);
  void lose_older(const Peer& newcomer);
  void lose(Peer& peer, Status status, const char* why, uint32_t final_state = TE_PEER_LOST);
  void fail_all(Peer& peer, Status status, const char* why, bool spare_waiting = false);
  void leave_ghost(Peer& peer, bool drained);
  void drop_attachments(Peer& peer);
  void say_bye(Peer& peer);
  void take_bye(Peer& peer, bool for_good);
  void finish_bye(Peer& peer);
  uint32_t writes_in_flight(const Peer& peer);
  bool is_self(const Peer& peer) const;

  // --- worker_attach.cc
  static void set_attachment(Remote& remote, Attachment state);
  bool attached(Peer& peer, Remote& remote, RecordType request);
  void take_attach_region(Peer& peer, uint64_t serial);
  void take_attach_counter(Peer& peer, uint64_t serial);
  void take_region_attached(Peer& peer, const Record& record);
  void take_counter_attached(Peer& peer, const Record& record);
  void take_revoked(Peer& peer, const Record& record);
  void take_revoke_region(Peer& peer, const Record& record);
  void take_revoke_counter(Peer& peer, const Record& record);
  void revoke(Peer& peer, Remote& remote, bool temporary, bool is_region);
  void hold_ready(Peer& peer, const Remote& remote);
  void acknowledge_revocation(Peer& peer, Remote& remote, bool is_region);
  void unclaim(Operation* op);
  void unuse(Peer& peer, RemoteRegion* region, RemoteCounter* counter);
  void recycle_if_unused(Peer& peer, Remote& remote, bool is_region);
  void recycle(Peer& peer, Remote& remote, bool is_region);
  void sweep(bool peers);
  void sweep_peers();
  void grant_region(Peer& peer, Region& region);

  // --- worker_fence.cc
  void begin_close_region(Operation* op);
  void begin_close_counter(Operation* op);
  void begin_fence(Operation* op);
  void continue_closings();
  bool region_released(Region& region);
  bool close_region_step(Operation* op);
  bool close_counter_step(Operation* op);
  bool fence_step(Operation* op);
  void holder_gone(Region& region, Peer& peer);
  void start_rekey(Region& region, Peer* except);
  void finish_rekey(Region& region);
  void answer_drain(Peer& peer);
  void ask_drain(Peer& peer);
  void release_ghosts(const Peer& peer);
  void take_fence(Peer& peer, uint64_t serial);
  void take_fenced(Peer& peer, const Record& record);
  void request_remote_fences();
  void watch_ghosts();
  void advance_remote_fence(Operation& stuck, bool at_last);
  void orphan(Operation* op, bool dead);

  // --- worker_flags.cc
  bool take_orders(bool for_good = false);
  void carry_out(PendingOrder& pending);
  bool bind(Binding& binding);
  void unbind(Binding& binding);
  void unbind_all(Counter& counter);
  void raise_bound(Counter& counter, uint64_t value);
  void abort_bound(const Peer& peer);

  // --- worker_watchers.cc
  void watch(Watcher& watcher, uint64_t value);
  void unwatch_if_idle(Watcher& watcher);
  void notify(Watcher& watcher, bool on);
  void forget(Watcher& watcher);
  bool arm(Watcher& watcher, Trigger& trigger);
  void disarm(Trigger& trigger);
  bool look_at_watchers();
  bool watchers_changed() const;
  void ask(Trigger& trigger, uint64_t value);
  bool fire_triggers();
  bool fire(Trigger& trigger);
  te_transfer* start_firing(Trigger& trigger, uint32_t operations);
  bool fire_write(Trigger& trigger, Prepared& prepared);
  bool fire_scatter(Trigger& trigger, Prepared& prepared);
  bool fire_flight(Trigger& trigger, Prepared& prepared, Target& target, Region& region);
  void firing_refused(Trigger& trigger, const Error& error);
  void firing_failed(Trigger& trigger, const te_error& error);
  void firing_posted(te_transfer& transfer);
  void firing_ended(te_transfer& transfer);

  Engine& engine_;
  Provider& provider_;
  const Capabilities& capabilities_;
  const te_settings& settings_;
  const uint32_t nic_count_;
  const uint32_t all_nics_;  // mask
  uint32_t nics_up_;         // mask: those whose ports are up
  const uint64_t max_chunk_;
  const uint32_t fragment_bytes_;

  std::thread thread_;
  std::atomic<uint32_t> ended_{0};  // futex: 1 once run() has returned
  std::atomic<int64_t> last_round_{0};
  std::atomic<bool> stop_requested_{false};
  std::atomic<int64_t> stop_deadline_{0};
  bool stopping_ = false;
  bool clean_end_ = true;
  int epoll_ = -1;

  int64_t now_ = 0;
  int64_t last_tick_ = 0;
  int64_t last_work_ = 0;
  int64_t last_heartbeat_ = 0;
  int64_t next_deadline_ = INT64_MAX;  // no operation's deadline is earlier
  bool fences_wanted_ = false;         // some operation has ended before it drained
  bool polled_something_ = false;
  uint64_t rounds_ = 0;
  std::vector<Peer*> with_untaken_;
  uint32_t total_in_flight_ = 0;  // writes, reads and sends of live sessions

  std::vector<NicState> nics_;
  WorkItems items_;
  Buffers buffers_;
  std::vector<WorkItem*> idle_receives_;  // not posted: no room in the provider
  uint32_t receives_wanted_ = 0, receives_made_ = 0, receives_posted_ = 0;
  uint32_t most_receives_ = UINT32_MAX;     // posted at a time
  uint32_t immediate_budget_ = UINT32_MAX;  // per NIC, for all peers; see grant_window
  uint32_t immediates_granted_ = 0;
  IdTable ids_;
  List<Operation, &Operation::active_link> active_;
  List<Peer, &Peer::scheduled_link> scheduled_;
  List<Peer, &Peer::known_link> known_;
  bool in_closings_ = false;
  std::vector<Peer*> doubted_;
  std::vector<Operation*> closings_;  // kCloseRegion, kCloseCounter, kFence under way
  std::vector<Ghost> ghosts_;
  std::vector<Region*> rekeying_;
  uint32_t next_session_ = 1;
  uint32_t spare_operations_;  // next index of the slab's reserve

  // The batch being filled in post_ready.
  uint32_t batch_nic_ = 0, batch_count_ = 0, blocked_ = 0;  // blocked_: mask of NICs that take nothing more this time
  Operation* refused_ = nullptr;
  int refused_status_ = 0;
  uint32_t refused_nic_ = 0;
  WorkRequest requests_[kBatch];
  WorkItem* batch_items_[kBatch] = {};
  Completion completions_[64];  // of one poll; a member, since building it costs more than an idle poll
  // Likewise for the members of scatters, per NIC.
  struct MemberBatch {
    uint32_t count = 0;
    WorkRequest requests[kBatch];
    WorkItem* items[kBatch] = {};
  };
  std::vector<MemberBatch> member_batches_;
  List<Flight, &Flight::link> flights_;  // that still have members to post
  bool posted_flights_ = false;
  StagingState staging_;

  List<Binding, &Binding::link> bound_to_peers_;
  std::map<const std::atomic<uint64_t>*, std::unique_ptr<WatchBlock>> watch_blocks_;  // by their words
  std::vector<WatchBlock*> watched_;                                                  // those with something to look at
  List<Trigger, &Trigger::owed_link> owed_;  // that are due more often than they fired

  std::vector<uint8_t> flush_sink_;
  std::vector<MemoryKey> flush_keys_;
  uint32_t flush_registered_ = 0;

  std::atomic<uint64_t> polls_{0}, sleeps_{0}, completed_{0}, failed_{0}, failed_flushes_{0};
  std::atomic<uint64_t> stray_messages_{0}, stray_immediates_{0}, damaged_messages_{0};
};

// Adds to a statistics word that only this thread writes: no locked instruction.
inline void bump(std::atomic<uint64_t>& counter, uint64_t by = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

}  // namespace te
