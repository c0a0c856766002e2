// Closing regions and counters, and fences: how an owner makes sure that nothing lands any more.
//
// Three means, in this order:
//   1. The holder's word. It stopped, drained and said so (revocation). Needs a peer that answers.
//   2. New keys. Where the network refuses dead keys, the region is deregistered and registered again; the other holders are
//      asked to pause first, and attach again afterwards.
//   3. Proof of death. Where it does not (shm, tcp), only the end of the peer's process, plus draining our own queues, is proof. Until then a
//      region that the lost peer held stays registered, and fences stay open: slow, but never a false "quiesced".
#include <algorithm>
#include <utility>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr uint32_t kQuietTicks = 4;
constexpr int64_t kFarewell = 200'000'000;  // for what a dead process had left to its kernel to deliver

Record revoke_record(RecordType type, uint64_t serial, bool temporary) {
  Record record;
  record.type = type;
  record.serial = serial;
  record.temporary = temporary;
  return record;
}

}  // namespace

void Worker::begin_close_region(Operation* op) {
  op->region->closing = op;
  closings_.push_back(op);
  continue_closings();
}

void Worker::begin_close_counter(Operation* op) {
  op->local_counter->closing = op;
  closings_.push_back(op);
  continue_closings();
}

void Worker::begin_fence(Operation* op) {
  Peer& peer = *op->peer;
  op->session = peer.session.number;
  op->patience_ns = deadline_after(now_, settings_.peer_timeout_ns);
  closings_.push_back(op);
  continue_closings();
}

void Worker::continue_closings() {
  if (in_closings_) return;  // a step may end in here again
  in_closings_ = true;
  for (size_t i = 0; i < rekeying_.size();) {
    Region* region = rekeying_[i];
    if (region->holders.empty() && region->arriving == 0) {
      rekeying_.erase(rekeying_.begin() + static_cast<std::ptrdiff_t>(i));
      finish_rekey(*region);
    } else {
      ++i;
    }
  }
  const std::vector<Operation*> steps = closings_;
  for (Operation* op : steps) {
    if (std::find(closings_.begin(), closings_.end(), op) == closings_.end()) continue;  // ended by an earlier step
    const bool done = op->kind == OperationKind::kCloseRegion    ? close_region_step(op)
                      : op->kind == OperationKind::kCloseCounter ? close_counter_step(op)
                                                                 : fence_step(op);
    if (!done) continue;
    forget_closing(op);
    finish(op);
  }
  in_closings_ = false;
}

bool Worker::close_region_step(Operation* op) {
  Region& region = *op->region;
  if (!op->started && !region.rekeying) {
    op->started = true;
    const std::vector<Peer*> holders = region.holders;
    for (Peer* peer : holders) push_record(*peer, revoke_record(RecordType::kRevokeRegion, region.serial, false));
  }
  return op->started && region_released(region);
}

bool Worker::region_released(Region& region) {
  if (region.rekeying || !region.holders.empty() || region.arriving > 0 ||
      region.users.load(std::memory_order_seq_cst) != 0)
    return false;
  if (capabilities_.keys_enforced) return true;  // deregistering ends what a lost peer could do
  const te_handle handle = region.handle.load(std::memory_order_relaxed);
  return std::none_of(ghosts_.begin(), ghosts_.end(), [&](const Ghost& ghost) {
    return std::find(ghost.regions.begin(), ghost.regions.end(), handle) != ghost.regions.end();
  });
}

bool Worker::close_counter_step(Operation* op) {
  Counter& counter = *op->local_counter;
  if (!op->started) {
    op->started = true;
    while (!counter.armed.empty()) fail(counter.armed.back(), Status::kClosed, "the counter was closed");
    const std::vector<Counter::Holder> holders = counter.holders;
    for (const Counter::Holder& holder : holders)
      push_record(*holder.peer, revoke_record(RecordType::kRevokeCounter, counter.serial, false));
  }
  if (!counter.holders.empty()) return false;
  unbind_all(counter);
  return true;
}

// `watched` holds the regions that are not yet certain.
bool Worker::fence_step(Operation* op) {
  Peer& peer = *op->peer;
  const bool same_session = peer.connected() && peer.session.number == op->session;
  if (!op->started) {
    op->started = true;
    if (same_session) {
      const std::vector<Region*> regions = peer.session.regions;
      for (Region* region : regions) {
        op->watched.push_back(static_cast<int64_t>(region->handle.load(std::memory_order_relaxed)));
        push_record(peer, revoke_record(RecordType::kRevokeRegion, region->serial, true));
      }
    }
  }
  if (same_session && !op->watched.empty()) {
    if (capabilities_.keys_enforced && now_ >= op->patience_ns)  // leaves a ghost with the regions
      lose(peer, Status::kPeerLost, "fenced: the peer did not confirm that it had drained");
    return false;
  }
  bool certain = peer.staged_arriving == 0;
  for (Ghost& ghost : ghosts_) {
    if (ghost.peer != &peer) continue;
    for (size_t i = 0; capabilities_.keys_enforced && i < ghost.regions.size(); ++i) {
      Region* region = engine_.regions_.get(ghost.regions[i]);
      if (region != nullptr && !region->rekeying && region->open.load(std::memory_order_seq_cst))
        start_rekey(*region, nullptr);  // a closed one is deregistered by whoever closes it
    }
    certain &= ghost.regions.empty();
  }
  if (certain) op->watched.clear();
  return certain;
}

