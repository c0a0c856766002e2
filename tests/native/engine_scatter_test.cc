// Scatters and barriers: each member gets its own bytes and exactly one notification, and a member that fails is named and hurts no other.
#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr size_t kBytes = 1 << 15;

// One sender, several receivers, each with memory and a counter; members[i] is receiver i % receivers.
struct Group {
  Group(const Setup& setup, size_t receiver_count, size_t member_count) : sender(setup), source(sender.memory(kBytes)) {
    Random random(member_count);
    source.fill(random);
    for (size_t i = 0; i < receiver_count; ++i) receivers.push_back(std::make_unique<Player>(setup));
    for (size_t i = 0; i < member_count; ++i) {
      Player& owner = *receivers[i % receiver_count];
      memories.push_back(&owner.memory(kBytes));
      counters.push_back(owner.counter());
      members.push_back({-1, sender.remote(owner, *memories[i]), sender.remote_counter(owner, counters[i])});
    }
    counted.assign(member_count, 0);
    target = sender.target(members);
  }
  Player& owner(size_t member) { return *receivers[member % receivers.size()]; }

  struct Parts {
    std::vector<int64_t> from, lengths, to;
  };
  Parts random_parts(Random& random, uint64_t longest) const {
    Parts parts;
    for (size_t i = 0; i < members.size(); ++i) {
      const uint64_t length = random.below(4) == 0 ? 0 : random.below(longest + 1);
      parts.from.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
      parts.lengths.push_back(static_cast<int64_t>(length));
      parts.to.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
    }
    return parts;
  }
  Transfer scatter(const Parts& parts, uint32_t flags = 0, uint32_t shard = TE_SHARD_AUTO, int64_t timeout_ns = -1) {
    return sender.scatter(
        {target, source.region, flags, shard, parts.from.data(), parts.lengths.data(), parts.to.data()}, timeout_ns);
  }
  Transfer barrier() { return sender.scatter({target, TE_NONE, 0, 0, nullptr, nullptr, nullptr}); }

  // Everything that `parts` says has landed, and nothing else; then poisons it.
  void check(const Parts& parts, size_t member) {
    const auto length = static_cast<uint64_t>(parts.lengths[member]), to = static_cast<uint64_t>(parts.to[member]);
    const uint8_t* from = source.data() + parts.from[member];
    if (!memories[member]->holds(to, from, length, kBytes)) FAIL("member ", member, " at ", to, " + ", length);
    memories[member]->poison(to, length);
  }
  void check_counted(size_t member) {
    if (!owner(member).counted(counters[member], ++counted[member]))
      FAIL("member ", member, ": the counter is at ", owner(member).value(counters[member]), ", not at ",
           counted[member]);
  }

  Player sender;
  Memory& source;
  std::vector<std::unique_ptr<Player>> receivers;
  std::vector<Memory*> memories;
  std::vector<te_handle> counters;
  std::vector<te_target_member> members;
  std::vector<uint64_t> counted;
  te_handle target = TE_NONE;
};

Setup patient(const Setup& setup) {
  Setup tuned = setup;
  tuned.tune = [](te_settings& s) { s.max_peers = 1024; };
  return tuned;
}

}  // namespace

TEST_CASE("engine: a scatter brings each member its own bytes and one notification") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Group group(setup, 3, 7);
    Random random(7);
    for (int round = 0; round < scaled(40); ++round) {
      const Group::Parts parts = group.random_parts(random, round % 3 == 0 ? kBytes : 300);
      const uint32_t shard = static_cast<uint32_t>(random.below(3));
      Transfer t = group.scatter(parts, round % 5 == 4 ? uint32_t{TE_FLAG_FLUSH} : 0u, shard);
      const int32_t status = t.wait();
      REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
      CHECK(t.failed_members().empty());
      for (size_t i = 0; i < 7; ++i) {
        group.check_counted(i);
        group.check(parts, i);
      }
    }
    for (const Memory* memory : group.memories) CHECK(memory->guards_intact());
    CHECK(group.sender.idle());
  }
}

