// The patterns of expert parallelism: every rank scatters to every rank, itself included, then all meet at a barrier.
#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kSlot = 256;  // bytes that a rank keeps for each sender

Setup rank_setup(uint32_t nics, uint32_t ranks) {
  Setup setup{"sim", "reorder=1,delay=1", nics, {}};
  setup.tune = [ranks](te_settings& s) {
    s.operations = 64;
    s.max_peers = ranks;
    s.message_window = 8;
    s.immediate_window = 16;
    s.assembly_slots = 2;
    s.max_regions = s.max_counters = 2 * ranks;
  };
  return setup;
}

uint8_t byte_of(size_t from, size_t to, int round, size_t at) {
  return static_cast<uint8_t>(from * 131 + to * 17 + static_cast<size_t>(round) * 7 + at);
}

size_t length_of(size_t from, size_t to, int round) {
  return (from * 37 + to * 11 + static_cast<size_t>(round) * 53) % (kSlot + 1);
}

struct Rank {
  Rank(const Setup& setup, size_t ranks)
      : player(setup), source(player.memory(ranks * kSlot)), inbox(player.memory(ranks * kSlot)) {
    arrived = player.counter();
    met = player.counter();
  }
  Player player;
  Memory &source, &inbox;
  te_handle arrived = TE_NONE, met = TE_NONE;
  te_handle parcels = TE_NONE, meeting = TE_NONE;  // targets
};

// Ranks 0 to senders - 1 scatter to `peers` of each.
void exchange(std::vector<std::unique_ptr<Rank>>& ranks, const std::vector<std::vector<size_t>>& peers, int rounds) {
  std::vector<uint64_t> expected(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    Player& me = ranks[r]->player;
    std::vector<te_target_member> parcels, meeting;
    for (const size_t p : peers[r]) {
      Rank& to = *ranks[p];
      ++expected[p];
      parcels.push_back({-1, me.remote(to.player, to.inbox), me.remote_counter(to.player, to.arrived)});
      meeting.push_back({me.peer(to.player), TE_NONE, me.remote_counter(to.player, to.met)});
    }
    ranks[r]->parcels = me.target(parcels);
    ranks[r]->meeting = me.target(meeting);
  }
  for (int round = 0; round < rounds; ++round) {
    std::vector<Transfer> transfers;
    for (size_t r = 0; r < ranks.size(); ++r) {
      std::vector<int64_t> from, lengths, to;
      for (size_t i = 0; i < peers[r].size(); ++i) {
        const size_t length = length_of(r, peers[r][i], round);
        for (size_t k = 0; k < length; ++k) ranks[r]->source.data()[i * kSlot + k] = byte_of(r, peers[r][i], round, k);
        from.push_back(static_cast<int64_t>(i * kSlot));
        lengths.push_back(static_cast<int64_t>(length));
        to.push_back(static_cast<int64_t>(r * kSlot));
      }
      transfers.push_back(ranks[r]->player.scatter(
          {ranks[r]->parcels, ranks[r]->source.region, 0, 0, from.data(), lengths.data(), to.data()}));
    }
    for (Transfer& t : transfers) require_ok(std::move(t));
    for (size_t r = 0; r < ranks.size(); ++r)
      REQUIRE(ranks[r]->player.counted(ranks[r]->arrived, expected[r] * static_cast<uint64_t>(round + 1)));
    for (size_t r = 0; r < ranks.size(); ++r)
      for (const size_t p : peers[r]) {
        const uint8_t* slot = ranks[p]->inbox.data() + r * kSlot;
        const size_t length = length_of(r, p, round);
        bool right = true;
        for (size_t k = 0; k < length; ++k) right &= slot[k] == byte_of(r, p, round, k);
        if (!right) FAIL("round ", round, ": from ", r, " to ", p);
      }
    transfers.clear();
    for (auto& rank : ranks)
      transfers.push_back(rank->player.scatter({rank->meeting, TE_NONE, 0, 0, nullptr, nullptr, nullptr}));
    for (Transfer& t : transfers) require_ok(std::move(t));
    for (size_t r = 0; r < ranks.size(); ++r)
      REQUIRE(ranks[r]->player.counted(ranks[r]->met, expected[r] * static_cast<uint64_t>(round + 1)));
  }
  for (auto& rank : ranks) {
    CHECK(rank->inbox.guards_intact());
    CHECK(rank->player.stats().stray_immediates == 0);
  }
}

}  // namespace

TEST_CASE("engine: 64 ranks scatter to each other and meet at barriers") {
  constexpr size_t kRanks = 64 / (kSlowness > 1 ? 4 : 1);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::vector<size_t>> peers(kRanks);
  for (size_t r = 0; r < kRanks; ++r) {
    ranks.push_back(std::make_unique<Rank>(rank_setup(2, kRanks), kRanks));
    for (size_t p = 0; p < kRanks; ++p) peers[r].push_back(p);
  }
  exchange(ranks, peers, scaled(4));
}

// 512 ranks that all know each other would be 130,000 sessions in one process: here one knows all, and all know it.
TEST_CASE("engine: one rank of 512 scatters to all, all scatter to it, and nothing overruns") {
  constexpr size_t kRanks = 512 / (kSlowness > 1 ? 8 : 1);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::vector<size_t>> peers(kRanks);
  for (size_t r = 0; r < kRanks; ++r) {
    ranks.push_back(std::make_unique<Rank>(rank_setup(2, kRanks), kRanks));
    peers[0].push_back(r);
    if (r > 0) peers[r] = {0};
  }
  exchange(ranks, peers, scaled(3));
}

}  // namespace te::engine_test
