// Watchers and triggers: each raise that is due is one transfer, posted by the worker, whatever stands in the way.
#include "tests/native/coordination_support.h"

namespace te::engine_test {

TEST_CASE("engine: trigger: a write goes out with every raise, and flags tell") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    Player& writer = pair.writer;
    const te_handle watcher = open_watcher(writer), posted = open_flag(writer), completed = open_flag(writer);
    const te_handle prepared = prepare(pair, 100, 20000, 3000);
    const te_handle trigger = open_trigger(writer, {watcher, prepared, posted, completed, 1, 1, -1});
    CHECK(watcher_info(writer, watcher).triggers == 1);
    for (uint64_t round = 1; round <= 20; ++round) {
      pair.target.poison();
      add(writer, watcher);
      CHECK(pair.owner.counted(pair.counter, round));
      CHECK(pair.landed(100, 20000, 3000));
      CHECK(flagged(writer, posted, round));
      CHECK(flagged(writer, completed, round));
      CHECK(te_trigger_wait(writer.engine, trigger, round, kPatience, &writer.error) == TE_OK);
    }
    const te_trigger_info info = trigger_info(writer, trigger);
    CHECK(info.fired == 20);
    CHECK(info.posted == 20);
    CHECK(info.completed == 20);
    CHECK(info.failed == 0);
    CHECK(info.owed == 0);
    CHECK(info.last_post_ns > 0);
    CHECK(info.active == 1);
    CHECK(watcher_info(writer, watcher).seen == 20);
    CHECK(writer.idle());
  }
}

TEST_CASE("engine: trigger: pages and scatters go out, too") {
  for (const uint32_t nics : {1u, 3u}) {
    Pair pair({"sim", "", nics, {}});
    Player& writer = pair.writer;
    const te_handle watcher = open_watcher(writer);
    const int32_t from[] = {3, 1}, to[] = {7, 8};
    te_page_args p{};
    p.region = pair.source.region;
    p.remote = pair.remote;
    p.counter = pair.remote_counter;
    p.source_stride = p.target_stride = p.page_bytes = 1024;
    p.count = 2;
    p.source = from;
    p.target = to;
    p.source_index_bytes = p.target_index_bytes = 4;
    te_handle pages = TE_NONE, scatter = TE_NONE, barrier = TE_NONE, empty = TE_NONE;
    REQUIRE(te_prepare_pages(writer.engine, &p, &pages, &writer.error) == TE_OK);
    const te_handle target = writer.target({{-1, pair.remote, pair.remote_counter}, {-1, pair.remote, TE_NONE}});
    const int64_t source[] = {0, 5000}, lengths[] = {100, 200}, destination[] = {40000, 41000};
    te_scatter_args s{};
    s.target = target;
    s.region = pair.source.region;
    s.source_offsets = source;
    s.lengths = lengths;
    s.target_offsets = destination;
    REQUIRE(te_prepare_scatter(writer.engine, &s, &scatter, &writer.error) == TE_OK);
    te_scatter_args b{};
    b.target = writer.target({{writer.peer(pair.owner), TE_NONE, pair.remote_counter}});
    b.region = TE_NONE;
    REQUIRE(te_prepare_scatter(writer.engine, &b, &barrier, &writer.error) == TE_OK);
    te_scatter_args e{};
    e.target = writer.target({});
    e.region = TE_NONE;
    REQUIRE(te_prepare_scatter(writer.engine, &e, &empty, &writer.error) == TE_OK);
    std::vector<te_handle> triggers;
    for (const te_handle prepared : {pages, scatter, barrier, empty})
      triggers.push_back(open_trigger(writer, watcher, prepared));
    for (uint64_t round = 1; round <= 50; ++round) add(writer, watcher);
    CHECK(pair.owner.counted(pair.counter, 50 * (2 + 1 + 1)));
    for (const te_handle trigger : triggers) {
      CHECK(ended(writer, trigger, 50));
      CHECK(trigger_info(writer, trigger).completed == 50);
      CHECK(trigger_info(writer, trigger).posted == 50);
    }
    CHECK(pair.landed(3 * 1024, 7 * 1024, 1024));
    CHECK(pair.landed(1024, 8 * 1024, 1024));
    CHECK(pair.landed(0, 40000, 100));
    CHECK(pair.landed(5000, 41000, 200));
    CHECK(writer.idle());
  }
}

