// The attach and revoke protocol.
//
// An initiator may use a region or counter only while it is attached: it asked the owner (by serial) and was granted keys or an id. The owner
// knows every holder, so closing is safe: it revokes, each holder stops posting, waits until what it has in flight has completed, and
// acknowledges. Records are sequenced, so an acknowledgement is never seen before the attachment that it ends, and a holder never
// asks again before it has acknowledged.
// A revocation may be temporary (a fence, new keys): the holder then attaches again on its own, and operations that were under way go
// on where they stopped.
#include <algorithm>
#include <unordered_set>

#include "proxy/worker.h"

namespace te {
namespace {

Record answer(RecordType type, uint64_t serial, Grant grant = Grant::kRefused) {
  Record record;
  record.type = type;
  record.serial = serial;
  record.granted = grant;
  return record;
}

}  // namespace

// --- the holder's half -----------------------------------------------------------------------------------------------------------

void Worker::set_attachment(Remote& remote, Attachment state) {
  remote.state.store(state, std::memory_order_release);
  ++remote.peer->epoch;
}

// Is it attached? If not, that is asked for.
bool Worker::attached(Peer& peer, Remote& remote, RecordType request) {
  const Attachment state = remote.state.load(std::memory_order_relaxed);
  if (state == Attachment::kAttached) return true;
  if (state != Attachment::kNew || remote.revoke_pending) return false;
  set_attachment(remote, Attachment::kAttaching);
  push_record(peer, answer(request, remote.serial));
  return false;
}

void Worker::take_region_attached(Peer& peer, const Record& record) {
  const auto found = peer.remote_regions.find(record.serial);
  if (found == peer.remote_regions.end() ||
      found->second->state.load(std::memory_order_relaxed) != Attachment::kAttaching)
    return;
  RemoteRegion& remote = *found->second;
  const bool usable =
      record.granted == Grant::kGranted && record.length == remote.length && record.nics >= peer.address.nic_count;
  if (usable) {
    std::copy(record.base.begin(), record.base.end(), remote.base);
    std::copy(record.key.begin(), record.key.end(), remote.key);
    remote.slot_bytes = record.slot_bytes;
  }
  set_attachment(remote, usable ? Attachment::kAttached : Attachment::kRefused);
  // A descriptor was refused, perhaps because it claims what is not so. Callers who learn of it may come with a right one at once.
  if (!usable) engine_.forget_remote(remote, true);
  ++remote.operations;  // keeps the object while the operations that waited for it go on or fail
  readmit(peer);
  --remote.operations;
  recycle_if_unused(peer, remote, true);
}

void Worker::take_counter_attached(Peer& peer, const Record& record) {
  const auto found = peer.remote_counters.find(record.serial);
  if (found == peer.remote_counters.end() ||
      found->second->state.load(std::memory_order_relaxed) != Attachment::kAttaching)
    return;
  RemoteCounter& remote = *found->second;
  const bool granted = record.granted == Grant::kGranted && record.index < kMaxCounterIndex;
  remote.id = record.id;
  remote.counter_index = record.index;
  remote.exhausted = record.granted == Grant::kExhausted;
  set_attachment(remote, granted ? Attachment::kAttached : Attachment::kRefused);
  if (!granted && !remote.exhausted) engine_.forget_remote(remote, false);
  ++remote.operations;  // as above
  readmit(peer);
  --remote.operations;
  if (remote.exhausted) {  // ids may be free again later
    remote.exhausted = false;
    set_attachment(remote, Attachment::kNew);
  }
  recycle_if_unused(peer, remote, false);
}

void Worker::take_revoke_region(Peer& peer, const Record& record) {
  const auto found = peer.remote_regions.find(record.serial);
  if (found == peer.remote_regions.end()) return push_record(peer, answer(RecordType::kRegionRevoked, record.serial));
  revoke(peer, *found->second, record.temporary, true);
}

void Worker::take_revoke_counter(Peer& peer, const Record& record) {
  const auto found = peer.remote_counters.find(record.serial);
  if (found == peer.remote_counters.end()) return push_record(peer, answer(RecordType::kCounterRevoked, record.serial));
  revoke(peer, *found->second, false, false);
}

// Nothing more is posted towards it until it is attached anew.
void Worker::hold_ready(Peer& peer, const Remote& remote) {
  for (Operation* op = peer.ready.front(); op != nullptr;) {
    Operation* next = peer.ready.next(op);
    if (op->remote == &remote || op->counter == &remote) {
      leave_queue(op);
      enqueue(peer, op, Queue::kWaiting);
    }
    op = next;
  }
}

void Worker::revoke(Peer& peer, Remote& remote, bool temporary, bool is_region) {
  set_attachment(remote, temporary ? Attachment::kNew : Attachment::kRevoked);
  remote.revoke_pending = true;
  ++remote.operations;  // keeps the object while operations that use it end
  if (temporary) hold_ready(peer, remote);
  for (Operation* op = peer.ready.front(); op != nullptr;) {
    Operation* next = peer.ready.next(op);
    if (op->remote == &remote || op->counter == &remote) {
      leave_queue(op);
      if (op->in_flight == 0) {
        fail(op, Status::kRegionClosed,
             is_region ? "the peer closed the target region" : "the peer closed the counter");
      } else {  // ends when it has drained: see advance
        op->stopped = true;
        note(*op, Status::kRegionClosed, 0, -1,
             is_region ? "the peer closed the target region during the write"
                       : "the peer closed the counter during the write");
      }
    }
    op = next;
  }
  if (!temporary) readmit(peer);
  --remote.operations;
  if (remote.in_flight == 0 && remote.revoke_pending) acknowledge_revocation(peer, remote, is_region);
}

void Worker::acknowledge_revocation(Peer& peer, Remote& remote, bool is_region) {
  remote.revoke_pending = false;
  push_record(peer, answer(is_region ? RecordType::kRegionRevoked : RecordType::kCounterRevoked, remote.serial));
  if (remote.state.load(std::memory_order_relaxed) == Attachment::kNew) readmit(peer);
  else recycle_if_unused(peer, remote, is_region);
}

// The operation no longer needs its remote ends.
void Worker::unclaim(Operation* op) {
  op->admitted = false;
  unuse(*op->peer, op->remote, op->counter);
}

void Worker::unuse(Peer& peer, RemoteRegion* region, RemoteCounter* counter) {
  if (--region->operations == 0) recycle_if_unused(peer, *region, true);
  if (counter != nullptr && --counter->operations == 0) recycle_if_unused(peer, *counter, false);
}

// What the owner closed is of no use any more: its handle goes, and callers who still have it learn that the region is closed.
void Worker::recycle_if_unused(Peer& peer, Remote& remote, bool is_region) {
  const Attachment state = remote.state.load(std::memory_order_relaxed);
  if (state == Attachment::kRevoked || state == Attachment::kRefused || peer.gone()) recycle(peer, remote, is_region);
}

void Worker::recycle(Peer& peer, Remote& remote, bool is_region) {
  if (remote.operations > 0 || remote.revoke_pending || remote.in_flight > 0) return;
  const Attachment state = remote.state.load(std::memory_order_relaxed);
  remote.former_closed.store(state == Attachment::kRevoked || state == Attachment::kRefused, std::memory_order_relaxed);
  engine_.forget_remote(remote, is_region);
  remote.former_serial = remote.serial;
  remote.former_length = is_region ? static_cast<RemoteRegion&>(remote).length : 0;
  remote.former_peer.store(&peer, std::memory_order_relaxed);
  remote.former_handle.store(remote.handle.load(std::memory_order_relaxed), std::memory_order_release);
  if (is_region) {
    if (const auto it = peer.remote_regions.find(remote.serial);
        it != peer.remote_regions.end() && it->second == &remote)
      peer.remote_regions.erase(it);
    engine_.remote_regions_.recycle(static_cast<RemoteRegion*>(&remote));
  } else {
    if (const auto it = peer.remote_counters.find(remote.serial);
        it != peer.remote_counters.end() && it->second == &remote)
      peer.remote_counters.erase(it);
    engine_.remote_counters_.recycle(static_cast<RemoteCounter*>(&remote));
  }
}

// A table is full. What is not attached (any more) may have been closed by its owner since, without our hearing of it.
void Worker::sweep(bool peers) {
  const auto give_up = [this](Remote& remote, bool is_region) {
    if (remote.state.load(std::memory_order_relaxed) == Attachment::kNew) recycle(*remote.peer, remote, is_region);
  };
  engine_.remote_regions_.for_each([&](RemoteRegion& remote) { give_up(remote, true); });
  engine_.remote_counters_.for_each([&](RemoteCounter& remote) { give_up(remote, false); });
  if (peers) sweep_peers();
  engine_.sweeps_.fetch_add(1, std::memory_order_release);
  futex_wake_all(&engine_.sweeps_);
}

// Peers that are gone, lost or have parted, and that nothing of ours refers to.
void Worker::sweep_peers() {
  std::unordered_set<const Peer*> used;
  const auto use = [&](const auto& remote) { used.insert(remote.peer); };
  engine_.remote_regions_.for_each(use);
  engine_.remote_counters_.for_each(use);
  for (const Ghost& ghost : ghosts_) used.insert(ghost.peer);
  for (Operation* op = active_.front(); op != nullptr; op = active_.next(op))
    if (op->peer != nullptr) used.insert(op->peer);
  for (Peer* peer = known_.front(); peer != nullptr;) {
    Peer* next = known_.next(peer);
    const uint32_t state = peer->state.load(std::memory_order_relaxed);
    const bool over = peer->gone() || state == TE_PEER_LOST || state == TE_PEER_CLOSED;
    if (over && !peer->session.paths_open && peer->former_in_flight == 0 && peer->staged_arriving == 0 &&
        !used.contains(peer) && peer->operations.load(std::memory_order_acquire) == 0 &&
        peer->unread.load(std::memory_order_acquire) == 0) {
      known_.remove(peer);
      scheduled_.remove(peer);
      std::erase(doubted_, peer);
      peer->retired = true;
      peer->remote_regions = {};
      peer->remote_counters = {};
      engine_.retire_peer(peer);
    }
    peer = next;
  }
}

// --- the owner's half ------------------------------------------------------------------------------------------------------------

void Worker::take_attach_region(Peer& peer, uint64_t serial) {
  Region* region = engine_.region_by_serial(serial);
  if (region == nullptr || !region->open.load(std::memory_order_seq_cst))
    return push_record(peer, answer(RecordType::kRegionAttached, serial));
  if (region->rekeying) {
    region->waiting_holders.push_back(&peer);
    return;
  }
  grant_region(peer, *region);
}

void Worker::grant_region(Peer& peer, Region& region) {
  Record record = answer(RecordType::kRegionAttached, region.serial, Grant::kGranted);
  record.length = region.span.length;
  record.nics = static_cast<uint8_t>(nic_count_);
  const Staging* staging = region.staged() ? engine_.staging_.load(std::memory_order_acquire) : nullptr;
  if (staging != nullptr) record.slot_bytes = staging->slot_bytes;
  for (uint32_t i = 0; i < nic_count_; ++i) {
    const MemoryKey& key = staging != nullptr ? staging->keys[i] : region.keys[i];
    record.base[i] = key.base + (staging != nullptr ? staging->length() / 2 : 0);
    record.key[i] = key.remote_key;
  }
  if (std::find(region.holders.begin(), region.holders.end(), &peer) == region.holders.end()) {
    region.holders.push_back(&peer);
    peer.session.regions.push_back(&region);
  }
  push_record(peer, std::move(record));
}

void Worker::take_attach_counter(Peer& peer, uint64_t serial) {
  Counter* counter = engine_.counter_by_serial(serial);
  if (counter == nullptr || !counter->open.load(std::memory_order_relaxed))
    return push_record(peer, answer(RecordType::kCounterAttached, serial));
  Record record = answer(RecordType::kCounterAttached, serial, Grant::kGranted);
  for (const Counter::Holder& holder : counter->holders) {
    if (holder.peer != &peer) continue;
    record.id = holder.id;
    record.index = holder.index;
    return push_record(peer, std::move(record));
  }
  std::vector<Counter*>& counters = peer.session.counters;
  size_t index = 0;
  while (index < counters.size() && counters[index] != nullptr) ++index;
  if (index >= kMaxCounterIndex || !ids_.take(IdUse::kPlain, &peer, counter, now_, &record.id))
    return push_record(peer, answer(RecordType::kCounterAttached, serial, Grant::kExhausted));
  if (index == counters.size()) counters.push_back(nullptr);
  counters[index] = counter;
  record.index = static_cast<uint16_t>(index);
  counter->holders.push_back({&peer, record.id, record.index});
  peer.session.granted_ids.push_back(record.id);
  push_record(peer, std::move(record));
}

void Worker::take_revoked(Peer& peer, const Record& record) {
  if (record.type == RecordType::kRegionRevoked) {
    if (Region* region = engine_.region_by_serial(record.serial)) {
      holder_gone(*region, peer);
      std::erase(peer.session.regions, region);
      const auto handle = static_cast<int64_t>(region->handle.load(std::memory_order_relaxed));
      for (Operation* op : closings_)
        if (op->kind == OperationKind::kFence && op->peer == &peer) std::erase(op->watched, handle);
    }
    return continue_closings();
  }
  Counter* counter = engine_.counter_by_serial(record.serial);
  if (counter == nullptr) return;
  for (const Counter::Holder& holder : counter->holders) {
    if (holder.peer != &peer) continue;
    ids_.give_back(holder.id);
    std::erase(peer.session.granted_ids, holder.id);
    peer.session.counters[holder.index] = nullptr;
  }
  std::erase_if(counter->holders, [&](const Counter::Holder& holder) { return holder.peer == &peer; });
  continue_closings();
}

}  // namespace te
