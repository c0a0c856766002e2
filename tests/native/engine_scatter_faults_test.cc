// Scatters whose members die, fall silent, close what they gave, or are replaced meanwhile: each fails its own part, by name.
#include "tests/native/group_support.h"

namespace te::engine_test {

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

}  // namespace te::engine_test
