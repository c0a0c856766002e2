// Transfers with an end that the NICs do not reach: see proxy/staging.h for what goes which way, and why it holds. Here is the sender's
// half; the receiver's is in worker_arrivals.cc.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr uint32_t kTokenBits = 16;  // of a token: the piece's number; the rest tells its uses apart
static_assert(StagingState::kMostPieces <= 1u << kTokenBits);

}  // namespace

// --- both halves -------------------------------------------------------------------------------------------------------------------

// Once a round. True: something went on.
bool Worker::serve_staging() {
  bool worked = false;
  if (staging_.copying > 0) {
    gpu::Copier& copier = *engine_.staging_.load(std::memory_order_acquire)->copier;
    while (gpu::CopyJob* job = copier.next()) {
      --staging_.copying;
      worked = true;
      auto* copy = static_cast<StagedCopy*>(job);
      if (copy->is_piece) piece_copied(*static_cast<Piece*>(copy));
      else arrival_copied(*static_cast<Arrival*>(copy));
    }
  }
  if (!staging_.ready.empty()) worked |= post_pieces();
  return worked;
}

void Worker::submit_copy(StagedCopy& copy) {
  ++staging_.copying;
  engine_.staging_.load(std::memory_order_acquire)->copier->submit(&copy);
}

// --- the sender's half ---------------------------------------------------------------------------------------------------------------

// In place of plan: everything is attached.
void Worker::plan_staged(Operation& op) {
  op.planned = op.staged = true;
  op.parts = 0;
  op.phase = Phase::kBody;
  uint64_t unit = max_chunk_;
  if (op.remote->slot_bytes > 0) unit = std::min<uint64_t>(unit, op.remote->slot_bytes);
  if (op.region->staged()) unit = std::min<uint64_t>(unit, settings_.staging_slot_bytes);
  op.stage_bytes = unit;
  op.chunks = op.length == 0 ? 0 : chunk_count(op.length, unit);
  op.stage_pieces = op.kind == OperationKind::kPages ? op.chunks * op.page_count : op.chunks;
  op.stage_next = 0;
}

// Of a ready operation: starts what there is room for.
uint32_t Worker::generate_staged(Peer& peer, Operation& op, uint32_t budget) {
  uint32_t made = 0;
  while (op.stage_next < op.stage_pieces && made < budget && start_piece(peer, op)) ++made;
  if (op.stage_next < op.stage_pieces) return made;
  leave_queue(&op);
  if (op.in_flight == 0) advance(&op);  // it has no bytes
  return made;
}

bool Worker::start_piece(Peer& peer, Operation& op) {
  Session& s = peer.session;
  if (op.remote->slot_bytes > 0 && s.stage_slots.empty()) {
    ask_for_slots(peer, op);
    return false;
  }
  Staging* own = engine_.staging_.load(std::memory_order_acquire);
  if (op.region->staged() && !own_slot_for(peer, *own)) return false;
  if (!staging_.have_piece()) return false;
  Piece& p = take_piece(peer, op);
  const uint64_t number = op.stage_next++;
  const uint64_t page = op.kind == OperationKind::kPages ? number / op.chunks : 0;
  const Range chunk = chunk_range(op.length, op.stage_bytes, number - page * op.chunks);
  uint64_t source = op.source_offset + chunk.offset;
  p.target_offset = op.target_offset + chunk.offset;
  if (op.kind == OperationKind::kPages) {
    source += op.pages->source(page);
    p.target_offset += op.pages->target(page);
  }
  p.length = chunk.length;
  if (op.remote->slot_bytes > 0) {
    p.their_slot = s.stage_slots.back();
    s.stage_slots.pop_back();
  }
  auto* memory = static_cast<uint8_t*>(op.region->span.address) + source;
  if (!op.region->staged()) {
    p.from = memory;
    p.state = Piece::State::kReady;
    staging_.ready.push_back(&p);
    return true;
  }
  p.own_slot = staging_.free_own.back();
  staging_.free_own.pop_back();
  ++peer.staged_own;
  p.from = p.host = own->outgoing(p.own_slot);
  p.to_device = false;
  p.device = op.region->span.device_index;
  p.address = reinterpret_cast<uint64_t>(memory);
  p.anchor = reinterpret_cast<uint64_t>(op.region->span.address);
  p.buffer_id = op.region->buffer_id;
  p.state = Piece::State::kCopying;
  submit_copy(p);
  return true;
}

// True: there is one, and the peer has not more of them than leaves some for others, should it be slow.
bool Worker::own_slot_for(const Peer& peer, const Staging& own) {
  if (!staging_.own_known) {
    staging_.own_known = true;
    for (uint32_t i = own.count; i > 0; --i) staging_.free_own.push_back(static_cast<uint16_t>(i - 1));
  }
  return !staging_.free_own.empty() && peer.staged_own < std::max(2u, own.count / 4);
}