TEST_CASE("engine: trigger: raises of many threads, one by one and together, are as many transfers") {
  for (const Setup& setup : {Setup{"sim", "reorder=0", 1, {}}, Setup{"sim", "reorder=1,delay=2", 3, {}}}) {
    CAPTURE(setup.text());
    Pair pair(setup);
    Player& writer = pair.writer;
    constexpr uint64_t kThreads = 4;
    const auto each = static_cast<uint64_t>(scaled(2500));
    const te_handle watcher = open_watcher(writer), posted = open_flag(writer), completed = open_flag(writer);
    const te_handle arrived = open_flag(pair.owner);
    bind(pair.owner, pair.counter, arrived);
    const te_handle trigger = open_trigger(writer, {watcher, prepare(pair, 0, 0, 128), posted, completed, 1, 1, -1});
    const te_handle third = open_trigger(writer, watcher, prepare(pair, 0, 4096, 64, false), 3, 5);
    std::vector<std::thread> raisers;
    for (uint64_t k = 0; k < kThreads; ++k)
      raisers.emplace_back([&, k] {
        for (uint64_t left = each; left > 0;) {
          const uint64_t by = std::min<uint64_t>(left, k == 0 ? 1 : k * 7);
          add(writer, watcher, by);
          left -= by;
        }
      });
    for (std::thread& raiser : raisers) raiser.join();
    const uint64_t total = kThreads * each;
    CHECK(flagged(pair.owner, arrived, total));
    CHECK(pair.owner.counted(pair.counter, total));
    CHECK(flagged(writer, posted, total));
    CHECK(flagged(writer, completed, total));
    CHECK(ended(writer, trigger, total));
    CHECK(ended(writer, third, (total - 5) / 3 + 1));
    CHECK(trigger_info(writer, trigger).completed == total);
    CHECK(watcher_info(writer, watcher).value == total);
    CHECK(writer.idle());
  }
}

TEST_CASE("engine: trigger: every and first decide, also for what came before it") {
  Pair pair({"sim", "", 1, {}});
  Player& writer = pair.writer;
  const te_handle prepared = prepare(pair, 0, 0, 8);
  for (const uint64_t every : {1u, 2u, 7u})
    for (const uint64_t first : {1u, 2u, 7u, 100u})
      for (const uint64_t before : {0u, 1u, 50u}) {
        const te_handle watcher = open_watcher(writer);
        add(writer, watcher, before);
        const te_handle trigger = open_trigger(writer, watcher, prepared, every, first);
        for (int i = 0; i < 60; ++i) add(writer, watcher);
        const uint64_t value = before + 60;
        const uint64_t due = value < first ? 0 : (value - first) / every + 1;
        CHECK(ended(writer, trigger, due));
        CHECK(te_watcher_close(writer.engine, watcher, &writer.error) == TE_OK);
        CHECK(trigger_info(writer, trigger).fired == due);
        CHECK(trigger_info(writer, trigger).active == 0);
        CHECK(te_trigger_close(writer.engine, trigger, &writer.error) == TE_OK);
      }
}

TEST_CASE("engine: trigger: with few slots firings wait their turn and none is lost") {
  for (const uint32_t cap : {2u, 16u}) {
    Pair pair(Setup{"sim", "reorder=1,delay=4", 2, [cap](te_settings& s) {
                      s.operations = 16;
                      s.operations_per_peer = cap;
                      s.immediate_window = 4;
                    }});
    Player& writer = pair.writer;
    const te_handle watcher = open_watcher(writer);
    std::vector<te_handle> triggers;
    for (uint64_t i = 0; i < 3; ++i)
      triggers.push_back(open_trigger(writer, watcher, prepare(pair, i * 5000, i * 5000, 5000)));
    te_scatter_args s{};
    const int64_t lengths[] = {100};
    s.target = writer.target({{-1, pair.remote, pair.remote_counter}});
    s.region = pair.source.region;
    s.lengths = lengths;
    te_handle scatter = TE_NONE;
    REQUIRE(te_prepare_scatter(writer.engine, &s, &scatter, &writer.error) == TE_OK);
    triggers.push_back(open_trigger(writer, watcher, scatter));
    const auto raises = static_cast<uint64_t>(scaled(500));
    add(writer, watcher, raises);
    // Callers find their place, too.
    for (int i = 0; i < 50; ++i) require_ok(pair.write(20000, 20000, 64));
    CHECK(pair.owner.counted(pair.counter, 4 * raises + 50));
    for (const te_handle trigger : triggers) {
      CHECK(ended(writer, trigger, raises));
      CHECK(trigger_info(writer, trigger).completed == raises);
      CHECK(trigger_info(writer, trigger).owed == 0);
    }
    CHECK(writer.idle());
  }
}

