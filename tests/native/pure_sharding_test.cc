// How bytes and pages are dealt out: every property that the engine relies on, exhaustively for small values and at random for large ones.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "native/sharding.h"
#include "native/sim/random.h"
#include "tests/native/engine_support.h"

namespace te {
namespace {

using engine_test::Random;
using engine_test::scaled;

// Adjacent ranges from 0 to the total.
template <typename F>
bool covers_exactly(uint64_t total, uint64_t count, F&& range) {
  uint64_t at = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const Range r = range(i);
    if (r.offset != at || r.length > total - at) return false;
    at += r.length;
  }
  return at == total;
}

std::vector<uint64_t> interesting_lengths() {
  std::vector<uint64_t> lengths;
  for (uint64_t i = 0; i <= 300; ++i) lengths.push_back(i);
  for (int bit = 9; bit <= 40; ++bit)
    for (const int64_t d : {-65, -64, -63, -1, 0, 1, 63, 64, 65})
      lengths.push_back((uint64_t{1} << bit) + static_cast<uint64_t>(d));
  for (const uint64_t length : {(uint64_t{1} << 32) + 4096, uint64_t{16385}, ~uint64_t{0} >> 1, ~uint64_t{0} - 64})
    lengths.push_back(length);
  Random random(7);
  for (int i = 0; i < 500; ++i) lengths.push_back(random.next() >> (random.below(50) + 8));
  return lengths;
}

}  // namespace

TEST_CASE("pure: even parts cover the items exactly, are adjacent and differ by at most one") {
  for (const uint64_t items : interesting_lengths())
    for (uint32_t parts = 1; parts <= 16; ++parts) {
      uint64_t shortest = ~uint64_t{0}, longest = 0;
      const bool exact = covers_exactly(items, parts, [&](uint64_t i) {
        const Range r = even_part(items, parts, static_cast<uint32_t>(i));
        shortest = std::min(shortest, r.length);
        longest = std::max(longest, r.length);
        return r;
      });
      if (!exact || longest - shortest > 1) FAIL("items=", items, " parts=", parts);
    }
}

TEST_CASE("pure: byte parts cover the bytes exactly, begin on cache lines and differ by at most one line") {
  for (const uint64_t length : interesting_lengths()) {
    if (length > ~uint64_t{0} - 63) continue;
    for (uint32_t parts = 1; parts <= 16; ++parts) {
      uint64_t shortest = ~uint64_t{0}, longest = 0;
      bool aligned = true;
      const bool exact = covers_exactly(length, parts, [&](uint64_t i) {
        const Range r = byte_part(length, parts, static_cast<uint32_t>(i));
        aligned = aligned && (r.offset % kPartAlignment == 0 || r.length == 0);
        shortest = std::min(shortest, r.length);
        longest = std::max(longest, r.length);
        return r;
      });
      if (!exact || !aligned || longest - shortest > 2 * kPartAlignment) FAIL("length=", length, " parts=", parts);
    }
  }
}

TEST_CASE("pure: a write is cut over as many NICs as have a full share, never none and never more than there are") {
  for (const uint64_t length : interesting_lengths())
    for (const uint64_t shard : {uint64_t{0}, uint64_t{1}, uint64_t{64}, uint64_t{65536}, uint64_t{1} << 40})
      for (uint32_t nics = 1; nics <= 16; ++nics) {
        const uint32_t parts = part_count(length, nics, shard);
        const uint64_t share = std::max<uint64_t>(shard, 1);
        const bool right = parts >= 1 && parts <= nics && (parts == 1 || length / parts >= share) &&
                           (parts == nics || length / share < parts + 1);
        if (!right) FAIL("length=", length, " shard=", shard, " nics=", nics, " parts=", parts);
      }
}

