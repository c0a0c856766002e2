// The receiver's side of immediates: 65,536 ids, what each means, and what arrives for it. See native/immediate.h for the argument.
// Worker thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "native/immediate.h"

namespace te {

struct Counter;
struct Peer;

enum class IdUse : uint8_t { kFree, kPlain, kSlot, kQuarantined };

struct IdEntry {
  IdUse use = IdUse::kFree;
  uint8_t seen = 0;      // kSlot: parts that have arrived for the write under way
  uint8_t parts = 0;     // kSlot: of that write; 0: none under way
  uint8_t expected = 0;  // kSlot, retiring: forget the write when this many have arrived
  bool retiring = false;
  uint16_t counter_index = 0;
  Peer* peer = nullptr;
  Counter* counter = nullptr;  // kPlain
};

class IdTable {
 public:
  IdTable() : entries_(kIdCount) {
    for (uint32_t id = 0; id < kIdCount; ++id) free_.push_back(static_cast<uint16_t>(id));
  }

  // False when all ids are in use. The id that was free for longest is taken first. When none is free, one that has been in
  // quarantine for kQuarantineNs is: no network holds a packet that long.
  bool take(IdUse use, Peer* peer, Counter* counter, int64_t now_ns, uint16_t* id) {
    while (free_.empty() && !quarantine_.empty() && now_ns - quarantine_.front().since_ns >= kQuarantineNs) {
      const uint16_t oldest = quarantine_.front().id;
      quarantine_.pop_front();
      if (entries_[oldest].use == IdUse::kQuarantined) give_back(oldest);
    }
    if (free_.empty()) return false;
    *id = free_.front();
    free_.pop_front();
    entries_[*id] = IdEntry{};
    entries_[*id].use = use;
    entries_[*id].peer = peer;
    entries_[*id].counter = counter;
    return true;
  }

  // Its holder has acknowledged that nothing of it is in flight.
  void give_back(uint16_t id) {
    entries_[id] = IdEntry{};
    free_.push_back(id);
  }

  // Something may still arrive for it: it means nothing any more, until the sender is fenced.
  // `peer`: whose window a late arrival still belongs to, if its session lives.
  void quarantine(uint16_t id, Peer* peer, int64_t now_ns) {
    entries_[id] = IdEntry{};
    entries_[id].use = IdUse::kQuarantined;
    entries_[id].peer = peer;
    quarantine_.push_back({id, now_ns});
  }
  void release_quarantined(uint16_t id) {
    if (entries_[id].use != IdUse::kQuarantined) return;
    std::erase_if(quarantine_, [id](const Quarantined& q) { return q.id == id; });
    give_back(id);
  }

  IdEntry& operator[](uint16_t id) { return entries_[id]; }
  size_t free_count() const { return free_.size(); }
  size_t quarantined() const { return quarantine_.size(); }

 private:
  static constexpr int64_t kQuarantineNs = 600LL * 1'000'000'000;
  struct Quarantined {
    uint16_t id;
    int64_t since_ns;
  };
  std::vector<IdEntry> entries_;
  std::deque<uint16_t> free_;
  std::deque<Quarantined> quarantine_;
};

}  // namespace te