TEST_CASE("engine: a barrier notifies every member once, the own engine among them") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Group group(setup, 2, 4);
    const te_handle own = group.sender.counter();
    std::vector<te_target_member> members;
    for (size_t i = 0; i < 4; ++i)
      members.push_back({group.sender.peer(group.owner(i)), TE_NONE, group.members[i].counter});
    members.push_back({group.sender.peer(group.sender), TE_NONE, group.sender.remote_counter(group.sender, own)});
    const te_handle target = group.sender.target(members);
    for (uint64_t round = 1; round <= 20; ++round) {
      require_ok(group.sender.scatter({target, TE_NONE, 0, 0, nullptr, nullptr, nullptr}));
      for (size_t i = 0; i < 4; ++i) group.check_counted(i);
      CHECK(group.sender.counted(own, round));
    }
    CHECK(te_target_close(group.sender.engine, target, &group.sender.error) == TE_OK);
    CHECK(te_target_close(group.sender.engine, target, &group.sender.error) == TE_OK);
    CHECK(group.sender.scatter({target, TE_NONE, 0, 0, nullptr, nullptr, nullptr}).wait() == TE_ERR_STALE);
  }
}

TEST_CASE("engine: a group without members scatters at once") {
  Player player(Setup{});
  const te_handle target = player.target({});
  require_ok(player.scatter({target, TE_NONE, 0, 0, nullptr, nullptr, nullptr}));
}

TEST_CASE("engine: groups of 1 to 512 members") {
  for (const uint32_t nics : {1u, 2u, 5u}) {
    Setup setup = patient({"sim", "reorder=1,delay=1", nics, {}});
    for (const size_t count : {1, 2, 63, 64, 65, 512}) {
      CAPTURE(nics);
      CAPTURE(count);
      Group group(setup, std::min<size_t>(count, 8), count);
      Random random(count);
      for (int round = 0; round < 3; ++round) {
        const Group::Parts parts = group.random_parts(random, 100);
        require_ok(group.scatter(parts));
        for (size_t i = 0; i < count; ++i) {
          group.check_counted(i);
          group.check(parts, i);
        }
      }
      CHECK(group.sender.idle());
    }
  }
}

TEST_CASE("engine: a scatter that leaves a region is refused, names the member, and writes nothing") {
  Group group(Setup{}, 2, 4);
  Random random(1);
  const auto refused = [&](const std::function<void(Group::Parts&)>& spoil, const char* expected) {
    Group::Parts parts = group.random_parts(random, 100);
    spoil(parts);
    Transfer t = group.scatter(parts);
    CHECK(t.refused());
    TE_CHECK_STATUS(t.result(), TE_ERR_RANGE, t.error());
    CHECK_MESSAGE(t.message().find(expected) != std::string::npos, t.message());
  };
  refused([](Group::Parts& p) { p.from[2] = kBytes, p.lengths[2] = 1; }, "member 2: source range");
  refused([](Group::Parts& p) { p.to[3] = kBytes - 1, p.lengths[3] = 2; }, "member 3: target range");
  refused([](Group::Parts& p) { p.lengths[0] = -1; }, "member 0: a length of -1");
  refused([](Group::Parts& p) { p.to[1] = INT64_MIN; }, "member 1: target range");
  refused([](Group::Parts& p) { p.from[1] = INT64_MAX, p.lengths[1] = INT64_MAX; }, "member 1");
  for (const Memory* memory : group.memories) CHECK(memory->poisoned(0, kBytes));
  for (size_t i = 0; i < 4; ++i) CHECK(group.owner(i).value(group.counters[i]) == 0);
  CHECK(group.sender.scatter({group.target, group.source.region, 8, 0, nullptr, nullptr, nullptr}).result() ==
        TE_ERR_ARGUMENT);
  CHECK(group.sender.scatter({group.target, group.source.region, 0, 9, nullptr, nullptr, nullptr}).result() ==
        TE_ERR_ARGUMENT);
  CHECK(group.sender.idle());
}