// A peer no longer holds the region, by its word or by its loss.
void Worker::holder_gone(Region& region, Peer& peer) {
  std::erase(region.holders, &peer);
  std::erase(region.waiting_holders, &peer);
}

void Worker::start_rekey(Region& region, Peer* except) {
  region.rekeying = true;
  if (except != nullptr) {
    std::erase(region.holders, except);
    std::erase(except->session.regions, &region);
  }
  rekeying_.push_back(&region);
  const std::vector<Peer*> holders = region.holders;
  for (Peer* peer : holders) push_record(*peer, revoke_record(RecordType::kRevokeRegion, region.serial, true));
}

// No holder is left: the old keys die here, and with them whatever a lost or stuck peer could still send.
void Worker::finish_rekey(Region& region) {
  region.rekeying = false;
  bool registered = true;
  {
    const std::lock_guard lock(region.mutex);
    for (uint32_t i = 0; i < nic_count_ && !region.staged(); ++i) {  // a staged one is written to by records only
      if (provider_.deregister_memory(i, region.keys[i])) registered = false;
      if (provider_.register_memory(i, engine_.provider_span(region.span), &region.keys[i])) registered = false;
    }
    if (!registered) {
      region.deregistered = true;
      region.open.store(false, std::memory_order_seq_cst);
    }
  }
  const te_handle handle = region.handle.load(std::memory_order_relaxed);
  for (Ghost& ghost : ghosts_) std::erase(ghost.regions, handle);
  std::vector<Peer*> waiting;
  waiting.swap(region.waiting_holders);
  for (Peer* peer : waiting) take_attach_region(*peer, region.serial);
  std::vector<Peer*> requesters;
  requesters.swap(region.fence_requesters);
  for (Peer* peer : requesters) {
    Record record;
    record.type = RecordType::kFenced;
    record.serial = region.serial;
    record.granted = Grant::kGranted;
    push_record(*peer, std::move(record));
  }
}

// Serial 0: the peer, back after a loss, is asked whether all that it posted before has ended. It answers when that is so.
void Worker::answer_drain(Peer& peer) {
  if (!peer.session.drain_asked || peer.former_in_flight > 0 || peer.outcome_unknown) return;
  peer.session.drain_asked = false;
  Record record;
  record.type = RecordType::kFenced;
  record.granted = Grant::kGranted;
  push_record(peer, std::move(record));
}

void Worker::ask_drain(Peer& peer) {
  if (std::none_of(ghosts_.begin(), ghosts_.end(), [&](const Ghost& ghost) { return ghost.peer == &peer; })) return;
  Record record;
  record.type = RecordType::kFence;
  push_record(peer, std::move(record));
}

// Nothing of the peer's former sessions is under way: what it posted then has landed, and since records wait for the queues (see
// take_records), all that it counted has been taken out.
void Worker::release_ghosts(const Peer& peer) {
  for (Ghost& ghost : ghosts_) {
    if (ghost.peer != &peer) continue;
    for (const uint16_t id : ghost.ids) ids_.release_quarantined(id);
    free_ghost_slots(ghost.slots);
    for (uint32_t n = 0; ghost.paths_open && n < nic_count_; ++n) provider_.close_path(n, ghost.paths[n]);
  }
  std::erase_if(ghosts_, [&](const Ghost& ghost) { return ghost.peer == &peer; });
  continue_closings();
}

// A peer whose transfer ended early asks that nothing of it land any more.
void Worker::take_fence(Peer& peer, uint64_t serial) {
  if (serial == 0) {
    peer.session.drain_asked = true;
    return answer_drain(peer);
  }
  Region* region = engine_.region_by_serial(serial);
  Record record;
  record.type = RecordType::kFenced;
  record.serial = serial;
  if (region == nullptr) {
    record.granted = Grant::kGranted;  // closed and deregistered
  } else if (capabilities_.keys_enforced && region->open.load(std::memory_order_seq_cst)) {
    region->fence_requesters.push_back(&peer);
    if (!region->rekeying) start_rekey(*region, &peer);
    else holder_gone(*region, peer);
    return continue_closings();
  } else if (capabilities_.keys_enforced) {  // it is being closed: that does not wait for this holder any more
    holder_gone(*region, peer);
    std::erase(peer.session.regions, region);
    push_record(peer, std::move(record));
    return continue_closings();
  }
  push_record(peer, std::move(record));
}