TEST_CASE("pure: chunks cover a part exactly and none is longer than a work request may be") {
  for (const uint64_t length : interesting_lengths())
    for (const uint64_t most : {uint64_t{1}, uint64_t{7}, uint64_t{4096}, (uint64_t{1} << 30), (uint64_t{1} << 31) - 1,
                                (uint64_t{1} << 32) + 4096, ~uint64_t{0}}) {
      const uint64_t count = chunk_count(length, most);
      if (length == 0) {
        CHECK(count == 1);
        CHECK(chunk_range(length, most, 0).length == 0);
        continue;
      }
      REQUIRE(count == (length - 1) / most + 1);
      const auto whole = [&](uint64_t i) {
        const Range r = chunk_range(length, most, i);
        return r.offset == i * most && r.length >= 1 && r.length <= most && (i + 1 == count || r.length == most) &&
               (i + 1 < count || r.offset + r.length == length);
      };
      // All when they are few, else the ends and some in between.
      bool right = whole(0) && whole(count - 1) && whole(count / 2);
      for (uint64_t i = 0; i < std::min<uint64_t>(count, 50); ++i) right = right && whole(i) && whole(count - 1 - i);
      if (!right) FAIL("length=", length, " max_chunk=", most);
    }
}

TEST_CASE("pure: parts and their chunks together write every byte once") {
  Random random(3);
  for (int round = 0; round < scaled(300); ++round) {
    const uint64_t length = random.below(5000);
    const auto nics = static_cast<uint32_t>(1 + random.below(16));
    const uint64_t most = 1 + random.below(400);
    const uint32_t parts = part_count(length, nics, 1 + random.below(600));
    std::vector<uint8_t> written(length, 0);
    for (uint32_t p = 0; p < parts; ++p) {
      const Range part = byte_part(length, parts, p);
      for (uint64_t c = 0; c < chunk_count(part.length, most); ++c) {
        const Range chunk = chunk_range(part.length, most, c);
        REQUIRE(chunk.length <= most);
        for (uint64_t i = 0; i < chunk.length; ++i) ++written.at(part.offset + chunk.offset + i);
      }
    }
    CHECK(std::all_of(written.begin(), written.end(), [](uint8_t n) { return n == 1; }));
  }
}

TEST_CASE("pure: pairing stays inside the peer's NICs and meets all of them when there are enough") {
  for (uint32_t remote = 0; remote <= 16; ++remote)
    for (uint32_t local = 1; local <= 16; ++local) {
      std::vector<bool> met(std::max(remote, 1u), false);
      for (uint32_t nic = 0; nic < local; ++nic) {
        const uint32_t paired = paired_nic(nic, remote);
        REQUIRE(paired < met.size());
        met[paired] = true;
      }
      if (local >= remote) CHECK(std::all_of(met.begin(), met.end(), [](bool m) { return m; }));
    }
}

TEST_CASE("pure: a range fits only if no byte of it is outside, whatever overflows") {
  constexpr uint64_t kMax = ~uint64_t{0};
  CHECK(range_fits(0, 0, 0));
  CHECK(range_fits(10, 0, 10));
  CHECK_FALSE(range_fits(11, 0, 10));
  CHECK(range_fits(0, 10, 10));
  CHECK_FALSE(range_fits(1, 10, 10));
  CHECK_FALSE(range_fits(kMax, 1, kMax));
  CHECK(range_fits(kMax, 0, kMax));
  CHECK_FALSE(range_fits(kMax, kMax, kMax));
  CHECK_FALSE(range_fits(kMax - 4, 8, 16));  // the sum wraps to 3
  CHECK_FALSE(range_fits(8, kMax - 4, 16));
  Random random(11);
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t offset = random.next() >> random.below(64), length = random.next() >> random.below(64);
    const uint64_t limit = random.next() >> random.below(64);
    const auto end = static_cast<unsigned __int128>(offset) + length;
    if (range_fits(offset, length, limit) != (end <= limit)) FAIL(offset, " ", length, " ", limit);
  }
}

static GroupKey group_key(uint64_t value) {
  GroupKey key{};
  for (int i = 0; i < 8; ++i) key[i] = static_cast<uint8_t>(value >> (8 * i) & 0xFF);
  return key;
}

// All engines of a group deal one scatter out as Worker::post_member does; received[r][nic] and sent[s][nic] count.
struct Dealt {
  std::vector<std::vector<uint32_t>> sent, received;
  std::vector<std::vector<uint32_t>> first;  // [step][receiver]: how many write to it at that step
};

