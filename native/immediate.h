// The 32 bits of immediate data that travel with a write, and why counting by them is exact.
//
//   31            16 15                      0
//   +---------------+------------------------+
//   | id            | payload                |
//   +---------------+------------------------+
//
// An id is granted by the receiver to one peer for one purpose, so it tells who sent and what it means:
//
//   plain id (one per peer and counter):   payload = n - 1, "n writes or pages are in memory" (1 <= n <= 65,536)
//   assembly slot (a few per peer):        payload = (parts - 1) << 12 | counter index
//
// Why a counter rises by exactly one per write, whatever the cutting:
//   1. A write on one NIC carries one immediate, on its last work request. On a transport that keeps order the earlier ones are
//      placed before it. On one that does not, the sender posts it only after the earlier ones completed with delivery
//      semantics. Either way the immediate means "all of it is in memory", and it arrives once, because a work request completes
//      once and is never posted again after an uncertain completion.
//   2. A write cut over k NICs sends k immediates with the same slot, each after the bytes of its own NIC by (1). The receiver
//      counts arrivals per slot; at the k-th all k parts are in memory and it raises the counter by one. A slot serves one
//      write at a time: the sender takes it from its free list and gets it back only when the receiver says that all parts
//      were seen. So arrivals of two writes never mix, whatever the order in which NICs are polled.
//   3. A write that fails is never counted: its last immediate is not posted (1), or fewer than k parts arrive (2). The sender then retires the
//      slot: it says how many parts certainly landed; the receiver waits for those, forgets them and reuses the slot. If the
//      outcome of a part is unknown, the receiver never uses that id again in this session.
//   4. An id is given to another peer or counter only after its holder has acknowledged the revocation with nothing in flight,
//      so a late immediate cannot count for somebody else.
// Sixteen bits of id are 65,536 (peer, counter) pairs and slots together; running out is a typed error.
#pragma once

#include <cstdint>

namespace te {

inline constexpr uint32_t kIdCount = 1u << 16;
inline constexpr uint32_t kMaxPagesPerImmediate = 1u << 16;
inline constexpr uint32_t kMaxParts = 16;
inline constexpr uint32_t kCounterIndexBits = 12;
inline constexpr uint32_t kMaxCounterIndex = 1u << kCounterIndexBits;  // counters that one peer may have attached

constexpr uint32_t plain_immediate(uint16_t id, uint32_t count) { return uint32_t{id} << 16 | (count - 1); }

constexpr uint32_t slot_immediate(uint16_t slot, uint32_t parts, uint32_t counter_index) {
  return uint32_t{slot} << 16 | (parts - 1) << kCounterIndexBits | counter_index;
}

constexpr uint16_t immediate_id(uint32_t immediate) { return static_cast<uint16_t>(immediate >> 16); }
constexpr uint32_t immediate_count(uint32_t immediate) { return (immediate & 0xFFFF) + 1; }
constexpr uint32_t immediate_parts(uint32_t immediate) { return (immediate >> kCounterIndexBits & 0xF) + 1; }
constexpr uint32_t immediate_counter(uint32_t immediate) { return immediate & (kMaxCounterIndex - 1); }

}  // namespace te
