// Scatters over several NICs: even shares, windows, cutting, and NICs that fail.
#include "tests/native/group_support.h"

namespace te::engine_test {

TEST_CASE("engine: the windows bound what is in flight to each peer and over each NIC") {
  Setup setup{"sim", "depth=64", 2, {}};
  setup.tune = [](te_settings& s) {
    s.peer_window_bytes = 8192;
    s.nic_window_bytes = 16384;
  };
  Group group(setup, 4, 32);
  require_ok(group.barrier());
  group.sender.inject("pause");
  Random random(2);
  std::vector<Transfer> transfers;
  for (int i = 0; i < 10; ++i) transfers.push_back(group.scatter(group.random_parts(random, 2048)));
  uint64_t most_peer = 0, most_nic = 0;
  for (int i = 0; i < 200; ++i) {
    for (auto& receiver : group.receivers)
      most_peer = std::max<uint64_t>(most_peer, group.sender.peer_info(group.sender.peer(*receiver)).bytes_in_flight);
    for (uint32_t nic = 0; nic < 2; ++nic) {
      const te_nic_info info = group.sender.nic_info(nic);
      most_nic = std::max<uint64_t>(most_nic, info.bytes_in_flight);
    }
  }
  CHECK(most_peer < 2 * (8192 + 2048));
  CHECK(most_nic < 16384 + 2048);
  group.sender.inject("resume");
  for (Transfer& t : transfers) CHECK(t.wait() == TE_OK);
}

// Every engine of a group scatters once; then each NIC of each has sent and received its fair share.
TEST_CASE("engine: all NICs of senders and receivers take the same share of a scatter, within one") {
  struct Case {
    size_t engines;
    uint32_t nics;
    bool self;
  };
  for (const Case c : {Case{2, 2, true}, Case{3, 2, false}, Case{4, 4, false}, Case{5, 3, true}, Case{8, 2, false},
                       Case{9, 4, true}, Case{6, 16, false}}) {
    CAPTURE(c.engines);
    CAPTURE(c.nics);
    CAPTURE(c.self);
    const Setup setup{"sim", "", c.nics, {}};
    std::vector<std::unique_ptr<Player>> players;
    std::vector<Memory*> memories;
    std::vector<te_handle> counters;
    for (size_t i = 0; i < c.engines; ++i) {
      players.push_back(std::make_unique<Player>(setup));
      memories.push_back(&players[i]->memory(4096));
      counters.push_back(players[i]->counter());
    }
    const std::vector<int64_t> lengths(c.engines, 100);
    for (int round = 1; round <= 3; ++round) {
      for (size_t i = 0; i < c.engines; ++i) {
        std::vector<te_target_member> members;
        for (size_t k = 0; k < c.engines; ++k)
          if (c.self || k != i)
            members.push_back({-1, players[i]->remote(*players[k], *memories[k]),
                               players[i]->remote_counter(*players[k], counters[k])});
        const te_handle target = players[i]->target(members);
        for (int again = 0; again < round; ++again)  // the rotation goes on from one scatter to the next
          require_ok(players[i]->scatter({target, memories[i]->region, 0, 0, nullptr, lengths.data(), nullptr}));
      }
    }
    for (size_t i = 0; i < c.engines; ++i) {
      const uint64_t expected = 6 * (c.engines - (c.self ? 0 : 1));
      CHECK(players[i]->counted(counters[i], expected));
      uint64_t least_in = UINT64_MAX, most_in = 0, least_out = UINT64_MAX, most_out = 0;
      for (uint32_t nic = 0; nic < c.nics; ++nic) {
        const te_nic_info info = players[i]->nic_info(nic);
        least_in = std::min(least_in, info.immediates), most_in = std::max(most_in, info.immediates);
        least_out = std::min(least_out, info.writes), most_out = std::max(most_out, info.writes);
      }
      CHECK(most_in - least_in <= 6);  // one for each of the six scatters
      CHECK(most_out - least_out <= 6);
    }
  }
}

// Random members, NICs of both sides, lengths, ways of sharding, and NICs that fail in between: what succeeded is there and counted once,
// nothing else has changed but for parts that failed.
TEST_CASE("engine: scatters equal a model of bytes, whatever the members, NICs, lengths and failures of NICs") {
  Random random(2026);
  for (int trial = 0; trial < scaled(24); ++trial) {
    const auto nics = static_cast<uint32_t>(1 + random.below(16)), theirs = static_cast<uint32_t>(1 + random.below(16));
    const size_t count = 1 + random.below(12), owners = 1 + random.below(3);
    CAPTURE(trial);
    CAPTURE(nics);
    CAPTURE(theirs);
    CAPTURE(count);
    Setup setup{"sim", trial % 2 == 0 ? "reorder=0" : "reorder=1,delay=2,max_write=1500", nics, {}};
    Player sender(setup);
    setup.nics = theirs;
    Memory& source = sender.memory(kBytes);
    source.fill(random);
    std::vector<std::unique_ptr<Player>> players;
    for (size_t i = 0; i < owners; ++i) players.push_back(std::make_unique<Player>(setup));
    std::vector<Memory*> memories;
    std::vector<te_handle> counters;
    std::vector<te_target_member> members;
    std::vector<std::vector<uint8_t>> model(count, std::vector<uint8_t>(kBytes, kPoison));
    std::vector<bool> spoilt(count * kBytes);  // a failed part may have written here
    std::vector<uint64_t> least(count), most(count);
    for (size_t i = 0; i < count; ++i) {
      Player& owner = *players[i % owners];
      memories.push_back(&owner.memory(kBytes));
      counters.push_back(owner.counter());
      members.push_back({-1, sender.remote(owner, *memories[i]), sender.remote_counter(owner, counters[i])});
    }
    const te_handle target =
        sender.target(members, random.below(2) == 0 ? -1 : static_cast<int32_t>(random.below(count)));
    for (int round = 0; round < 8; ++round) {
      const bool fails = nics > 1 && round % 3 == 2;
      const std::string nic = std::to_string(random.below(nics));
      if (fails) sender.inject("nic_down " + nic);
      std::vector<int64_t> from, lengths, to;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t longest = random.below(3) == 0 ? kBytes : 200;
        const uint64_t length = random.below(5) == 0 ? 0 : random.below(longest + 1);
        lengths.push_back(static_cast<int64_t>(length));
        from.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
        to.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
      }
      Transfer t = sender.scatter(
          {target, source.region, 0, static_cast<uint32_t>(random.below(3)), from.data(), lengths.data(), to.data()});
      const int32_t status = t.wait();
      REQUIRE(status != TE_AGAIN);
      REQUIRE_MESSAGE((fails || status == TE_OK), name_of(status), ": ", t.message());
      const auto failed = t.failed_members();
      CHECK(failed.empty() == (status == TE_OK));
      REQUIRE(t.wait_quiesced());
      if (fails) sender.inject("nic_up " + nic);
      for (size_t i = 0; i < count; ++i) {
        const auto length = static_cast<size_t>(lengths[i]), at = static_cast<size_t>(to[i]);
        ++most[i];
        if (!failed.contains(static_cast<uint32_t>(i))) {
          ++least[i];
          std::copy_n(source.data() + from[i], length, model[i].begin() + to[i]);
        }
        const bool bad = failed.contains(static_cast<uint32_t>(i));
        for (size_t k = at; k < at + length; ++k) spoilt[i * kBytes + k] = bad;
      }
    }
    for (size_t i = 0; i < count; ++i) {
      Player& owner = *players[i % owners];
      REQUIRE(owner.wait(counters[i], least[i]) == TE_OK);
      CHECK(owner.value(counters[i]) <= most[i]);
      bool right = memories[i]->guards_intact();
      for (size_t k = 0; k < kBytes; ++k) right &= spoilt[i * kBytes + k] || memories[i]->data()[k] == model[i][k];
      CHECK(right);
    }
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("engine: a member of a scatter may get more than 4 GiB") {
  constexpr uint64_t kPeriod = 1 << 20, kLength = (uint64_t{1} << 32) + 4097;
  Setup setup{"sim", "", 3, {}};
  Player sender(setup), owner(setup);
  Mirrored from(kPeriod, kLength), to(kPeriod, kLength);
  Random random(3);
  for (uint64_t i = 0; i < kPeriod; ++i) from.data[i] = static_cast<uint8_t>(random.next() >> 32);
  const te_handle source = register_span(sender, from.data, kLength);
  Memory large(1);
  large.region = register_span(owner, to.data, kLength);
  Memory& small = owner.memory(100);
  const te_handle counters[] = {owner.counter(), owner.counter()};
  const te_handle target =
      sender.target({{-1, sender.remote(owner, large), sender.remote_counter(owner, counters[0])},
                     {-1, sender.remote(owner, small), sender.remote_counter(owner, counters[1])}});
  const std::vector<int64_t> offsets{0, kLength - 100}, lengths{kLength, 100};
  require_ok(sender.scatter({target, source, 0, 0, offsets.data(), lengths.data(), nullptr}));
  CHECK(owner.counted(counters[0], 1));
  CHECK(owner.counted(counters[1], 1));
  CHECK(sender.peer_info(sender.peer(owner)).write_bytes == kLength + 100);
  CHECK(std::memcmp(from.data, to.data, kPeriod) == 0);
  CHECK(std::memcmp(from.data + kLength - 100, small.data(), 100) == 0);
  CHECK(small.guards_intact());
  for (uint32_t nic = 0; nic < 3; ++nic) {  // cut over all
    const te_nic_info info = sender.nic_info(nic);
    CHECK(info.write_bytes > kLength / 4);
  }
  sender.free();  // before its memory goes
  owner.free();
}
#endif

}  // namespace te::engine_test