void Worker::free_own_slot(Piece& p) {
  if (p.own_slot == Piece::kNone) return;
  staging_.free_own.push_back(std::exchange(p.own_slot, Piece::kNone));
  --p.peer->staged_own;
}

Piece& Worker::take_piece(Peer& peer, Operation& op) {
  Piece& p = staging_.piece(staging_.free_pieces.back());
  staging_.free_pieces.pop_back();
  p.token += 1u << kTokenBits;
  p.empty = p.counts = false;
  p.operation = &op;
  p.peer = &peer;
  p.session = op.session = peer.session.number;
  p.own_slot = p.their_slot = Piece::kNone;
  p.length = 0;
  ++op.in_flight;
  ++op.remote->in_flight;
  if (op.counter != nullptr) ++op.counter->in_flight;
  return p;
}

// The piece is over, whatever became of it.
void Worker::end_piece(Piece& p) {
  Operation& op = *p.operation;
  Peer& peer = *p.peer;
  const bool current = p.session == peer.session.number;
  free_own_slot(p);
  if (p.their_slot != Piece::kNone && current && peer.connected()) return_slots(peer, {p.their_slot}, false);
  p.state = Piece::State::kIdle;
  p.operation = nullptr;
  staging_.free_pieces.push_back(p.number);
  --op.in_flight;
  if (current && op.transfer != nullptr) --op.remote->in_flight;  // else it was fenced off: see orphan
  if (current && op.counter != nullptr) --op.counter->in_flight;
  for (Remote* end : {static_cast<Remote*>(op.remote), static_cast<Remote*>(op.counter)})
    if (end != nullptr && end->revoke_pending && end->in_flight == 0)
      acknowledge_revocation(peer, *end, end == op.remote);
  if (op.in_flight > 0 || op.queue != Queue::kNone) return;
  if (op.transfer == nullptr) return finish(&op);
  advance(&op);
}

void Worker::stop_staged(Operation& op, Status status, int provider_status, const char* why) {
  if (op.stopped) return;
  op.stopped = true;
  if (op.queue != Queue::kNone) leave_queue(&op);
  note(op, status, provider_status, -1, why);
}

void Worker::piece_copied(Piece& p) {
  Operation& op = *p.operation;
  if (p.status == Status::kRegistration)
    stop_staged(op, Status::kRegistration, p.code, "the source's GPU memory was freed during the transfer");
  else if (p.status != Status::kOk) stop_staged(op, Status::kTransport, p.code, "the GPU did not copy the source");
  if (op.stopped || p.session != p.peer->session.number) return end_piece(p);
  p.state = Piece::State::kReady;
  staging_.ready.push_back(&p);
}

bool Worker::post_pieces() {
  bool posted = false;
  uint32_t full = 0;  // mask of NICs
  for (size_t left = staging_.ready.size(); left > 0; --left) {
    Piece* p = staging_.ready.front();
    staging_.ready.pop_front();
    if (p->operation->stopped || p->session != p->peer->session.number || !p->peer->connected()) {
      end_piece(*p);
      continue;
    }
    if (!post_piece(*p, &full)) staging_.ready.push_back(p);
    else posted = true;
  }
  if (posted) provider_.ring_doorbells();
  return posted;
}

// False: to be tried again.
bool Worker::post_piece(Piece& p, uint32_t* full) {
  Peer& peer = *p.peer;
  Operation& op = *p.operation;
  // The record that follows goes over NIC 0: where a completion does not prove that the bytes are placed, they go there, too.
  const bool anywhere = capabilities_.delivery_complete;
  const uint32_t usable = anywhere ? usable_nics(peer) : 1u;
  uint32_t nic = anywhere ? peer.next_nic : 0;
  while ((usable >> nic & 1) == 0) nic = (nic + 1) % nic_count_;
  peer.next_nic = (nic + 1) % nic_count_;
  if ((*full >> nic & 1) != 0 || !has_room(peer, nic)) return false;
  const uint32_t remote_nic = paired_nic(nic, peer.address.nic_count);
  const Staging* own = engine_.staging_.load(std::memory_order_acquire);
  WorkRequest request;
  request.opcode = Opcode::kWrite;
  request.path = peer.session.paths[nic];
  request.local = p.from;
  request.local_key = p.own_slot != Piece::kNone ? own->keys[nic].local_key : op.region->keys[nic].local_key;
  request.length = p.length;
  request.remote_address =
      op.remote->base[remote_nic] +
      (p.their_slot != Piece::kNone ? uint64_t{p.their_slot} * op.remote->slot_bytes : p.target_offset);
  request.remote_key = op.remote->key[remote_nic];
  WorkItem* item = items_.take();
  item->operation = &op;
  item->peer = &peer;
  item->kind = WorkKind::kWrite;
  item->nic = static_cast<uint8_t>(nic);
  item->part = 0;
  item->session = p.session;
  item->length = p.length;
  item->piece = &p;
  request.context = item;
  const PostResult result = provider_.post(nic, std::span(&request, 1));
  if (result.posted == 1) {
    p.state = Piece::State::kWriting;
    account(peer, item, +1);
    if (op.triggered && op.transfer != nullptr) firing_posted(*op.transfer);
    return true;
  }
  items_.give_back(item);
  if (result.busy) {
    bump(nics_[nic].statistics.busy);
    *full |= 1u << nic;
    return false;
  }
  bump(nics_[nic].statistics.errors);
  stop_staged(op, Status::kTransport, result.provider_status, "the provider refused a work request");
  end_piece(p);
  return true;
}

