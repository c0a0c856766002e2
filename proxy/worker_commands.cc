// What callers ask for: from the command ring to the lists of a peer.
#include <algorithm>
#include <bit>

#include "proxy/worker.h"

namespace te {
namespace {

// An unordered transport acknowledges every page anyway; up to this many per NIC it is quicker to let each carry its immediate than
// to wait for the body's completion.
constexpr uint64_t kEagerPages = 16;
constexpr uint32_t kCommandsPerRound = 64;

}  // namespace

bool Worker::take_commands() {
  Operation* op = nullptr;
  uint32_t taken = 0;
  while (taken < kCommandsPerRound && engine_.commands_.pop(&op)) {
    ++taken;
    if (op->kind == OperationKind::kScatter) {
      begin_scatter(op);
      continue;
    }
    if (op->kind != OperationKind::kBatch) {
      begin(op);
      continue;
    }
    for (Operation* entry = op->chain; entry != nullptr;) {
      Operation* next = entry->chain;
      begin(entry);
      entry = next;
    }
    engine_.give_back_operation(op);
  }
  if (engine_.cancel_requested_.load(std::memory_order_relaxed) &&
      engine_.cancel_requested_.exchange(false, std::memory_order_seq_cst))
    cancel_requested();
  if (engine_.sweep_requested_.load(std::memory_order_relaxed) &&
      engine_.sweep_requested_.exchange(false, std::memory_order_seq_cst))
    sweep(engine_.sweep_peers_too_.exchange(false, std::memory_order_relaxed));
  return taken > 0;
}

void Worker::begin(Operation* op) {
  active_.push_back(op);
  next_deadline_ = std::min(next_deadline_, op->deadline_ns);
  if (stopping_) return fail(op, Status::kClosed, "the engine was closed");
  // A cancel that was asked for before the command came out of the ring found nothing in active_.
  if (op->transfer->cancel_requested.load(std::memory_order_acquire))
    return fail(op, Status::kCancelled, "cancelled by the caller");
  if (op->peer != nullptr && op->peer->retired)
    return fail(op, Status::kPeerLost, "the peer was lost or had parted, and was forgotten in this moment");
  switch (op->kind) {
    case OperationKind::kWrite:
    case OperationKind::kPages:
      if (claim(op)) admit(op);
      return;
    case OperationKind::kMessage:
      return admit(op);
    case OperationKind::kConnect:
      return begin_connect(op);
    case OperationKind::kDisconnect:
      return begin_disconnect(op);
    case OperationKind::kFence:
      return begin_fence(op);
    case OperationKind::kCounterReached:
      return begin_reached(op);
    case OperationKind::kCloseRegion:
      return begin_close_region(op);
    case OperationKind::kCloseCounter:
      return begin_close_counter(op);
    case OperationKind::kClaimTarget:
      return op->target != nullptr ? claim_target(op) : claim_prepared(op);
    case OperationKind::kReleaseTarget:
      return op->target != nullptr ? release_target(op) : release_prepared(op);
    case OperationKind::kBatch:
    case OperationKind::kScatter:
      return;  // taken apart in take_commands
  }
}

// The submitter found these objects; only now is it certain that they were not recycled in between.
bool Worker::claim(Operation* op) {
  if (op->peer->gone()) return fail(op, op->peer->gone_status(), op->peer->gone_text()), false;
  if (op->remote->handle.load(std::memory_order_relaxed) != op->remote_handle)
    op->remote = engine_.revive(*op->remote, op->remote_handle);
  if (op->counter != nullptr && op->counter->handle.load(std::memory_order_relaxed) != op->counter_handle) {
    op->counter = engine_.revive(*op->counter, op->counter_handle);
    if (op->counter == nullptr) return fail(op, Status::kRegionClosed, "the peer closed the counter"), false;
  }
  if (op->remote == nullptr) return fail(op, Status::kRegionClosed, "the peer closed the target region"), false;
  op->admitted = true;
  use(*op->peer, op->remote, op->counter);
  return true;
}

// Until unuse they are not recycled.
void Worker::use(Peer& peer, RemoteRegion* region, RemoteCounter* counter) {
  ++region->operations;
  if (!region->listed) peer.remote_regions[region->serial] = region;
  region->listed = true;
  if (counter == nullptr) return;
  ++counter->operations;
  if (!counter->listed) peer.remote_counters[counter->serial] = counter;
  counter->listed = true;
}

void Worker::enqueue(Peer& peer, Operation* op, Queue queue) {
  op->queue = queue;
  if (queue == Queue::kWaiting) peer.waiting.push_back(op);
  if (queue == Queue::kReady) peer.ready.push_back(op);
  if (queue == Queue::kMessages) peer.messages.push_back(op);
  if (queue != Queue::kWaiting) schedule(peer);
}

void Worker::leave_queue(Operation* op) {
  if (op->queue == Queue::kWaiting) op->peer->waiting.remove(op);
  if (op->queue == Queue::kReady) op->peer->ready.remove(op);
  if (op->queue == Queue::kMessages) op->peer->messages.remove(op);
  op->queue = Queue::kNone;
}

// Towards a connected peer with everything attached: ready. Otherwise: start what is missing, and wait for it.
void Worker::admit(Operation* op) {
  Peer& peer = *op->peer;
  if (!peer.connected()) {
    enqueue(peer, op, Queue::kWaiting);
    ensure_connecting(peer);  // may fail all that waits, this one included
    return;
  }
  if (peer.session.their_bye || peer.session.saying_bye) {
    if (peer.gone()) return fail(op, peer.gone_status(), peer.gone_text());
    return enqueue(peer, op, Queue::kWaiting);  // for the next session: see lose
  }
  if (op->kind == OperationKind::kMessage) {
    if (op->length > peer.credits.their_queue_bytes / 2)
      return fail(op, Status::kArgument, "the message is longer than the peer accepts");
    return enqueue(peer, op, Queue::kMessages);
  }
  const Remote* ends[] = {op->remote, op->counter};
  for (const Remote* end : ends) {
    if (end == nullptr) continue;
    const Attachment state = end->state.load(std::memory_order_relaxed);
    const char* what = end == op->remote ? "region" : "counter";
    char why[96];
    if (state == Attachment::kRefused && end->exhausted) {
      std::snprintf(why, sizeof why, "the peer has no id left for this %s", what);
      return fail(op, Status::kExhausted, why);
    }
    if (state == Attachment::kRevoked || state == Attachment::kRefused) {
      std::snprintf(why, sizeof why, "the peer closed the target %s (serial %llu)", what,
                    static_cast<unsigned long long>(end->serial));
      return fail(op, Status::kRegionClosed, why);
    }
  }
  bool here = op->remote->fence == RemoteRegion::Fence::kNone && attached(peer, *op->remote, RecordType::kAttachRegion);
  if (op->counter != nullptr) here &= attached(peer, *op->counter, RecordType::kAttachCounter);
  if (!here) return enqueue(peer, op, Queue::kWaiting);
  if (op->kind == OperationKind::kPages && op->page_count == 0) return finish(op);
  if (!op->planned) {  // else it goes on where it stopped
    if (op->region->staged() || op->remote->slot_bytes > 0) plan_staged(*op);
    else plan(*op);
  }
  enqueue(peer, op, Queue::kReady);
}

// Something that operations of this peer waited for has come, or will never come.
void Worker::readmit(Peer& peer) {
  for (size_t left = peer.waiting.size(); left > 0; --left) {
    Operation* op = peer.waiting.front();
    if (op == nullptr) break;
    leave_queue(op);
    admit(op);
  }
}

void Worker::plan(Operation& op) {
  op.planned = true;
  Peer& peer = *op.peer;
  const bool pages = op.kind == OperationKind::kPages;
  op.chunks = pages ? chunk_count(op.length, max_chunk_) : 1;
  const uint64_t bytes = pages ? op.length * op.page_count : op.length;
  const uint32_t usable = usable_nics(peer);
  const auto usable_count = static_cast<uint32_t>(std::popcount(usable));
  uint32_t parts = nic_count_ == 1 ? 1 : part_count(bytes, usable_count, settings_.shard_bytes);
  if (op.parts_wanted > 0) parts = std::min<uint32_t>(op.parts_wanted, usable_count);
  if (pages) parts = static_cast<uint32_t>(std::min<uint64_t>(parts, op.page_count));
  op.parts = static_cast<uint8_t>(parts);
  const uint64_t longest = pages ? (op.page_count + parts - 1) / parts : 1;
  op.each_page =
      pages && op.counter != nullptr && op.chunks == 1 && settings_.page_immediates != TE_PAGES_LAST &&
      (settings_.page_immediates == TE_PAGES_EACH || (!capabilities_.ordered_writes && longest <= kEagerPages));
  uint32_t nic = op.first_nic;
  if (nic == Operation::kAnyNic) {
    nic = peer.next_nic;
    peer.next_nic = (peer.next_nic + 1) % nic_count_;
  }
  bool body = false;
  for (uint32_t i = 0; i < parts; ++i) {
    while ((usable >> nic & 1) == 0) nic = (nic + 1) % nic_count_;
    plan_part(op, i, nic);
    nic = (nic + 1) % nic_count_;
    body |= op.part[i].units > op.part[i].finals;
  }
  // On an ordered transport the final units may follow the body at once; without a body there is nothing to wait for.
  op.phase = capabilities_.ordered_writes || !body ? Phase::kFinal : Phase::kBody;
}

void Worker::plan_part(Operation& op, uint32_t index, uint32_t nic) {
  Part& part = op.part[index];
  const bool pages = op.kind == OperationKind::kPages;
  const Range range = pages ? even_part(op.page_count, op.parts, index) : byte_part(op.length, op.parts, index);
  part.begin = range.offset;
  part.extent = range.length;
  part.units = pages ? range.length * op.chunks : chunk_count(range.length, max_chunk_);
  part.next = 0;
  part.nic = static_cast<uint8_t>(nic);
  part.finals = 0;
  if (op.counter != nullptr && !op.each_page)
    part.finals = pages ? static_cast<uint32_t>((range.length + kMaxPagesPerImmediate - 1) / kMaxPagesPerImmediate) : 1;
}

void Worker::cancel_requested() {
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    if (!op->reported && op->transfer->cancel_requested.load(std::memory_order_acquire))
      fail(op, Status::kCancelled, "cancelled by the caller");
    op = next;
  }
}

