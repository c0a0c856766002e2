// Scatters: from a flight to work requests. The hot path of peer groups: no allocation, no lock, no look-up.
//
// Towards most members nothing stands in the way: connected, attached, room on the NIC and in the windows, one request. Those go out from
// templates, many in one provider call per NIC. Every other member takes the way of a single write (begin): it connects, attaches, is cut,
// waits in its peer's list. Both end in the same operations, so all that holds for writes (deadlines, fences, revocation,
// loss of a peer or NIC) holds for the members of a scatter without further code.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "proxy/worker.h"

namespace te {
namespace {

// Members that have their turn before completions are polled again.
constexpr uint32_t kTurn = 64;

}  // namespace

// --- what a target names is kept -----------------------------------------------------------------------------------------------------

// Also looks for regions and counters that were given up since the caller found them. Attaching starts here.
void Worker::hold(Member& member) {
  const auto same = [](const Remote& remote, te_handle handle) {
    return remote.handle.load(std::memory_order_relaxed) == handle;
  };
  Peer& peer = *member.peer;
  if (peer.gone() || peer.retired) return;
  if (!same(*member.remote, member.remote_handle)) {
    RemoteRegion* revived = engine_.revive(*member.remote, member.remote_handle);
    if (revived == nullptr) return;
    member.remote = revived;
    member.remote_handle = revived->handle.load(std::memory_order_relaxed);
  }
  if (member.counter != nullptr && !same(*member.counter, member.counter_handle)) {
    RemoteCounter* revived = engine_.revive(*member.counter, member.counter_handle);
    if (revived == nullptr) return;
    member.counter = revived;
    member.counter_handle = revived->handle.load(std::memory_order_relaxed);
  }
  member.held = true;
  use(peer, member.remote, member.counter);
  if (!peer.connected()) return;
  attached(peer, *member.remote, RecordType::kAttachRegion);
  if (member.counter != nullptr) attached(peer, *member.counter, RecordType::kAttachCounter);
}

void Worker::let_go(Member& member) {
  if (!member.held) return;
  member.held = false;
  unuse(*member.peer, member.remote, member.counter);
}

void Worker::claim_target(Operation* op) {
  Target& target = *op->target;
  {
    const std::lock_guard lock(target.mutex);
    for (uint32_t i = 0; i < target.count; ++i) {
      Member& wanted = target.members[i];
      Member& kept = target.claimed[i];
      if (kept.held && kept.remote == wanted.remote && kept.remote_handle == wanted.remote_handle &&
          kept.counter == wanted.counter && kept.counter_handle == wanted.counter_handle)
        continue;
      Member former = kept;
      kept = Member{};
      if (wanted.peer != nullptr) {
        hold(wanted);
        kept = wanted;
      }
      let_go(former);
    }
  }
  finish_claim(op);
}

void Worker::release_target(Operation* op) {
  for (Member& member : op->target->claimed) let_go(member);
  finish_claim(op);
}

void Worker::claim_prepared(Operation* op) {
  hold(op->prepared->member);
  finish_claim(op);
}

void Worker::release_prepared(Operation* op) {
  let_go(op->prepared->member);
  finish_claim(op);
}

void Worker::finish_claim(Operation* op) {
  Target* target = std::exchange(op->target, nullptr);
  finish(op);  // and leaves the prepared transfer
  if (target != nullptr && target->leave()) engine_.recycle(target);
}

// --- posting ----------------------------------------------------------------------------------------------------------------------

void Worker::begin_scatter(Operation* command) {
  Flight& flight = *command->flight;
  te_transfer* transfer = command->transfer;
  command->flight = nullptr;
  engine_.give_back_operation(command);
  begin_flight(flight, transfer);
}

void Worker::begin_flight(Flight& flight, te_transfer* transfer) {
  flight.transfer = transfer;
  flight.posted = 0;
  flight.remaining = flight.target->count + 1;
  flight.cursor = flight.target->round++ % nic_count_;
  transfer->taken_ns = now_ns();
  transfer->under_way = &flight.target->under_way;
  next_deadline_ = std::min(next_deadline_, flight.deadline_ns);
  flights_.push_back(&flight);
  post_flight(flight);
}

// One turn of each that is not through yet.
bool Worker::post_flights() {
  bool posted = std::exchange(posted_flights_, false);
  for (size_t left = flights_.size(); left > 0; --left) {
    Flight* flight = flights_.front();
    if (flight == nullptr) break;
    posted |= post_flight(*flight);
  }
  posted_flights_ = false;
  return posted;
}

// True: something went out.
bool Worker::post_flight(Flight& flight) {
  const uint32_t before = total_in_flight_;
  const uint32_t count = flight.target->count;
  const uint32_t end = std::min(count, flight.posted + kTurn);
  const bool hurried = stopping_ || flight.transfer->cancel_requested.load(std::memory_order_acquire);
  te_transfer* transfer = flight.transfer;
  for (uint32_t position = flight.posted; position < end; ++position) {
    Operation& op = flight.entries[position];
    op.transfer = transfer;
    op.region = flight.region;
    op.deadline_ns = flight.deadline_ns;
    op.flush = flight.flush;
    op.triggered = transfer->trigger != nullptr;
    if (hurried || !post_member(flight, position, op)) {
      flush_member_batches();  // nothing lies half-way while other code runs
      begin_member(flight, op);
    }
    if (position == 0) {  // the first does not wait for others
      flush_member_batches();
      if (total_in_flight_ != before) {
        transfer->first_post_ns = now_ns();
        if (op.triggered) firing_posted(*transfer);
      }
    }
  }
  flight.posted = end;
  flush_member_batches();
  if (transfer->trigger != nullptr && total_in_flight_ != before) firing_posted(*transfer);
  flights_.remove(&flight);
  if (end == count) finish_posting(flight);
  else flights_.push_back(&flight);  // behind the others
  const bool posted = total_in_flight_ != before;
  posted_flights_ |= posted;
  return posted;
}

// All members had their turn. Until now the transfer could not end.
void Worker::finish_posting(Flight& flight) {
  te_transfer* transfer = flight.transfer;
  transfer->posted_ns = now_ns();
  --transfer->undrained;
  if (--transfer->unfinished == 0) end_transfer(transfer);
  settle_quiesced(transfer);
  leave_flight(flight);
}

// The long way, which copes with everything. The parts go on with the rotation.
void Worker::begin_member(Flight& flight, Operation& op) {
  uint32_t parts = 1;
  if (op.length > flight.cut_above) parts = part_count(op.length, nic_count_, settings_.shard_bytes);
  op.parts_wanted = static_cast<uint8_t>(parts);
  op.first_nic = static_cast<uint8_t>(flight.cursor);
  flight.cursor = (flight.cursor + parts) % nic_count_;
  if (op.peer != nullptr) return begin(&op);
  active_.push_back(&op);
  fail(&op, Status::kStale, "the member was replaced in its group, and the target has no new region of it");
}

// False when something stands in the way; then nothing has changed.
bool Worker::post_member(Flight& flight, uint32_t position, Operation& op) {
  Target& target = *flight.target;
  Template& t = target.templates[position];
  if (op.peer == nullptr) return false;
  Peer& peer = *op.peer;
  if (t.epoch != peer.epoch || t.remote != op.remote || t.counter != op.counter) [[unlikely]]
    if (!fill_template(target, position, op)) return false;
  if (op.length > max_chunk_ || op.flush || op.region->staged()) [[unlikely]]
    return false;
  if (op.length > flight.cut_above && part_count(op.length, t.nics, settings_.shard_bytes) > 1) [[unlikely]]
    return false;
  const uint32_t nic = t.nic_of[t.nics == nic_count_ ? flight.cursor : flight.cursor % t.nics];
  if (!has_room(peer, nic)) [[unlikely]]
    return false;
  Credits& credits = peer.credits;
  const uint32_t remote_nic = t.remote_of[nic];
  if (op.counter != nullptr) {
    const auto out = static_cast<int32_t>(credits.sent[remote_nic] - credits.polled_by_them[remote_nic]);
    if (out >= static_cast<int32_t>(credits.their_window)) [[unlikely]]
      return false;
    ++credits.sent[remote_nic];
    ++op.counter->operations;
    ++op.counter->in_flight;
  }
  if (++flight.cursor == nic_count_) flight.cursor = 0;

  MemberBatch& batch = member_batches_[nic];
  WorkItem* item = items_.take();
  item->operation = &op;
  item->peer = &peer;
  item->length = op.length;
  item->kind = WorkKind::kWrite;
  item->nic = static_cast<uint8_t>(nic);
  item->part = 0;
  item->with_immediate = op.counter != nullptr;
  item->session = op.session = peer.session.number;
  WorkRequest& request = batch.requests[batch.count];
  request = target.requests[size_t{position} * nic_count_ + nic];
  request.local = static_cast<uint8_t*>(op.region->span.address) + op.source_offset;
  request.local_key = op.region->keys[nic].local_key;
  request.length = op.length;
  request.remote_address += op.target_offset;
  request.context = item;
  batch.items[batch.count] = item;

  active_.push_back(&op);
  op.admitted = op.templated = true;
  op.phase = Phase::kFinal;
  op.in_flight = 1;
  ++op.remote->operations;
  ++op.remote->in_flight;
  NicState& state = nics_[nic];
  ++state.in_flight;
  state.bytes_in_flight += op.length;
  ++peer.in_flight[nic];
  peer.bytes_in_flight[nic] += op.length;
  ++total_in_flight_;
  if (++batch.count == kBatch) flush_member_batch(nic);
  return true;
}

// False: the member cannot be written to right now, or never; begin finds out which.
bool Worker::fill_template(Target& target, uint32_t position, const Operation& op) {
  Template& t = target.templates[position];
  t.epoch = 0;
  Peer& peer = *op.peer;
  if (!peer.connected() || peer.session.their_bye || peer.session.saying_bye || peer.retired || peer.gone())
    return false;
  const auto ready = [](const Remote& remote, te_handle handle) {
    return remote.handle.load(std::memory_order_relaxed) == handle && remote.listed && !remote.revoke_pending &&
           remote.state.load(std::memory_order_relaxed) == Attachment::kAttached;
  };
  if (!ready(*op.remote, op.remote_handle) || op.remote->fence != RemoteRegion::Fence::kNone) return false;
  if (op.remote->slot_bytes > 0) return false;  // goes in pieces
  if (op.counter != nullptr && !ready(*op.counter, op.counter_handle)) return false;
  const uint32_t usable = usable_nics(peer);
  t.nics = 0;
  for (uint32_t nic = 0; nic < nic_count_; ++nic) {
    if ((usable >> nic & 1) == 0) continue;
    t.nic_of[t.nics++] = static_cast<uint8_t>(nic);
    const uint32_t remote_nic = paired_nic(nic, peer.address.nic_count);
    t.remote_of[nic] = static_cast<uint8_t>(remote_nic);
    WorkRequest& request = target.requests[size_t{position} * nic_count_ + nic];
    request.opcode = op.counter == nullptr ? Opcode::kWrite : Opcode::kWriteImmediate;
    request.more = true;
    request.immediate = op.counter == nullptr ? 0 : plain_immediate(op.counter->id, 1);
    request.path = peer.session.paths[nic];
    request.remote_address = op.remote->base[remote_nic];
    request.remote_key = op.remote->key[remote_nic];
  }
  if (t.nics == 0) return false;
  t.remote = op.remote;
  t.counter = op.counter;
  t.epoch = peer.epoch;
  return true;
}

void Worker::flush_member_batches() {
  for (uint32_t nic = 0; nic < nic_count_; ++nic)
    if (member_batches_[nic].count > 0) flush_member_batch(nic);
}

void Worker::flush_member_batch(uint32_t nic) {
  MemberBatch& batch = member_batches_[nic];
  const uint32_t count = batch.count;
  batch.count = 0;
  batch.requests[count - 1].more = false;
  PostResult result;
  uint32_t at = 0;
  while (at < count) {
    result = provider_.post(nic, std::span(batch.requests + at, count - at));
    at += result.posted;
    if (at == count) break;
    if (result.busy) {
      bump(nics_[nic].statistics.busy);
      break;
    }
    // One that was refused for good does not hurt those behind it: they go to others.
    bump(nics_[nic].statistics.errors);
    Operation* op = undo_member(batch.items[at++]);
    fail(op, Status::kTransport,
         result.provider_status == ENOTCONN ? "the NIC lost its connection to the peer"
                                            : "the provider refused a work request",
         result.provider_status, static_cast<int>(nic));
  }
  // The NIC takes no more for now: the rest waits with the peers.
  for (uint32_t i = at; i < count; ++i) {
    Operation* op = undo_member(batch.items[i]);
    op->parts_wanted = 1;
    op->first_nic = static_cast<uint8_t>(nic);
    admit(op);
  }
}

// Not posted after all. The operation stays active and admitted.
Operation* Worker::undo_member(WorkItem* item) {
  Operation* op = item->operation;
  if (item->with_immediate) --item->peer->credits.sent[paired_nic(item->nic, item->peer->address.nic_count)];
  account(*item->peer, item, -1);
  op->phase = Phase::kBody;
  op->templated = false;
  items_.give_back(item);
  return op;
}

// --- the end ------------------------------------------------------------------------------------------------------------------------

// What complete_write, advance and finish do, for the case that makes up a healthy scatter: one request, of this session, that ended well.
void Worker::complete_member(uint32_t nic, WorkItem* item) {
  Operation& op = *item->operation;
  Peer& peer = *item->peer;
  const uint64_t length = item->length;
  NicState& state = nics_[nic];
  --state.in_flight;
  state.bytes_in_flight -= length;
  --peer.in_flight[nic];
  peer.bytes_in_flight[nic] -= length;
  --total_in_flight_;
  peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  bump(state.statistics.writes);
  bump(state.statistics.write_bytes, length);
  bump(peer.statistics.writes);
  bump(peer.statistics.write_bytes, length);
  items_.give_back(item);
  op.in_flight = 0;
  te_transfer* transfer = op.transfer;
  RemoteRegion* remote = op.remote;
  RemoteCounter* counter = op.counter;
  if (transfer != nullptr) --remote->in_flight;  // else it was fenced off: see orphan
  if (counter != nullptr) --counter->in_flight;
  if (remote->revoke_pending || (counter != nullptr && counter->revoke_pending)) [[unlikely]] {
    if (remote->revoke_pending && remote->in_flight == 0) acknowledge_revocation(peer, *remote, true);
    if (counter != nullptr && counter->revoke_pending && counter->in_flight == 0)
      acknowledge_revocation(peer, *counter, false);
  }
  if (op.stopped || transfer == nullptr) [[unlikely]]
    return advance(&op);
  op.reported = true;
  active_.remove(&op);
  op.admitted = false;
  unuse(peer, remote, counter);
  --transfer->undrained;
  if (--transfer->unfinished == 0) {
    end_transfer(transfer);
    settle_quiesced(transfer);
  }
  leave_flight(*op.flight);
}

// An entry has drained, or its turn is over: the last to leave gives the flight back.
void Worker::leave_flight(Flight& flight) {
  if (--flight.remaining > 0) return;
  Target* target = flight.target;
  flight.region->leave();
  engine_.give_back_flight(&flight);
  if (target->leave()) engine_.recycle(target);
}

}  // namespace te