// Its write has ended. (The work request was counted beside the piece.)
void Worker::piece_written(uint32_t nic, const Completion& c, WorkItem* item) {
  Piece& p = *item->piece;
  Operation& op = *p.operation;
  Peer& peer = *p.peer;
  const bool current = item->session == peer.session.number;
  if (current) {
    account(peer, item, -1);
    if (c.status == Status::kOk) peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  } else {
    --op.in_flight;
    --peer.former_in_flight;
  }
  const uint64_t length = item->length;
  items_.give_back(item);
  if (c.status == Status::kOk) {
    bump(nics_[nic].statistics.writes);
    bump(nics_[nic].statistics.write_bytes, length);
    bump(peer.statistics.writes);
    bump(peer.statistics.write_bytes, length);
  } else {
    op.unknown |= c.landed_unknown;
    peer.outcome_unknown |= c.landed_unknown;
    if (c.landed_unknown && p.their_slot != Piece::kNone) {
      if (current && peer.connected()) return_slots(peer, {p.their_slot}, true);
      p.their_slot = Piece::kNone;
    }
    if (!op.stopped) {
      op.stopped = true;
      if (op.queue != Queue::kNone) leave_queue(&op);
      fail_or_doubt(peer, op, c, static_cast<int>(nic), current);
    }
  }
  free_own_slot(p);
  const bool on = c.status == Status::kOk && current && peer.connected() && !op.stopped;
  if (!on || p.their_slot == Piece::kNone) {
    end_piece(p);
  } else {
    Record record;
    record.type = RecordType::kStaged;
    record.serial = op.remote->serial;
    record.token = p.token;
    record.slot = p.their_slot;
    record.offset = p.target_offset;
    record.length = p.length;
    p.their_slot = Piece::kNone;  // the owner has it again
    p.state = Piece::State::kWaiting;
    push_record(peer, std::move(record));
  }
  if (!current) answer_drain(peer);
  if (c.status == Status::kPeerLost && current && peer.connected() && !spares_peer())
    lose(peer, Status::kPeerLost, "the connection to the peer broke");
}

// All pieces have come to their end, and well.
void Worker::advance_staged(Operation* op) {
  if (op->phase != Phase::kBody || (op->counter == nullptr && !op->flush)) return finish(op);
  Peer& peer = *op->peer;
  // Without a session, wait for one: any will do. A counter that was closed meanwhile fails the operation there.
  const bool attached =
      op->counter == nullptr || op->counter->state.load(std::memory_order_relaxed) == Attachment::kAttached;
  if (!peer.connected() || !attached || !staging_.have_piece()) return admit(op);
  op->phase = Phase::kFinal;
  Piece& p = take_piece(peer, *op);
  p.empty = p.counts = true;
  p.state = Piece::State::kWaiting;
  send_tail(p);
}

void Worker::send_tail(const Piece& p) {
  const Operation& op = *p.operation;
  Record record;
  record.type = RecordType::kStaged;
  record.serial = op.remote->serial;
  record.token = p.token;
  if (op.counter != nullptr && p.counts && !op.stopped) {
    record.id = op.counter->id;
    record.count = op.kind == OperationKind::kPages ? static_cast<uint32_t>(op.page_count) : 1;
  }
  push_record(*p.peer, std::move(record));
}

void Worker::take_staged_done(Peer& peer, const Record& record) {
  const uint32_t number = record.token & ((1u << kTokenBits) - 1);
  Piece* p = number < staging_.made() ? &staging_.piece(number) : nullptr;
  if (p == nullptr || p->token != record.token || p->state != Piece::State::kWaiting || p->peer != &peer) {
    bump(stray_messages_);
    return;
  }
  if (record.granted != Grant::kGranted)
    stop_staged(*p->operation, Status::kRemoteAccess, 0,
                p->empty ? "the peer does not know the counter to notify"
                         : "the peer could not copy to its device: the memory was freed, or its GPU failed");
  end_piece(*p);
}

