// Counters: early arrival, exactness, overshoot, time-outs that say how far it came, waits that name peers, and thousands of ids.
#include <atomic>

#include "tests/native/engine_support.h"

namespace te::engine_test {

TEST_CASE("engine: what arrives before anybody waits is not lost") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    for (int i = 0; i < 5; ++i) require_ok(pair.write(0, 0, 100));
    CHECK(pair.owner.wait(pair.counter, 5) == TE_OK);
    CHECK(pair.owner.wait(pair.counter, 5, 0) == TE_OK);
    CHECK(pair.owner.wait(pair.counter, 0, 0) == TE_OK);
  }
}

TEST_CASE("engine: more than was waited for is not lost either") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    for (int i = 0; i < 20; ++i) REQUIRE_FALSE(pair.write(0, 0, 100).refused());
    CHECK(pair.owner.wait(pair.counter, 3) == TE_OK);
    CHECK(pair.owner.counted(pair.counter, 20));
    CHECK(pair.owner.reached(pair.counter, 7, kPatience).wait() == TE_OK);
  }
}

TEST_CASE("engine: a wait that is not fulfilled ends in time with nothing lost") {
  Pair pair({"sim", "", 1, {}});
  require_ok(pair.write(0, 0, 100));
  CHECK(pair.owner.counted(pair.counter, 1));
  CHECK(pair.owner.wait(pair.counter, 2, 0) == TE_AGAIN);
  const int64_t begin = monotonic_ns();
  CHECK(pair.owner.wait(pair.counter, 2, 30 * kMs) == TE_AGAIN);
  CHECK(monotonic_ns() - begin >= 30 * kMs);
  Transfer reached = pair.owner.reached(pair.counter, 2, 30 * kMs);
  CHECK(reached.wait() == TE_ERR_TIMEOUT);
  CHECK(reached.message().find("1/2") != std::string::npos);
  require_ok(pair.write(0, 0, 100));
  CHECK(pair.owner.counted(pair.counter, 2));
}

TEST_CASE("engine: counter transfers end when reached, in whatever order they were asked for") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    std::vector<Transfer> reached;
    for (const uint64_t n : {5, 1, 3, 2, 4, 0}) reached.push_back(pair.owner.reached(pair.counter, n, kPatience));
    CHECK(reached[5].wait() == TE_OK);
    CHECK_FALSE(reached[1].ended());
    for (int i = 0; i < 3; ++i) require_ok(pair.write(0, 0, 10));
    for (const size_t i : {1, 2, 3}) CHECK(reached[i].wait() == TE_OK);
    CHECK_FALSE(reached[0].ended());
    CHECK_FALSE(reached[4].ended());
    for (int i = 0; i < 2; ++i) require_ok(pair.write(0, 0, 10));
    for (Transfer& t : reached) CHECK(t.wait() == TE_OK);
    CHECK(pair.owner.idle());
  }
}

TEST_CASE("engine: many threads wait for different values of one counter and all wake") {
  Pair pair({"sim", "reorder=1", 2, {}});
  constexpr uint64_t kThreads = 16;
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (uint64_t n = 1; n <= kThreads; ++n)
    threads.emplace_back([&, n] {
      te_error why{};
      const int32_t status = te_counter_wait(pair.owner.engine, pair.counter, n, kPatience, nullptr, 0, &why);
      uint64_t value = 0;
      te_counter_value(pair.owner.engine, pair.counter, &value, &why);
      if (status == TE_OK && value >= n) ++good;
    });
  for (uint64_t n = 0; n < kThreads; ++n) require_ok(pair.write(0, 0, 3000));
  for (std::thread& t : threads) t.join();
  CHECK(good == static_cast<int>(kThreads));
}

TEST_CASE("engine: many writers share one counter, and one writer uses many") {
  Setup setup{"sim", "reorder=1,delay=1", 2, {}};
  Player owner(setup);
  Memory& target = owner.memory(4096);
  std::vector<te_handle> counters;
  for (int i = 0; i < 10; ++i) counters.push_back(owner.counter());
  std::vector<std::unique_ptr<Player>> writers;
  std::vector<Transfer> transfers;
  for (int w = 0; w < 5; ++w) {
    writers.push_back(std::make_unique<Player>(setup));
    Player& writer = *writers.back();
    Memory& source = writer.memory(4096);
    const te_handle remote = writer.remote(owner, target);
    for (int i = 0; i < 100; ++i)
      transfers.push_back(writer.write(source, 0, remote, 0, i % 3 == 0 ? 4096 : 10,
                                       writer.remote_counter(owner, counters[static_cast<size_t>(i % 10)])));
  }
  for (Transfer& t : transfers) REQUIRE(t.wait() == TE_OK);
  for (const te_handle counter : counters) CHECK(owner.counted(counter, 50));
}

TEST_CASE("engine: a closed counter ends its waits, refuses new ones and refuses writers") {
  for (const char* sim : {"reorder=0", "reorder=1,delay=2"}) {
    Pair pair({"sim", sim, 2, {}});
    require_ok(pair.write(0, 0, 3000));
    Transfer reached = pair.owner.reached(pair.counter, 99, kPatience);
    std::atomic<int32_t> waited{TE_OK};
    std::thread waiter([&] {
      te_error why{};
      waited = te_counter_wait(pair.owner.engine, pair.counter, 99, kPatience, nullptr, 0, &why);
    });
    TE_CHECK_STATUS(te_counter_close(pair.owner.engine, pair.counter, kPatience, &pair.owner.error), TE_OK,
                    pair.owner.error);
    waiter.join();
    CHECK(waited == TE_ERR_CLOSED);
    CHECK(reached.wait() == TE_ERR_CLOSED);
    uint64_t value = 0;
    CHECK(te_counter_value(pair.owner.engine, pair.counter, &value, &pair.owner.error) == TE_ERR_CLOSED);
    CHECK(pair.owner.wait(pair.counter, 1, 0) == TE_ERR_CLOSED);
    te_counter_descriptor d;
    CHECK(te_counter_describe(pair.owner.engine, pair.counter, &d, &pair.owner.error) == TE_ERR_CLOSED);
    CHECK(te_counter_close(pair.owner.engine, pair.counter, kPatience, &pair.owner.error) == TE_OK);  // idempotent
    CHECK(pair.write(0, 0, 10).wait() == TE_ERR_REGION_CLOSED);
    CHECK(pair.write(0, 0, 10, false).wait() == TE_OK);
  }
}

