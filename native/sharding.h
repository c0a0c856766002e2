// How bytes and pages are dealt out: pure functions without state, so that every property of them can be tested alone.
//
// Three levels. A write is cut into `parts`, one per NIC used. A part is cut into `chunks`, each at most as long as one work
// request may be. A page list is cut into `parts` by pages, and each page into chunks. Each level covers what it cuts
// exactly: ranges are adjacent, the first starts at 0, the last ends at the length. A length of 0 has one part and one
// empty chunk, because it still notifies.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace te {

struct Range {
  uint64_t offset = 0;
  uint64_t length = 0;
};

// Over how many of `nics` NICs a contiguous write of `length` bytes is spread: every part has at least `shard_bytes`.
constexpr uint32_t part_count(uint64_t length, uint32_t nics, uint64_t shard_bytes) {
  const uint64_t most = length / std::max<uint64_t>(shard_bytes, 1);
  return static_cast<uint32_t>(std::clamp<uint64_t>(most, 1, nics));
}

// Item ranges of `parts` parts that differ by at most one item.
constexpr Range even_part(uint64_t items, uint32_t parts, uint32_t index) {
  const uint64_t share = items / parts, longer = items % parts;
  const uint64_t offset = share * index + std::min<uint64_t>(index, longer);
  return {offset, share + (index < longer ? 1 : 0)};
}

// Byte ranges: parts begin at multiples of kPartAlignment so that two NICs never write into one cache line of the target
// (when the target itself is aligned). The last part takes the tail.
inline constexpr uint64_t kPartAlignment = 64;
constexpr Range byte_part(uint64_t length, uint32_t parts, uint32_t index) {
  const Range lines = even_part((length + kPartAlignment - 1) / kPartAlignment, parts, index);
  const uint64_t begin = std::min(length, lines.offset * kPartAlignment);
  const uint64_t end = std::min(length, (lines.offset + lines.length) * kPartAlignment);
  return {begin, end - begin};
}

constexpr uint64_t chunk_count(uint64_t length, uint64_t max_chunk) {
  return length == 0 ? 1 : (length - 1) / max_chunk + 1;
}

constexpr Range chunk_range(uint64_t length, uint64_t max_chunk, uint64_t index) {
  const uint64_t offset = index * max_chunk;
  return {offset, std::min(max_chunk, length - std::min(length, offset))};
}

// --- scatters -------------------------------------------------------------------------------------------------------------------
//
// Which NIC. A scatter deals its members out to NICs in rotation: the one at position o of the order of posting goes over NIC
// (o + r) mod k, where r counts the scatters of that target. So the sender's NICs are within one work request of each other. So are
// the receiver's, over all senders of the group: NIC i talks to NIC i, and the sender that is d places before the receiver has it at
// position d - 1; over the senders d takes each value from 1 to n once, hence d - 1 mod k all values equally often, but for one.
// (Dealt out in list order instead, a receiver would have the same position with every sender, and get all on one NIC.)
// The same order keeps senders apart: at each step no two of them write to the same receiver.
//
// Cut. A member whose bytes are more than 5/4 of an even share of the scatter (all bytes / k) is cut over all k NICs, in parts
// of at least shard_bytes; there are fewer than k of them. All others go whole. Parts go on with the rotation.

// Identity and generation of an engine, as bytes that compare.
using GroupKey = std::array<uint8_t, 24>;

// [position] -> member. The members form a ring, in the order given if our own place in it is known, else (`place` below 0) in the order
// of their keys, which all engines see alike, whether or not they count themselves in. We start behind our own place, and come last.
std::vector<uint32_t> posting_order(std::span<const GroupKey> members, const GroupKey& own, int32_t place);

// Lengths above this are cut.
constexpr uint64_t cut_above(uint64_t total, uint32_t nics) {
  const uint64_t share = total / std::max(nics, 1u);
  return share + share / 4;
}

// Which NIC of a peer with `remote_nics` NICs our NIC `nic` talks to.
constexpr uint32_t paired_nic(uint32_t nic, uint32_t remote_nics) { return nic % std::max(remote_nics, 1u); }

// [offset, offset + length) lies in [0, limit); no sum that could overflow is formed.
constexpr bool range_fits(uint64_t offset, uint64_t length, uint64_t limit) {
  return offset <= limit && length <= limit - offset;
}

}  // namespace te