template <typename F>
void Worker::for_waiting_pieces(F&& visit) {
  for (uint32_t i = 0; i < staging_.made(); ++i)
    if (Piece& p = staging_.piece(i); p.state == Piece::State::kWaiting) visit(p);
}

// After a loss nothing more is heard of pieces that the peer was to answer for. Those of a peer that had drained are over, and so are
// those that have no bytes. The others wait for proof, and no longer need their source.
void Worker::lose_pieces(Peer& peer, bool drained) {
  for_waiting_pieces([&](Piece& p) {
    if (p.peer != &peer) return;
    if (drained || p.empty) return end_piece(p);
    let_source_go(*p.operation);
  });
}

// Of an operation that has failed: unless some piece of it still reads from there.
void Worker::let_source_go(Operation& op) {
  if (op.region == nullptr || op.flight != nullptr) return;  // that of a flight is let go with it
  uint32_t waiting = 0;
  for_waiting_pieces([&](const Piece& p) { waiting += p.operation == &op; });
  if (!op.stopped || waiting != op.in_flight) return;
  op.region->leave();
  op.region = nullptr;
}

bool Worker::pieces_wait(const Peer& peer) {
  bool any = false;
  for_waiting_pieces([&](const Piece& p) { any |= p.peer == &peer; });
  return any;
}

// A new session: the peer answers when nothing of the former ones is being copied there any more.
void Worker::ask_about_pieces(Peer& peer) {
  for_waiting_pieces([&](Piece& p) {
    if (p.peer != &peer || p.session == peer.session.number) return;
    p.counts = false;  // the operation has failed
    send_tail(p);
  });
}

// The operation was fenced off: nothing of it can be copied any more. `dead`: nor will its requests complete.
void Worker::abandon_pieces(Operation& op, bool dead) {
  for (uint32_t i = 0; i < staging_.made(); ++i) {
    Piece& p = staging_.piece(i);
    if (p.operation != &op) continue;
    if (p.state == Piece::State::kWriting && dead) free_own_slot(p);
    if (p.state != Piece::State::kWaiting) continue;
    const bool last = op.in_flight == 1;
    end_piece(p);
    if (last) return;  // the operation is gone
  }
}

// Requests without keys and bytes behind which our own slots stand: for a goodbye they are in flight, also when their operation was
// fenced off.
uint32_t Worker::orphaned_pieces(const Peer& peer) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < staging_.made(); ++i) {
    const Piece& p = staging_.piece(i);
    count += p.state == Piece::State::kWriting && p.peer == &peer && p.session == peer.session.number &&
             p.operation->transfer == nullptr;
  }
  return count;
}

// --- slots ---------------------------------------------------------------------------------------------------------------------------

void Worker::ask_for_slots(Peer& peer, const Operation& op) {
  Session& s = peer.session;
  const auto wanted =
      static_cast<uint32_t>(std::min<uint64_t>(op.stage_pieces - op.stage_next, StagingState::kMostSlots));
  if (s.stage_asked >= wanted) return;
  Record record;
  record.type = RecordType::kStageRequest;
  record.index = static_cast<uint16_t>(wanted - s.stage_asked);
  s.stage_asked = wanted;
  push_record(peer, std::move(record));
}

void Worker::take_stage_slots(Peer& peer, const std::vector<uint16_t>& ids) {
  Session& s = peer.session;
  if (ids.size() > s.stage_asked || std::find(ids.begin(), ids.end(), kNoSlot) != ids.end())
    return bump(damaged_messages_);
  s.stage_asked -= static_cast<uint32_t>(ids.size());
  s.stage_slots.insert(s.stage_slots.end(), ids.begin(), ids.end());
  schedule(peer);
}

// `unknown`: something may still land in them.
void Worker::return_slots(Peer& peer, std::vector<uint16_t> slots, bool unknown) {
  Record record;
  record.type = RecordType::kStageReturn;
  record.unknown = unknown;
  record.ids = std::move(slots);
  push_record(peer, std::move(record));
}

// On the clock: slots that nobody here has use for any more.
void Worker::return_idle_slots(Peer& peer) {
  for (Operation* op = peer.ready.front(); op != nullptr; op = peer.ready.next(op))
    if (op->staged && op->remote->slot_bytes > 0) return;
  return_slots(peer, std::exchange(peer.session.stage_slots, {}), false);
}

}  // namespace te