void Worker::take_fenced(Peer& peer, const Record& record) {
  if (record.serial == 0) return release_ghosts(peer);
  const auto found = peer.remote_regions.find(record.serial);
  if (found == peer.remote_regions.end()) return;
  RemoteRegion& remote = *found->second;
  if (remote.fence != RemoteRegion::Fence::kAsked) return;
  remote.fence = RemoteRegion::Fence::kNone;
  const bool granted = record.granted == Grant::kGranted;
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    if (op->remote == &remote && op->reported && op->in_flight > 0) {
      if (granted) orphan(op, false);
      else op->patience_ns = 0;  // the owner is closing the region: asked again later
    }
    op = next;
  }
  if (granted && remote.revoke_pending && remote.in_flight == 0) acknowledge_revocation(peer, remote, true);
  readmit(peer);
}

// What the operation has in flight can no longer land: its transfer is quiesced, and late completions concern nobody. (Its
// counter stays in use: a request of no bytes names no key, so no fence stops its immediate.)
void Worker::orphan(Operation* op, bool dead) {
  te_transfer* t = op->transfer;
  if (t == nullptr) return;
  op->transfer = nullptr;
  if (op->session == op->peer->session.number) op->remote->in_flight -= op->in_flight;
  --t->undrained;
  settle_quiesced(t);
  if (op->staged) abandon_pieces(*op, dead);
}

// Operations that ended (deadline, cancel) while work requests of theirs are still out, and stay out: the owner is asked for a fence.
// It takes the keys away, so nothing new is posted with them before, and what can still complete is given the time.
void Worker::request_remote_fences() {
  fences_wanted_ = false;
  if (!capabilities_.keys_enforced) return;
  const int64_t patience = settings_.peer_timeout_ns / 3;
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    if (op->reported && op->in_flight > 0 && op->remote != nullptr && op->transfer != nullptr) {
      fences_wanted_ = true;
      if (op->patience_ns == 0) op->patience_ns = deadline_after(now_, patience);
      if (op->peer->connected() && now_ >= op->patience_ns)
        advance_remote_fence(*op, now_ >= op->patience_ns + patience);
    }
    op = next;
  }
}

void Worker::advance_remote_fence(Operation& stuck, bool at_last) {
  RemoteRegion& remote = *stuck.remote;
  Peer& peer = *stuck.peer;
  if (remote.fence == RemoteRegion::Fence::kNone) {
    remote.fence = RemoteRegion::Fence::kDraining;
    if (remote.state.load(std::memory_order_relaxed) == Attachment::kAttached) set_attachment(remote, Attachment::kNew);
    hold_ready(peer, remote);
  }
  if (remote.fence != RemoteRegion::Fence::kDraining) return;
  for (Operation* op = active_.front(); op != nullptr && !at_last; op = active_.next(op))
    if (op->remote == &remote && !op->reported && op->in_flight > 0) return;
  remote.fence = RemoteRegion::Fence::kAsked;
  Record record;
  record.type = RecordType::kFence;
  record.serial = remote.serial;
  push_record(peer, std::move(record));
}

void Worker::watch_ghosts() {
  for (size_t i = 0; i < ghosts_.size();) {
    Ghost& ghost = ghosts_[i];
    if (capabilities_.keys_enforced) {
      std::erase_if(ghost.regions, [this](te_handle handle) { return engine_.regions_.get(handle) == nullptr; });
      if (ghost.peer->gone()) {  // another engine lives there, or it has closed
        free_ghost_slots(std::exchange(ghost.slots, {}));
        for (Operation* op = active_.front(); op != nullptr;) {
          Operation* next = active_.next(op);
          if (op->peer == ghost.peer && op->staged && op->reported && op->in_flight > 0) orphan(op, false);
          op = next;
        }
      }
      // These wait until it is back, and says that it has drained.
      if (!ghost.regions.empty() || !ghost.slots.empty() || pieces_wait(*ghost.peer)) {
        ++i;
        continue;
      }
    } else {
      if (!ghost.dead) {
        // Somebody else at its address is proof as well: the old process no longer has its sockets.
        ghost.dead = ghost.peer->fate.load(std::memory_order_relaxed) == Fate::kRestarted ||
                     (ghost.paths_open && provider_.death_of(0, ghost.paths[0]) == Death::kProven);
        ghost.dead_since_ns = now_;
      }
      ghost.quiet_rounds = ghost.dead && !polled_something_ ? ghost.quiet_rounds + 1 : 0;
      if (ghost.quiet_rounds < kQuietTicks || now_ - ghost.dead_since_ns < kFarewell) {
        ++i;
        continue;
      }
      for (const uint16_t id : ghost.ids) ids_.release_quarantined(id);
      free_ghost_slots(ghost.slots);
      for (Operation* op = active_.front(); op != nullptr;) {
        Operation* next = active_.next(op);
        if (op->peer == ghost.peer && op->reported && op->in_flight > 0) orphan(op, true);
        op = next;
      }
    }
    for (uint32_t n = 0; ghost.paths_open && n < nic_count_; ++n) provider_.close_path(n, ghost.paths[n]);
    ghosts_.erase(ghosts_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace te