TEST_CASE("engine: members whose engine has died fail by name, and nobody else") {
  for (Setup setup : {Setup{"sim", "", 1, {}}, Setup{"sim", "reorder=1,delay=2", 4, {}}}) {
    CAPTURE(setup.text());
    setup.tune = [](te_settings& s) { s.peer_timeout_ns = kShortLife; };
    Group group(setup, 3, 6);
    require_ok(group.barrier());
    for (size_t i = 0; i < 6; ++i) group.check_counted(i);
    group.receivers[1]->inject("kill");
    Random random(3);
    const Group::Parts parts = group.random_parts(random, 4000);
    Transfer t = group.scatter(parts);
    TE_CHECK_STATUS(t.wait(), TE_ERR_PEER_LOST, t.error());
    const auto failed = t.failed_members();
    CHECK(failed.size() == 2);
    const int32_t dead = group.sender.peer(*group.receivers[1]);
    for (const size_t member : {1, 4}) {
      REQUIRE(failed.contains(static_cast<uint32_t>(member)));
      CHECK(failed.at(static_cast<uint32_t>(member)).status == TE_ERR_PEER_LOST);
      CHECK(failed.at(static_cast<uint32_t>(member)).peer == dead);
    }
    for (const size_t member : {0, 2, 3, 5}) {
      group.check_counted(member);
      group.check(parts, member);
    }
    // Replaced by living ones, the group works again; a member without a region fails by itself.
    for (const uint32_t member : {1u, 4u}) {
      const te_target_member value = group.members[0];
      CHECK(te_target_replace(group.sender.engine, group.target, member, &value, &group.sender.error) == TE_OK);
    }
    require_ok(group.barrier());
    CHECK(group.owner(0).counted(group.counters[0], group.counted[0] + 3));
    CHECK(te_target_replace(group.sender.engine, group.target, 4, nullptr, &group.sender.error) == TE_OK);
    Transfer missing = group.barrier();
    CHECK(missing.wait() == TE_ERR_STALE);
    CHECK(missing.failed_members().size() == 1);
    CHECK(missing.failed_members().contains(4));
  }
}

TEST_CASE("engine: a member that falls silent with many scatters under way does not block the target") {
  // What is on its way to such a peer neither lands nor ends, and no key can be taken from it.
  Setup setup{"sim", "keys_enforced=0", 2, {}};
  setup.tune = [](te_settings& s) { s.peer_timeout_ns = s.connect_timeout_ns = kShortLife; };
  Group group(setup, 3, 3);
  require_ok(group.barrier());
  for (size_t i = 0; i < 3; ++i) group.check_counted(i);
  std::string identity;
  for (const uint8_t byte : group.receivers[1]->address.identity) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", byte);
    identity += text;
  }
  group.sender.inject("partition " + identity);
  std::vector<Transfer> under_way;  // as many as may be
  for (int i = 0; i < 64; ++i) under_way.push_back(group.barrier());
  for (Transfer& t : under_way) {
    TE_CHECK_STATUS(t.wait(), TE_ERR_PEER_LOST, t.error());
    CHECK(t.failed_members().size() == 1);
  }
  CHECK_FALSE(under_way.front().quiesced());
  Transfer next = group.barrier();
  CHECK(next.wait() != TE_OK);
  CHECK(next.failed_members().size() == 1);
  CHECK(next.failed_members().contains(1));
  CHECK(te_target_replace(group.sender.engine, group.target, 1, &group.members[0], &group.sender.error) == TE_OK);
  for (int i = 0; i < 70; ++i) require_ok(group.barrier());
  CHECK(group.owner(2).counted(group.counters[2], group.counted[2] + 64 + 1 + 70));
  group.sender.inject("heal");
  for (Transfer& t : under_way) CHECK(t.wait_quiesced());
}

TEST_CASE("engine: a scatter with bytes for a member that is only notified is refused, and says so") {
  Group group(Setup{}, 1, 2);
  std::vector<te_target_member> members = group.members;
  members[1] = {group.sender.peer(group.owner(1)), TE_NONE, group.members[1].counter};
  const te_handle target = group.sender.target(members);
  const std::vector<int64_t> lengths{10, 1};
  Transfer t = group.sender.scatter({target, group.source.region, 0, 0, nullptr, lengths.data(), nullptr});
  TE_CHECK_STATUS(t.result(), TE_ERR_RANGE, t.error());
  CHECK(t.message() == "member 1: 1 bytes, but the target has no region of it: it is only notified");
}

TEST_CASE("engine: a member that closed its region fails by name, and nobody else") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Group group(setup, 2, 4);
    require_ok(group.barrier());
    for (size_t i = 0; i < 4; ++i) group.check_counted(i);
    CHECK(group.owner(2).close(*group.memories[2]) == TE_OK);
    Random random(5);
    const Group::Parts parts = group.random_parts(random, 1000);
    Transfer t = group.scatter(parts);
    TE_CHECK_STATUS(t.wait(), TE_ERR_REGION_CLOSED, t.error());
    CHECK(t.failed_members().size() == 1);
    CHECK(t.failed_members().contains(2));
    CHECK(group.memories[2]->poisoned(0, kBytes));
    for (const size_t member : {0, 1, 3}) {
      group.check_counted(member);
      group.check(parts, member);
    }
    CHECK(group.sender.idle());
  }
}