void Worker::begin_connect(Operation* op) {
  Peer& peer = *op->peer;
  if (peer.connected() && !peer.session.their_bye && !peer.session.saying_bye) return finish(op);
  peer.connects.push_back(op);
  ensure_connecting(peer);
}

void Worker::begin_disconnect(Operation* op) {
  Peer& peer = *op->peer;
  const uint32_t state = peer.state.load(std::memory_order_relaxed);
  if (state == TE_PEER_CONNECTING) lose(peer, Status::kCancelled, "disconnected by the caller", TE_PEER_CLOSED);
  if (!peer.connected()) {
    peer.state.store(TE_PEER_CLOSED, std::memory_order_release);
    return finish(op);
  }
  peer.disconnects.push_back(op);
  fail_all(peer, Status::kCancelled, "disconnected by the caller");
  say_bye(peer);
}

void Worker::begin_reached(Operation* op) {
  Counter& counter = *op->local_counter;
  if (counter.handle.load(std::memory_order_relaxed) != op->counter_handle ||
      !counter.open.load(std::memory_order_relaxed))
    return fail(op, Status::kClosed, "the counter was closed");
  counter.armed.push_back(op);
  check_armed(counter);
}

void Worker::check_armed(Counter& counter) {
  const uint64_t value = counter.value.load(std::memory_order_relaxed);
  for (size_t i = 0; i < counter.armed.size();) {
    Operation* op = counter.armed[i];
    if (value < op->threshold) {
      for (const int64_t index : op->watched) {
        const Peer* peer = engine_.peer_at(static_cast<int32_t>(index));
        const uint32_t state = peer == nullptr ? uint32_t{TE_PEER_LOST} : peer->state.load(std::memory_order_relaxed);
        if (state != TE_PEER_LOST && state != TE_PEER_CLOSED) continue;
        char why[120];
        std::snprintf(why, sizeof why, "counter at %llu/%llu when a peer that it depends on was lost",
                      static_cast<unsigned long long>(value), static_cast<unsigned long long>(op->threshold));
        note_failure(op->transfer, Status::kPeerLost, 0, -1, static_cast<int>(index), why);
        report(op, Status::kPeerLost, 0, -1, why);
        break;
      }
      if (!op->reported) {
        ++i;
        continue;
      }
    }
    counter.armed.erase(counter.armed.begin() + static_cast<std::ptrdiff_t>(i));
    op->local_counter = nullptr;
    finish(op);
  }
}

}  // namespace te