TEST_CASE("engine: trigger: what waits for a slot that somebody holds goes out when it is free") {
  Pair pair(Setup{"sim", "", 1, [](te_settings& s) { s.operations = 16; }});
  Player& writer = pair.writer;
  const te_handle mine = writer.counter();
  std::vector<Transfer> held;
  const te_handle watcher = open_watcher(writer);
  const te_handle trigger = open_trigger(writer, watcher, prepare(pair, 0, 0, 100));
  for (int i = 0; i < 16; ++i) held.push_back(writer.reached(mine, 1, kPatience));
  add(writer, watcher, 100);
  CHECK(eventually([&] { return trigger_info(writer, trigger).owed == 100; }));
  CHECK(trigger_info(writer, trigger).fired == 0);
  for (Transfer& transfer : held) transfer.cancel();
  CHECK(ended(writer, trigger, 100));
  CHECK(pair.owner.counted(pair.counter, 100));
  for (Transfer& transfer : held) CHECK(transfer.wait() == TE_ERR_CANCELLED);
}

TEST_CASE("engine: trigger: thousands of watchers, each with its own") {
  Pair pair({"sim", "", 1, {}});
  Player& writer = pair.writer;
  const te_handle prepared = prepare(pair, 0, 0, 16);
  const int count = scaled(4096);
  std::vector<te_handle> watchers, triggers;
  for (int i = 0; i < count; ++i) {
    watchers.push_back(open_watcher(writer));
    triggers.push_back(open_trigger(writer, watchers.back(), prepared));
  }
  Random random(7);
  std::vector<uint64_t> raised(watchers.size(), 0);
  uint64_t total = 0;
  for (int i = 0; i < 3 * count; ++i) {
    const size_t k = random.next() % watchers.size();
    add(writer, watchers[k]);
    ++raised[k];
    ++total;
  }
  CHECK(pair.owner.counted(pair.counter, total));
  for (size_t k = 0; k < watchers.size(); ++k) {
    CHECK(ended(writer, triggers[k], raised[k]));
    if (k % 2 == 0) CHECK(te_watcher_close(writer.engine, watchers[k], &writer.error) == TE_OK);
  }
  // Words of the closed serve others, and their neighbours go on.
  for (size_t k = 0; k < watchers.size(); k += 2) {
    watchers[k] = open_watcher(writer);
    CHECK(watcher_info(writer, watchers[k]).value == 0);
    triggers[k] = open_trigger(writer, watchers[k], prepared);
  }
  for (const te_handle watcher : watchers) add(writer, watcher);
  CHECK(pair.owner.counted(pair.counter, total + watchers.size()));
  for (size_t k = 0; k < watchers.size(); ++k) CHECK(ended(writer, triggers[k], k % 2 == 0 ? 1 : raised[k] + 1));
}

TEST_CASE("engine: trigger: a store that rings no doorbell is noticed by a worker that sleeps") {
  Pair pair(Setup{"sim", "", 1, [](te_settings& s) {
                    s.polling = TE_POLL_ADAPTIVE;
                    s.spin_ns = 0;
                  }});
  Player& writer = pair.writer;
  const te_handle watcher = open_watcher(writer);
  auto* word = reinterpret_cast<std::atomic<uint64_t>*>(watcher_info(writer, watcher).host);
  const te_handle trigger = open_trigger(writer, watcher, prepare(pair, 0, 0, 64));
  int64_t longest = 0;
  for (uint64_t round = 1; round <= 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int64_t begin = monotonic_ns();
    word->fetch_add(1, std::memory_order_release);  // as a GPU would
    CHECK(te_trigger_wait(writer.engine, trigger, round, kPatience, &writer.error) == TE_OK);
    longest = std::max(longest, monotonic_ns() - begin);
  }
  CHECK(writer.stats().sleeps > 20);
  CHECK(longest < kSecond);
}

