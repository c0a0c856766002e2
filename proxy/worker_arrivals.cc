// The receiver's half of staging (proxy/staging.h): slots of ours that peers write to, and what comes into them.
#include <algorithm>
#include <utility>

#include "proxy/worker.h"

namespace te {
namespace {

Record staged_done(uint32_t token, bool granted) {
  Record record;
  record.type = RecordType::kStagedDone;
  record.token = token;
  record.granted = granted ? Grant::kGranted : Grant::kRefused;
  return record;
}

}  // namespace

void Worker::know_incoming_slots() {
  if (staging_.arrivals != nullptr) return;
  const Staging* own = engine_.staging_.load(std::memory_order_acquire);
  staging_.arrivals.reset(new Arrival[own->count]);
  for (uint32_t i = own->count; i > 0; --i) staging_.free_slots.push_back(static_cast<uint16_t>(i - 1));
}

void Worker::take_stage_request(Peer& peer, uint32_t count) {
  if (engine_.staging_.load(std::memory_order_acquire) == nullptr) return;
  know_incoming_slots();
  Session& s = peer.session;
  s.stage_wanted = std::min(s.stage_wanted + count, 4 * StagingState::kMostSlots);
  if (std::find(staging_.asking.begin(), staging_.asking.end(), &peer) == staging_.asking.end())
    staging_.asking.push_back(&peer);
  grant_slots();
}

// In turn, and to each no more at a time than all of them could have.
void Worker::grant_slots() {
  size_t passed = 0;  // over in a row
  while (!staging_.free_slots.empty() && passed < staging_.asking.size()) {
    Peer* peer = staging_.asking.front();
    staging_.asking.pop_front();
    Session& s = peer->session;
    const uint32_t room = StagingState::kMostSlots - std::min(StagingState::kMostSlots, s.stage_held);
    const auto count = std::min({s.stage_wanted, room, static_cast<uint32_t>(staging_.free_slots.size())});
    Record record;
    record.type = RecordType::kStageSlots;
    for (uint32_t i = 0; i < count; ++i) {
      const uint16_t slot = staging_.free_slots.back();
      staging_.free_slots.pop_back();
      staging_.arrivals[slot].use = Arrival::Use::kGranted;
      staging_.arrivals[slot].peer = peer;
      record.ids.push_back(slot);
    }
    s.stage_held += count;
    s.stage_wanted -= count;
    if (s.stage_wanted > 0) staging_.asking.push_back(peer);
    passed = count == 0 ? passed + 1 : 0;
    if (count > 0) push_record(*peer, std::move(record));
  }
}

bool Worker::holds_slot(const Peer& peer, uint16_t slot) const {
  const Staging* own = engine_.staging_.load(std::memory_order_acquire);
  return own != nullptr && staging_.arrivals != nullptr && slot < own->count &&
         staging_.arrivals[slot].use == Arrival::Use::kGranted && staging_.arrivals[slot].peer == &peer &&
         !staging_.arrivals[slot].copying;
}

void Worker::take_back_slot(Peer& peer, uint16_t slot) {
  Arrival& a = staging_.arrivals[slot];
  a.use = Arrival::Use::kFree;
  a.peer = nullptr;
  staging_.free_slots.push_back(slot);
  if (peer.session.stage_held > 0) --peer.session.stage_held;
}

void Worker::take_stage_return(Peer& peer, const std::vector<uint16_t>& ids, bool unknown) {
  for (const uint16_t slot : ids) {
    if (!holds_slot(peer, slot)) {
      bump(stray_messages_);
    } else if (unknown) {  // no more use in this session; then the ghost's
      staging_.arrivals[slot].use = Arrival::Use::kRetired;
      --peer.session.stage_held;
    } else {
      take_back_slot(peer, slot);
    }
  }
  grant_slots();
}

// Of a lost peer: free if it has drained, else the ghost's.
void Worker::leave_slots(Peer& peer, bool drained, std::vector<uint16_t>* ghosts) {
  const Staging* own = engine_.staging_.load(std::memory_order_acquire);
  for (uint16_t slot = 0; staging_.arrivals != nullptr && slot < own->count; ++slot) {
    Arrival& a = staging_.arrivals[slot];
    if ((a.use != Arrival::Use::kGranted && a.use != Arrival::Use::kRetired) || a.peer != &peer) continue;
    a.use = Arrival::Use::kGhost;
    a.peer = nullptr;
    ghosts->push_back(slot);
  }
  if (!drained) return;
  free_ghost_slots(*ghosts);
  ghosts->clear();
}

void Worker::free_ghost_slots(const std::vector<uint16_t>& slots) {
  for (const uint16_t slot : slots) {
    Arrival& a = staging_.arrivals[slot];
    a.use = Arrival::Use::kFree;
    if (!a.copying) staging_.free_slots.push_back(slot);  // else when that has ended
  }
  if (!slots.empty()) grant_slots();
}

// --- the receiver's half ---------------------------------------------------------------------------------------------------------------

void Worker::take_staged(Peer& peer, const Record& record) {
  if (record.slot == kNoSlot) {
    // Of this session all its pieces were answered. Of former ones the answer says that nothing is being copied any more.
    if (peer.staged_former == 0) return take_tail(peer, record);
    if (peer.session.stage_tails.size() < StagingState::kMostPieces) peer.session.stage_tails.push_back(record);
    else lose(peer, Status::kPeerLost, "the peer sends more records than it may");
    return;
  }
  if (!holds_slot(peer, record.slot)) {
    bump(damaged_messages_);
    return push_record(peer, staged_done(record.token, false));
  }
  const Staging* own = engine_.staging_.load(std::memory_order_acquire);
  Region* region = engine_.region_by_serial(record.serial);
  const bool right = region != nullptr && region->staged() &&
                     std::find(region->holders.begin(), region->holders.end(), &peer) != region->holders.end() &&
                     record.length > 0 && record.length <= own->slot_bytes &&
                     range_fits(record.offset, record.length, region->span.length);
  if (!right) {
    bump(damaged_messages_);
    take_back_slot(peer, record.slot);
    grant_slots();
    return push_record(peer, staged_done(record.token, false));
  }
  Arrival& a = staging_.arrivals[record.slot];
  a.copying = true;
  a.region = region;
  a.from = &peer;
  a.session = peer.session.number;
  a.token = record.token;
  a.to_device = true;
  a.device = region->span.device_index;
  a.address = reinterpret_cast<uint64_t>(region->span.address) + record.offset;
  a.anchor = reinterpret_cast<uint64_t>(region->span.address);
  a.buffer_id = region->buffer_id;
  a.host = own->incoming(record.slot);
  a.length = record.length;
  ++region->arriving;
  ++peer.staged_arriving;
  submit_copy(a);
}

void Worker::take_tail(Peer& peer, const Record& record) {
  bool known = true;
  if (record.count > 0) {
    const IdEntry& entry = ids_[record.id];
    known = entry.use == IdUse::kPlain && entry.peer == &peer;
    if (known && engine_.flush_devices_.load(std::memory_order_acquire) != 0) flush_devices();
    if (known) raise(*entry.counter, record.count);
    else bump(stray_immediates_);
  }
  push_record(peer, staged_done(record.token, known));
}

void Worker::arrival_copied(Arrival& a) {
  Peer& peer = *a.from;
  Region& region = *a.region;
  const auto slot = static_cast<uint16_t>(&a - staging_.arrivals.get());
  a.copying = false;
  --region.arriving;
  --peer.staged_arriving;
  if (a.session != peer.session.number) --peer.staged_former;
  if (a.use == Arrival::Use::kFree) staging_.free_slots.push_back(slot);  // given up meanwhile
  if (a.use == Arrival::Use::kGranted) take_back_slot(peer, slot);
  grant_slots();
  if (a.session == peer.session.number && peer.connected())
    push_record(peer, staged_done(a.token, a.status == Status::kOk));
  if (peer.staged_former == 0) {
    const std::vector<Record> tails = std::exchange(peer.session.stage_tails, {});
    for (const Record& record : tails) take_tail(peer, record);
  }
  if (!closings_.empty() || !rekeying_.empty()) continue_closings();
}

}  // namespace te