TEST_CASE(
    "engine: writes that race the closing of their counter end well or with REGION_CLOSED, and spoil no other "
    "counter") {
  for (int seed = 1; seed <= scaled(20); ++seed) {
    Pair pair({"sim", "reorder=1,delay=3,seed=" + std::to_string(seed), static_cast<uint32_t>(1 + seed % 3), {}});
    require_ok(pair.write(0, 0, 1));
    std::vector<Transfer> transfers;
    for (int i = 0; i < 30; ++i) transfers.push_back(pair.write(0, 0, 3000));
    TE_CHECK_STATUS(te_counter_close(pair.owner.engine, pair.counter, kPatience, &pair.owner.error), TE_OK,
                    pair.owner.error);
    const te_handle fresh = pair.owner.counter();  // may get the id that has just been freed
    for (Transfer& t : transfers) {
      const int32_t status = t.wait();
      CHECK_MESSAGE((status == TE_OK || status == TE_ERR_REGION_CLOSED), name_of(status), ": ", t.message());
    }
    const te_handle remote_fresh = pair.writer.remote_counter(pair.owner, fresh);
    require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, 3000, remote_fresh));
    CHECK(pair.owner.counted(fresh, 1));
  }
}

TEST_CASE("engine: counters opened and closed 100,000 times do not run out") {
  Player player({"sim", "", 1, {}});
  const int rounds = scaled(100'000);
  for (int i = 0; i < rounds; ++i) {
    te_handle counter = TE_NONE;
    REQUIRE(te_counter_open(player.engine, &counter, &player.error) == TE_OK);
    REQUIRE(te_counter_close(player.engine, counter, kPatience, &player.error) == TE_OK);
  }
  CHECK(player.stats().counters == 0);
}

TEST_CASE("engine: counter ids used by a peer, closed and opened again do not run out, and never count for another") {
  for (const char* sim : {"reorder=0", "reorder=1,delay=1"}) {
    CAPTURE(std::string(sim));
    Pair pair({"sim", sim, 1, [](te_settings& s) { s.max_counters = 8; }}, 4096);
    for (int i = 0; i < scaled(1500); ++i) {
      const te_handle counter = pair.owner.counter();
      const te_handle remote = pair.writer.remote_counter(pair.owner, counter);
      const uint64_t writes =
          static_cast<uint64_t>(1 + i % 3);  // at least one, so that the writer's handle is revoked and given back
      for (uint64_t k = 0; k < writes; ++k) require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, 10, remote));
      REQUIRE(pair.owner.counted(counter, writes));
      REQUIRE(te_counter_close(pair.owner.engine, counter, kPatience, &pair.owner.error) == TE_OK);
    }
    CHECK(pair.owner.stats().counters == 1);
    CHECK(pair.owner.stats().stray_immediates == 0);
  }
}

TEST_CASE("engine: a full table of counters is a typed error, and room comes back") {
  Player player({"sim", "", 1, [](te_settings& s) { s.max_counters = 3; }});
  std::vector<te_handle> counters;
  for (int i = 0; i < 3; ++i) counters.push_back(player.counter());
  te_handle extra = 5;
  CHECK(te_counter_open(player.engine, &extra, &player.error) == TE_ERR_EXHAUSTED);
  CHECK(extra == 5);
  REQUIRE(te_counter_close(player.engine, counters[1], kPatience, &player.error) == TE_OK);
  CHECK(te_counter_open(player.engine, &extra, &player.error) == TE_OK);
}

TEST_CASE("engine: more counters than one peer may attach is a typed error, the others work on") {
  // 12 bits of counter index: 4,096 for each peer.
  Setup setup{"sim", "reorder=0", 1, [](te_settings& s) { s.max_counters = 5000; }};
  Pair pair(setup, 4096);
  const int most = 4096;
  std::vector<te_handle> counters, remotes;
  std::vector<Transfer> transfers;
  for (int i = 1; i < most; ++i) {
    counters.push_back(pair.owner.counter());
    remotes.push_back(pair.writer.remote_counter(pair.owner, counters.back()));
    transfers.push_back(pair.writer.write(pair.source, 0, pair.remote, 0, 1, remotes.back()));
  }
  require_ok(pair.write(0, 0, 1));
  for (Transfer& t : transfers) REQUIRE(t.wait() == TE_OK);
  const te_handle one_more = pair.owner.counter();
  const te_handle remote = pair.writer.remote_counter(pair.owner, one_more);
  CHECK(pair.writer.write(pair.source, 0, pair.remote, 0, 1, remote).wait() == TE_ERR_EXHAUSTED);
  for (const te_handle counter : counters) REQUIRE(pair.owner.counted(counter, 1));
  REQUIRE(te_counter_close(pair.owner.engine, counters[0], kPatience, &pair.owner.error) == TE_OK);
  CHECK(pair.writer.write(pair.source, 0, pair.remote, 0, 1, remote).wait() == TE_OK);
  CHECK(pair.owner.counted(one_more, 1));
}

}  // namespace te::engine_test