// --- ends ----------------------------------------------------------------------------------------------------------------------------

TEST_CASE("engine: trigger: after a cancel nothing fires, and what is under way ends") {
  Pair pair({"sim", "delay=3", 2, {}});
  Player& writer = pair.writer;
  for (int turn = 0; turn < scaled(60); ++turn) {
    const te_handle watcher = open_watcher(writer);
    const te_handle trigger = open_trigger(writer, watcher, prepare(pair, 0, 0, 5000));
    std::thread raiser([&] {
      for (int i = 0; i < 50; ++i) add(writer, watcher, 3);
    });
    if (turn % 3 != 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (turn % 7)));
    CHECK(te_trigger_cancel(writer.engine, trigger, &writer.error) == TE_OK);
    const uint64_t fired = trigger_info(writer, trigger).fired;
    raiser.join();
    add(writer, watcher);
    CHECK(te_trigger_cancel(writer.engine, trigger, &writer.error) == TE_OK);
    CHECK(ended(writer, trigger, fired));
    CHECK(trigger_info(writer, trigger).completed == fired);
    CHECK(trigger_info(writer, trigger).owed == 0);
    CHECK(te_trigger_close(writer.engine, trigger, &writer.error) == TE_OK);
    CHECK(te_trigger_close(writer.engine, trigger, &writer.error) == TE_OK);
    te_trigger_info info{};
    CHECK(te_trigger_describe(writer.engine, trigger, &info, &writer.error) == TE_ERR_CLOSED);
    CHECK(te_watcher_close(writer.engine, watcher, &writer.error) == TE_OK);
    CHECK(te_watcher_close(writer.engine, watcher, &writer.error) == TE_OK);
  }
  CHECK(writer.idle());
}

TEST_CASE("engine: trigger: closing what it posts makes firings fail, and they are counted") {
  enum What { kPrepared, kSource, kTarget, kFarRegion };
  for (const What what : {kPrepared, kSource, kTarget, kFarRegion}) {
    CAPTURE(what);
    Pair pair({"sim", "", 2, {}});
    Player& writer = pair.writer;
    const te_handle watcher = open_watcher(writer), completed = open_flag(writer);
    te_handle prepared = TE_NONE, target = TE_NONE;
    if (what == kTarget) {
      target = writer.target({{-1, pair.remote, pair.remote_counter}});
      const int64_t lengths[] = {100};
      te_scatter_args s{};
      s.target = target;
      s.region = pair.source.region;
      s.lengths = lengths;
      REQUIRE(te_prepare_scatter(writer.engine, &s, &prepared, &writer.error) == TE_OK);
    } else {
      prepared = prepare(pair, 0, 0, 100);
    }
    const te_handle trigger = open_trigger(writer, {watcher, prepared, TE_NONE, completed, 1, 1, -1});
    add(writer, watcher, 5);
    CHECK(flagged(writer, completed, 5));
    if (what == kPrepared) CHECK(te_prepared_close(writer.engine, prepared, &writer.error) == TE_OK);
    if (what == kSource) CHECK(writer.close(pair.source) == TE_OK);
    if (what == kTarget) CHECK(te_target_close(writer.engine, target, &writer.error) == TE_OK);
    if (what == kFarRegion) CHECK(pair.owner.close(pair.target) == TE_OK);
    add(writer, watcher, 7);
    CHECK(ended(writer, trigger, 12));
    const te_trigger_info info = trigger_info(writer, trigger);
    CHECK(info.completed == 5);
    CHECK(info.failed == 7);
    CHECK(info.active == 1);
    const bool region = what == kSource || what == kFarRegion;
    CHECK(name_of(info.first_error.status) == name_of(region ? TE_ERR_REGION_CLOSED : TE_ERR_CLOSED));
    CHECK(info.first_error.message[0] != '\0');
    CHECK(te_trigger_wait(writer.engine, trigger, 5, 0, &writer.error) == TE_OK);
    CHECK(te_trigger_wait(writer.engine, trigger, 6, kPatience, &writer.error) == info.first_error.status);
    CHECK(flag_info(writer, completed).epoch == 5);
    CHECK(writer.idle());
  }
}