static Dealt deal(uint32_t engines, uint32_t nics, bool self, bool by_place, uint32_t round, uint64_t seed) {
  std::vector<GroupKey> keys(engines);
  for (uint32_t i = 0; i < engines; ++i) keys[i] = group_key((i + 1) * 0x9E3779B97F4A7C15u ^ seed);
  Dealt dealt;
  dealt.sent.assign(engines, std::vector<uint32_t>(nics));
  dealt.received = dealt.sent;
  dealt.first.assign(engines, std::vector<uint32_t>(engines));
  for (uint32_t sender = 0; sender < engines; ++sender) {
    std::vector<uint32_t> members;
    for (uint32_t i = 0; i < engines; ++i)
      if (self || i != sender) members.push_back(i);
    std::vector<GroupKey> member_keys;
    for (const uint32_t member : members) member_keys.push_back(keys[member]);
    const std::vector<uint32_t> order =
        posting_order(member_keys, keys[sender], by_place ? static_cast<int32_t>(sender) : -1);
    for (uint32_t position = 0; position < order.size(); ++position) {
      const uint32_t nic = (position + round) % nics;
      ++dealt.sent[sender][nic];
      ++dealt.received[members[order[position]]][nic];
      ++dealt.first[position][members[order[position]]];
    }
  }
  return dealt;
}

static uint32_t spread(const std::vector<uint32_t>& counts) {
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  return *most - *least;
}

TEST_CASE("pure: the NICs of every sender and every receiver of a group are within one message of each other") {
  for (uint32_t engines = 2; engines <= 512; engines += engines < 20 ? 1 : engines < 100 ? 13 : 59)
    for (const uint32_t nics : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 15u, 16u})
      for (const uint32_t kind : {0u, 1u, 2u}) {  // by identity with and without ourselves, by place
        const Dealt dealt = deal(engines, nics, kind != 1, kind == 2, engines % 5, engines * 31);
        for (uint32_t i = 0; i < engines; ++i)
          if (spread(dealt.sent[i]) > 1 || spread(dealt.received[i]) > 1)
            FAIL("engines ", engines, ", NICs ", nics, ", kind ", kind, ", engine ", i);
      }
}

TEST_CASE("pure: no two engines of a group write to the same one at the same step") {
  for (const uint32_t engines : {2u, 3u, 16u, 65u})
    for (const uint32_t kind : {0u, 1u, 2u}) {
      const Dealt dealt = deal(engines, 2, kind != 1, kind == 2, 0, engines);
      for (const std::vector<uint32_t>& step : dealt.first)
        for (const uint32_t writers : step) CHECK(writers <= 1);
    }
}

TEST_CASE("pure: the order of posting names each member once, and ourselves last") {
  std::vector<GroupKey> keys;
  for (uint64_t i = 0; i < 9; ++i) keys.push_back(group_key((i * 5) % 9));
  for (int32_t place = -1; place < 9; ++place) {
    const uint32_t own = place < 0 ? 4 : static_cast<uint32_t>(place);
    std::vector<uint32_t> order = posting_order(keys, keys[own], place);
    CHECK(order.back() == own);
    std::sort(order.begin(), order.end());
    for (uint32_t i = 0; i < 9; ++i) CHECK(order[i] == i);
  }
  CHECK(posting_order({}, keys[0], -1).empty());
  // One engine several times, and we are not among them.
  const std::vector<GroupKey> same(4, group_key(7));
  CHECK(posting_order(same, group_key(9), -1) == std::vector<uint32_t>{0, 1, 2, 3});
}

TEST_CASE("pure: only members with more than their share of a scatter are cut, and fewer of them than there are NICs") {
  Random random(11);
  for (int trial = 0; trial < 20000; ++trial) {
    const auto nics = static_cast<uint32_t>(1 + random.below(16));
    const auto count = static_cast<uint32_t>(1 + random.below(40));
    uint64_t total = 0;
    std::vector<uint64_t> lengths;
    for (uint32_t i = 0; i < count; ++i) {
      lengths.push_back(random.below(5) == 0 ? 0 : random.next() >> (20 + random.below(40)));
      total += lengths.back();
    }
    const uint64_t above = cut_above(total, nics);
    uint32_t cut = 0;
    for (const uint64_t length : lengths) cut += length > above ? 1 : 0;
    if (cut >= std::max(nics, 1u) && nics > 1) FAIL("cut ", cut, " of ", count, " over ", nics, " NICs");
    if (nics == 1) CHECK(cut == 0);
  }
  CHECK(cut_above(4 << 20, 4) == (1 << 20) + (1 << 18));
}

}  // namespace te