TEST_CASE("engine: scatters that cannot leave end at their deadline or when they are cancelled") {
  Setup setup{"sim", "", 2, {}};
  Group group(setup, 2, 4);
  require_ok(group.barrier());
  group.sender.inject("pause");
  Random random(5);
  Transfer late = group.scatter(group.random_parts(random, 1000), 0, TE_SHARD_AUTO, 50 * kMs);
  TE_CHECK_STATUS(late.wait(), TE_ERR_TIMEOUT, late.error());
  CHECK(!late.failed_members().empty());
  Transfer cancelled = group.scatter(group.random_parts(random, 1000));
  cancelled.cancel();
  TE_CHECK_STATUS(cancelled.wait(), TE_ERR_CANCELLED, cancelled.error());
  group.sender.inject("resume");
  CHECK(late.wait_quiesced());
  CHECK(cancelled.wait_quiesced());
}

TEST_CASE("engine: many threads scatter, post and replace at a time, and every notification counts") {
  for (const Setup& setup : {Setup{"sim", "reorder=1,delay=1", 2, {}}, Setup{"cx7", "", 2, {}}}) {
    if (setup.transport == "cx7" && !usable("cx7")) continue;
    CAPTURE(setup.text());
    Group group(setup, 2, 6);
    const int each = scaled(150);
    te_handle prepared = TE_NONE;
    const std::vector<int64_t> lengths(6, 64);
    const te_scatter_args args{group.target, group.source.region, 0, 0, nullptr, lengths.data(), nullptr};
    REQUIRE(te_prepare_scatter(group.sender.engine, &args, &prepared, &group.sender.error) == TE_OK);
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < each; ++i) {
          Transfer t = thread % 2 == 0 ? group.sender.scatter(args) : group.sender.post(prepared);
          if (t.wait() != TE_OK) ++failures;
          if (thread == 0 && i % 8 == 0) {  // by itself: nothing changes
            te_error why{};
            if (te_target_replace(group.sender.engine, group.target, 3, &group.members[3], &why) != TE_OK) ++failures;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(failures == 0);
    for (size_t i = 0; i < 6; ++i) {
      CHECK(group.owner(i).counted(group.counters[i], static_cast<uint64_t>(4 * each)));
      CHECK(std::memcmp(group.memories[i]->data(), group.source.data(), 64) == 0);
    }
    // Closed under way: what is under way ends well.
    std::vector<Transfer> last;
    for (int i = 0; i < 20; ++i) last.push_back(group.sender.post(prepared));
    CHECK(te_target_close(group.sender.engine, group.target, &group.sender.error) == TE_OK);
    CHECK(te_prepared_close(group.sender.engine, prepared, &group.sender.error) == TE_OK);
    for (Transfer& t : last) CHECK(t.wait() == TE_OK);
    CHECK(group.sender.post(prepared).result() == TE_ERR_STALE);
    CHECK(group.sender.idle());
  }
}

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
      te_nic_info info{};
      REQUIRE(te_nic_describe(group.sender.engine, nic, &info, &group.sender.error) == TE_OK);
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
        te_nic_info info{};
        REQUIRE(te_nic_describe(players[i]->engine, nic, &info, &players[i]->error) == TE_OK);
        least_in = std::min(least_in, info.immediates), most_in = std::max(most_in, info.immediates);
        least_out = std::min(least_out, info.writes), most_out = std::max(most_out, info.writes);
      }
      CHECK(most_in - least_in <= 6);  // one for each of the six scatters
      CHECK(most_out - least_out <= 6);
    }
  }
}

TEST_CASE("engine: a scatter tells when it was taken, posted and done") {
  Group group(Setup{}, 2, 8);
  require_ok(group.barrier());
  Transfer t = group.barrier();
  REQUIRE(t.wait() == TE_OK);
  const te_times times = t.times();
  CHECK(times.submitted_ns <= times.taken_ns);
  CHECK(times.taken_ns <= times.first_post_ns);
  CHECK(times.first_post_ns <= times.posted_ns);
  CHECK(times.posted_ns <= times.finished_ns);
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
    te_nic_info info{};
    REQUIRE(te_nic_describe(sender.engine, nic, &info, &sender.error) == TE_OK);
    CHECK(info.write_bytes > kLength / 4);
  }
  sender.free();  // before its memory goes
  owner.free();
}
#endif

}  // namespace te::engine_test
