// Completions: what the provider says has ended or arrived.
#include <algorithm>
#include <bit>

#include "native/gpu/memory.h"
#include "proxy/worker.h"

namespace te {
namespace {

constexpr int64_t kDoubt = 500'000'000;

}  // namespace

uint32_t Worker::poll_nic(uint32_t nic) {
  const uint32_t count = provider_.poll(nic, completions_);
  if (count > 0 && engine_.flush_devices_.load(std::memory_order_acquire) != 0) [[unlikely]] {
    const auto counts = [](const Completion& c) { return c.kind == CompletionKind::kImmediate; };
    if (std::any_of(completions_, completions_ + count, counts)) flush_devices();
  }
  for (uint32_t i = 0; i < count; ++i) complete(nic, completions_[i]);
  return count;
}

// What a NIC wrote to these GPUs becomes visible to them before a counter says so.
void Worker::flush_devices() {
  const gpu::Cuda* cuda = engine_.flusher_.load(std::memory_order_acquire);
  uint64_t devices = engine_.flush_devices_.load(std::memory_order_relaxed);
  for (; devices != 0; devices &= devices - 1)
    if (gpu::flush_writes(*cuda, std::countr_zero(devices))) bump(failed_flushes_);
}

void Worker::complete(uint32_t nic, const Completion& c) {
  switch (c.kind) {
    case CompletionKind::kImmediate:
      return immediate_arrived(nic, c.immediate);
    case CompletionKind::kReceived:
      return received(nic, c, static_cast<WorkItem*>(c.context));
    case CompletionKind::kPathUp:
    case CompletionKind::kPathDown:
      return path_changed(nic, c);
    case CompletionKind::kNicDown:
    case CompletionKind::kNicUp:
      return nic_changed(nic, c.kind == CompletionKind::kNicUp);
    case CompletionKind::kSent:
      break;
  }
  auto* item = static_cast<WorkItem*>(c.context);
  if (item == nullptr) return;
  if (c.status != Status::kOk) bump(nics_[nic].statistics.errors);
  if (item->kind == WorkKind::kWrite || item->kind == WorkKind::kFlush) return complete_write(nic, c, item);
  if (item->kind == WorkKind::kReceive) {  // a receive that was flushed
    --receives_posted_;
    idle_receives_.push_back(item);
    return;
  }
  complete_send(nic, c, item);
}

void Worker::complete_write(uint32_t nic, const Completion& c, WorkItem* item) {
  if (item->piece != nullptr) [[unlikely]]
    return piece_written(nic, c, item);
  Operation* op = item->operation;
  Peer& peer = *item->peer;
  const bool current = item->session == peer.session.number;
  if (op->templated && current && c.status == Status::kOk) [[likely]]
    return complete_member(nic, item);
  if (current) {
    account(peer, item, -1);
    if (c.status == Status::kOk) peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  } else {  // of a lost session: its windows were given up with it
    --op->in_flight;
    --peer.former_in_flight;
  }
  if (c.status == Status::kOk) {
    NicState& state = nics_[nic];
    bump(item->kind == WorkKind::kFlush ? state.statistics.reads : state.statistics.writes);
    bump(state.statistics.write_bytes, item->length);
    bump(peer.statistics.writes);
    bump(peer.statistics.write_bytes, item->length);
    if (item->slot_part) ++op->slot_delivered;
  } else {
    op->unknown |= c.landed_unknown;
    peer.outcome_unknown |= c.landed_unknown;
    if (current && item->with_immediate)
      write_off(peer, paired_nic(item->nic, peer.address.nic_count), c.landed_unknown);
    if (!op->stopped) {
      op->stopped = true;
      if (op->queue != Queue::kNone) leave_queue(op);
      fail_or_doubt(peer, *op, c, static_cast<int>(nic), current);
    }
  }
  items_.give_back(item);
  // Before the operation ends: after it these objects may belong to somebody else.
  for (Remote* end : {static_cast<Remote*>(op->remote), static_cast<Remote*>(op->counter)})
    if (end != nullptr && end->revoke_pending && end->in_flight == 0)
      acknowledge_revocation(peer, *end, end == op->remote);
  if (op->in_flight == 0 && op->queue == Queue::kNone) advance(op);
  if (!current) answer_drain(peer);
  if (c.status == Status::kPeerLost && current && peer.connected() && !spares_peer())
    lose(peer, Status::kPeerLost, "the connection to the peer broke");
}

// The transfer ends when its work requests have drained, so that it is quiesced; see advance.
void Worker::fail_or_doubt(Peer& peer, Operation& op, const Completion& c, int nic, bool current) {
  const bool one_path_of_several = c.status == Status::kPeerLost && spares_peer();
  if (current && peer.connected() &&
      (c.status == Status::kTransport || c.status == Status::kCancelled || one_path_of_several))
    doubt(peer, op, c, nic);
  else note_failed_request(op, c, nic);
}

// Requests that end in this way may be the first sign of the peer's death (over TCP the only one). What the caller is told should be
// that, so the operation waits while the provider asks, and no longer than kDoubt.
void Worker::doubt(Peer& peer, Operation& op, const Completion& c, int nic) {
  op.doubtful = true;
  op.doubt_status = c.provider_status;
  op.doubt_nic = static_cast<int8_t>(nic);
  if (peer.session.doubt_until < now_) doubted_.push_back(&peer);
  peer.session.doubt_until = now_ + kDoubt;
}

// On the clock.
void Worker::resolve_doubts() {
  const std::vector<Peer*> peers = doubted_;
  for (Peer* peer : peers) {
    Session& s = peer->session;
    const Death death = peer->connected() ? provider_.death_of(0, s.paths[0]) : Death::kNotProven;
    if (death == Death::kProven) lose(*peer, Status::kPeerLost, kDeadText);
    else if ((death == Death::kAsking || spares_peer()) && now_ < s.doubt_until) continue;
    peer->session.doubt_until = 0;
    std::erase(doubted_, peer);
    for (Operation* op = active_.front(); op != nullptr;) {
      Operation* next = active_.next(op);
      if (op->doubtful && op->peer == peer) settle_doubt(op);
      op = next;
    }
  }
}

void Worker::settle_doubt(Operation* op) {
  op->doubtful = false;
  if (op->transfer != nullptr && !op->reported)
    note(*op, Status::kTransport, op->doubt_status, op->doubt_nic,
         "a work request failed, or was flushed after another one had failed");
  if (op->in_flight == 0 && op->queue == Queue::kNone) advance(op);
}

// kCancelled is the provider's word for "flushed": the caller cancelled nothing.
void Worker::note_failed_request(Operation& op, const Completion& c, int nic) {
  const bool flushed = c.status == Status::kCancelled;
  note(op, flushed ? Status::kTransport : c.status, c.provider_status, nic,
       flushed ? "a work request was flushed after another one failed" : "a work request failed");
}

// The credit of an immediate that failed. If it certainly never left, it is free again. Otherwise only the receiver's count can free it, and
// the immediate may never come: the receiver is told to count it as polled. Should it arrive after all, the window is one wider
// than granted for the rest of the session; completion queues have that slack.
void Worker::write_off(Peer& peer, uint32_t remote_nic, bool landed_unknown) {
  if (!landed_unknown) {
    --peer.credits.sent[remote_nic];
    return;
  }
  Record record;
  record.type = RecordType::kWriteOff;
  record.nics = static_cast<uint8_t>(remote_nic);
  record.index = 1;
  push_record(peer, std::move(record));
}

// Nothing of the operation is in flight, and it is in no list.
void Worker::advance(Operation* op) {
  if (op->stopped) {
    if (op->doubtful && !op->reported) return;  // see resolve_doubts
    if (op->has_slot) retire_slot(*op);
    if (!op->reported) report(op, op->failure, 0, -1, "");
    return finish(op);
  }
  if (op->staged) return advance_staged(op);
  if (op->phase == Phase::kBody) {
    op->phase = Phase::kFinal;
    return fully_posted(*op) ? advance(op) : admit(op);  // the region may have been revoked for a while
  }
  if (op->phase == Phase::kFinal && op->flush && op->length > 0 && capabilities_.reads) {
    op->phase = Phase::kFlush;
    return admit(op);
  }
  if (op->has_slot) retire_slot(*op);
  finish(op);
}

void Worker::retire_slot(Operation& op) {
  op.has_slot = false;
  Peer& peer = *op.peer;
  if (!peer.connected()) return;
  Session& s = peer.session;
  const auto lent = std::find_if(s.lent.begin(), s.lent.end(),
                                 [&](const Session::Lent& l) { return l.slot == op.slot && l.operation == &op; });
  if (lent == s.lent.end()) return;  // returned already: all parts landed, whatever the provider said
  if (op.slot_delivered == op.parts) {
    lent->operation = nullptr;  // the receiver returns it once it has seen all parts
    return;
  }
  s.lent.erase(lent);
  if (op.slot_posted == 0) {
    s.slots.push_back(op.slot);
    return;
  }
  if (op.unknown) s.dropped_slots.push_back(op.slot);
  Record record;
  record.type = RecordType::kRetireSlot;
  record.id = op.slot;
  record.delivered = op.slot_delivered;
  record.unknown = op.unknown;
  push_record(peer, std::move(record));
}

void Worker::take_slots(Peer& peer, const std::vector<uint16_t>& ids) {
  Session& s = peer.session;
  for (const uint16_t id : ids) {
    std::erase_if(s.lent, [id](const Session::Lent& lent) { return lent.slot == id; });
    const auto dropped = std::find(s.dropped_slots.begin(), s.dropped_slots.end(), id);
    if (dropped == s.dropped_slots.end()) s.slots.push_back(id);
    else s.dropped_slots.erase(dropped);
  }
  if (!peer.ready.empty()) schedule(peer);
}

void Worker::immediate_arrived(uint32_t nic, uint32_t immediate) {
  bump(nics_[nic].statistics.immediates);
  const uint16_t id = immediate_id(immediate);
  IdEntry& entry = ids_[id];
  if (entry.use != IdUse::kPlain && entry.use != IdUse::kSlot) {
    bump(stray_immediates_);
    if (entry.peer != nullptr) ++entry.peer->credits.polled[nic];
    return;
  }
  Peer& peer = *entry.peer;
  peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  bump(peer.statistics.immediates);
  Credits& credits = peer.credits;
  if (++credits.polled[nic] - credits.reported[nic] >= std::max(peer.session.granted_window / 2, 1u)) schedule(peer);
  if (entry.use == IdUse::kPlain) return raise(*entry.counter, immediate_count(immediate));
  slot_arrived(id, entry, immediate);
}

void Worker::slot_arrived(uint16_t id, IdEntry& entry, uint32_t immediate) {
  Peer& peer = *entry.peer;
  if (entry.seen == 0) {
    entry.parts = static_cast<uint8_t>(immediate_parts(immediate));
    entry.counter_index = static_cast<uint16_t>(immediate_counter(immediate));
  }
  ++entry.seen;
  if (entry.retiring) {
    if (entry.seen < entry.expected) return;
  } else {
    if (entry.seen < entry.parts) return;
    const std::vector<Counter*>& counters = peer.session.counters;
    if (entry.counter_index < counters.size() && counters[entry.counter_index] != nullptr)
      raise(*counters[entry.counter_index], 1);
    else bump(stray_immediates_);
  }
  entry.seen = entry.parts = entry.expected = 0;
  entry.retiring = false;
  peer.session.slots_to_return.push_back(id);
  schedule(peer);
}

// Every byte that this counts is in memory: see native/immediate.h.
void Worker::raise(Counter& counter, uint64_t by) {
  const uint64_t value = counter.value.load(std::memory_order_relaxed) + by;
  counter.value.store(value, std::memory_order_release);
  if (!counter.bindings.empty()) raise_bound(counter, value);
  counter.wake_if_reached(value);
  if (!counter.armed.empty()) check_armed(counter);
}

}  // namespace te