TEST_CASE("engine: trigger: firings towards a peer that dies fail by its name") {
  Pair pair(Setup{"sim", "", 2, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }});
  Player& writer = pair.writer;
  const te_handle watcher = open_watcher(writer);
  const te_handle trigger = open_trigger(writer, watcher, prepare(pair, 0, 0, 100));
  add(writer, watcher, 10);
  CHECK(ended(writer, trigger, 10));
  pair.owner.inject("kill");
  add(writer, watcher, 10);
  CHECK(ended(writer, trigger, 20));
  const te_trigger_info info = trigger_info(writer, trigger);
  CHECK(info.completed == 10);
  CHECK(info.failed == 10);
  CHECK(info.first_error.peer == pair.peer());
}

TEST_CASE("engine: trigger: an engine that closes ends all of it") {
  for (int turn = 0; turn < 10; ++turn) {
    Pair pair({"sim", "delay=3", 2, {}});
    Player& writer = pair.writer;
    const te_handle watcher = open_watcher(writer);
    const te_handle trigger = open_trigger(writer, watcher, prepare(pair, 0, 0, 9000));
    const uint64_t word = watcher_info(writer, watcher).host;
    int32_t status = TE_OK;
    std::thread waiter([&] {
      te_error error{};
      status = te_trigger_wait(writer.engine, trigger, 1'000'000, kPatience, &error);
    });
    std::thread raiser([&] {
      te_error error{};
      while (te_watcher_add(writer.engine, watcher, 1, &error) == TE_OK) {
      }
      CHECK(error.status == TE_ERR_CLOSED);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(turn));
    CHECK(writer.close() == TE_OK);
    waiter.join();
    raiser.join();
    CHECK(load(word) < UINT64_MAX);  // still there for a kernel
    CHECK(status != TE_OK);
    CHECK(status != TE_AGAIN);
  }
}

TEST_CASE("engine: trigger: what cannot work is refused") {
  Pair pair({"sim", "", 1, {}});
  Player& writer = pair.writer;
  const te_handle watcher = open_watcher(writer), prepared = prepare(pair, 0, 0, 8);
  te_handle trigger = TE_NONE;
  const auto refused = [&](const te_trigger_args& args) {
    return te_trigger_open(writer.engine, &args, &trigger, &writer.error);
  };
  CHECK(refused({watcher, prepared, TE_NONE, TE_NONE, 0, 1, -1}) == TE_ERR_ARGUMENT);
  CHECK(refused({watcher, prepared, TE_NONE, TE_NONE, 1, 0, -1}) == TE_ERR_ARGUMENT);
  CHECK(refused({999, prepared, TE_NONE, TE_NONE, 1, 1, -1}) == TE_ERR_CLOSED);
  CHECK(refused({watcher, 999, TE_NONE, TE_NONE, 1, 1, -1}) == TE_ERR_STALE);
  CHECK(refused({watcher, prepared, 999, TE_NONE, 1, 1, -1}) == TE_ERR_CLOSED);
  CHECK(trigger == TE_NONE);
  CHECK(te_watcher_close(writer.engine, watcher, &writer.error) == TE_OK);
  CHECK(refused({watcher, prepared, TE_NONE, TE_NONE, 1, 1, -1}) == TE_ERR_CLOSED);
  CHECK(te_watcher_add(writer.engine, watcher, 1, &writer.error) == TE_ERR_CLOSED);
  CHECK(te_watcher_notify(writer.engine, watcher, 1, &writer.error) == TE_ERR_CLOSED);
}

// --- events --------------------------------------------------------------------------------------------------------------------------

namespace {

// The next event of a watcher; TE_NONE when none comes.
te_handle next_event(Player& player, int64_t timeout_ns) {
  te_event event{};
  uint32_t count = 0;
  const int64_t deadline = monotonic_ns() + timeout_ns;
  do {
    if (te_events_fetch(player.engine, timeout_ns, &event, 1, &count, &player.error) == TE_OK &&
        event.kind == TE_EVENT_WATCHER)
      return event.user;
  } while (monotonic_ns() < deadline);
  return TE_NONE;
}

}  // namespace

TEST_CASE("engine: watcher: changes are told, each value once, and none is missed") {
  Player player({"sim", "", 1, {}});
  const te_handle watcher = open_watcher(player), silent = open_watcher(player);
  add(player, watcher, 10);
  uint64_t before = 99, now = 99;
  CHECK(te_watcher_notify(player.engine, watcher, 1, &player.error) == TE_OK);
  CHECK(te_watcher_take(player.engine, watcher, &before, &now, &player.error) == TE_AGAIN);
  const auto total = static_cast<uint64_t>(scaled(5000));
  std::thread raiser([&] {
    for (uint64_t i = 0; i < total; ++i) {
      add(player, watcher);
      add(player, silent);
      if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  uint64_t last = 10, wrong = 0;
  while (last < 10 + total) {
    REQUIRE(next_event(player, kPatience) == watcher);
    const int32_t status = te_watcher_take(player.engine, watcher, &before, &now, &player.error);
    if (status == TE_AGAIN) continue;
    REQUIRE(status == TE_OK);
    wrong += before != last || now <= before ? 1 : 0;
    last = now;
  }
  raiser.join();
  CHECK(wrong == 0);
  CHECK(last == 10 + total);
  CHECK(te_watcher_notify(player.engine, watcher, 0, &player.error) == TE_OK);
  while (next_event(player, 0) != TE_NONE) {
  }
  add(player, watcher);
  CHECK(next_event(player, 20 * kMs) == TE_NONE);
}

TEST_CASE("engine: watcher: one that is closed with an event pending leaves its place in order") {
  Player player({"sim", "", 1, {}});
  for (int i = 0; i < scaled(300); ++i) {
    const te_handle watcher = open_watcher(player);
    CHECK(te_watcher_notify(player.engine, watcher, 1, &player.error) == TE_OK);
    add(player, watcher);
    if (i % 2 == 0) CHECK(eventually([&] { return watcher_info(player, watcher).seen == 1; }));
    CHECK(te_watcher_close(player.engine, watcher, &player.error) == TE_OK);
    if (i % 3 == 0) continue;
    const te_handle next = open_watcher(player);
    CHECK(te_watcher_notify(player.engine, next, 1, &player.error) == TE_OK);
    add(player, next, 3);
    uint64_t before = 0, now = 0;
    int32_t status = TE_AGAIN;
    while (status == TE_AGAIN) {
      REQUIRE(next_event(player, kPatience) == next);
      status = te_watcher_take(player.engine, next, &before, &now, &player.error);
    }
    CHECK(status == TE_OK);
    CHECK(before == 0);
    CHECK(now == 3);
    CHECK(te_watcher_close(player.engine, next, &player.error) == TE_OK);
  }
}

TEST_CASE("engine: watcher: all of it comes and goes from many threads") {
  Pair pair({"sim", "", 2, {}});
  Player& writer = pair.writer;
  const te_handle prepared = prepare(pair, 0, 0, 256);
  std::atomic<uint64_t> fired{0};
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      te_error error{};
      for (int i = 0; i < scaled(150); ++i) {
        te_handle watcher = TE_NONE, trigger = TE_NONE, flag = TE_NONE;
        CHECK(te_watcher_open(writer.engine, -1, &watcher, &error) == TE_OK);
        CHECK(te_flag_open(writer.engine, -1, &flag, &error) == TE_OK);
        const te_trigger_args args{watcher, prepared, flag, flag, 1, 1, -1};
        CHECK(te_trigger_open(writer.engine, &args, &trigger, &error) == TE_OK);
        CHECK(te_watcher_notify(writer.engine, watcher, 1, &error) == TE_OK);
        const auto by = static_cast<uint64_t>(1 + (i + k) % 5);
        CHECK(te_watcher_add(writer.engine, watcher, by, &error) == TE_OK);
        CHECK(te_flag_wait(writer.engine, flag, 2 * by, kPatience, &error) == TE_OK);  // posted and completed
        if (i % 2 == 0) CHECK(te_flag_close(writer.engine, flag, &error) == TE_OK);
        CHECK(te_watcher_close(writer.engine, watcher, &error) == TE_OK);
        te_trigger_info info{};
        CHECK(te_trigger_describe(writer.engine, trigger, &info, &error) == TE_OK);
        CHECK(info.fired == by);
        fired += info.fired;
        CHECK(te_trigger_close(writer.engine, trigger, &error) == TE_OK);
        CHECK(te_flag_close(writer.engine, flag, &error) == TE_OK);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(pair.owner.counted(pair.counter, fired));
  CHECK(writer.idle());
}

}  // namespace te::engine_test
