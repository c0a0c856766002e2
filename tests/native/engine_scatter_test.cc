// Scatters and barriers: each member gets its own bytes and exactly one notification, and a member that fails is named and hurts no other.
#include "tests/native/group_support.h"

namespace te::engine_test {
namespace {

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

}  // namespace te::engine_test
