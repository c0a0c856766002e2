// The life of engines: many threads at once, transfers that nobody waits for, closing under load from both sides, and fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kLength = 3000;

bool ended_well_or(int32_t status, std::initializer_list<int32_t> allowed) {
  return status == TE_OK || std::find(allowed.begin(), allowed.end(), status) != allowed.end();
}

}  // namespace

TEST_CASE("engine: 64 threads submit at once: every write lands, counts once and is reported to whom it belongs") {
  constexpr uint64_t kThreads = 64, kSlot = 1500;
  for (const Setup& setup : {Setup{"sim", "reorder=1,delay=1,busy=0.1", 3, {}},
                             Setup{"sim", "reorder=0,depth=16", 1, [](te_settings& s) { s.operations = 16; }}}) {
    CAPTURE(setup.text());
    Pair pair(setup, kThreads * kSlot);
    const int rounds = scaled(30);
    std::atomic<int> bad{0};
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < rounds; ++i) {
          Transfer transfer = pair.write(t * kSlot, t * kSlot, 1 + (t * 31 + static_cast<uint64_t>(i)) % kSlot);
          if (transfer.wait() != TE_OK) ++bad;
        }
        if (pair.write(t * kSlot, t * kSlot, kSlot).wait() != TE_OK) ++bad;
      });
    for (std::thread& t : threads) t.join();
    CHECK(bad == 0);
    CHECK(pair.owner.counted(pair.counter, kThreads * static_cast<uint64_t>(rounds + 1)));
    CHECK(pair.landed(0, 0, kThreads * kSlot));
    CHECK(pair.target.guards_intact());
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: threads that open, use and close regions and counters at once do not meet") {
  Setup setup{"sim", "reorder=1", 2, {}};
  Player a(setup), b(setup);
  Memory& source = a.memory(8192);
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      Memory target(2048);
      te_error why{};
      for (int i = 0; i < scaled(25); ++i) {
        te_handle region = TE_NONE, counter = TE_NONE, remote = TE_NONE, remote_counter = TE_NONE;
        te_region_descriptor rd;
        te_counter_descriptor cd;
        bool ok = te_region_register(b.engine, target.data(), target.size, TE_DEVICE_HOST, 0, &region, &why) == TE_OK;
        ok = ok && te_counter_open(b.engine, &counter, &why) == TE_OK;
        ok = ok && te_region_describe(b.engine, region, &rd, &why) == TE_OK &&
             te_counter_describe(b.engine, counter, &cd, &why) == TE_OK;
        ok = ok && te_remote_region(a.engine, &rd, &remote, &why) == TE_OK &&
             te_remote_counter(a.engine, &cd, &remote_counter, &why) == TE_OK;
        if (ok) {
          for (int k = 0; k < 3; ++k) ok = a.write(source, 0, remote, 0, 2048, remote_counter).wait() == TE_OK && ok;
          ok = te_counter_wait(b.engine, counter, 3, kPatience, nullptr, 0, &why) == TE_OK && ok;
          ok = std::memcmp(source.data(), target.data(), 2048) == 0 && target.guards_intact() && ok;
          ok = te_region_close(b.engine, region, kPatience, &why) == TE_OK && ok;
          ok = te_counter_close(b.engine, counter, kPatience, &why) == TE_OK && ok;
        }
        if (!ok) ++bad;
      }
    });
  for (std::thread& t : threads) t.join();
  CHECK(bad == 0);
  CHECK(b.stats().regions == 0);
  CHECK(b.stats().counters == 0);
}

TEST_CASE("engine: transfers released before they end leave nothing behind") {
  Pair pair({"sim", "reorder=1,delay=3", 2, {}});
  const uint32_t alive = pair.writer.stats().transfers_alive;
  for (int i = 0; i < scaled(500); ++i) pair.write(0, 0, kLength).release();
  CHECK(pair.owner.counted(pair.counter, static_cast<uint64_t>(scaled(500))));
  CHECK(pair.writer.idle());
  CHECK(eventually([&] { return pair.writer.stats().transfers_alive == alive; }));
}

TEST_CASE("engine: results may be read after the engine is gone") {
  Transfer good, stuck;
  {
    Pair pair({"sim", "", 1, {}});
    good = pair.write(0, 0, kLength);
    CHECK(good.wait() == TE_OK);
    pair.writer.inject("pause");
    stuck = pair.write(0, 0, kLength);
    pair.writer.close(20 * kMs);
  }
  CHECK(good.result() == TE_OK);
  CHECK(good.quiesced());
  CHECK(stuck.result() == TE_ERR_CLOSED);
  CHECK_FALSE(stuck.message().empty());
  stuck.cancel();
  CHECK(te_transfer_notify(good.get(), 1) == 1);
}

TEST_CASE("engine: each notified transfer gives exactly one event, or none when it had ended") {
  for (const char* sim : {"reorder=0", "reorder=1,delay=2"}) {
    Pair pair({"sim", sim, 2, {}});
    const int count = scaled(400);
    std::vector<Transfer> transfers(static_cast<size_t>(count));
    std::vector<std::atomic<int>> told(static_cast<size_t>(count));
    std::atomic<int> total{0};
    std::atomic<bool> done{false};
    std::thread dispatcher([&] {
      te_event events[7];
      while (!done.load()) {
        uint32_t n = 0;
        te_error why{};
        if (te_events_fetch(pair.writer.engine, 10 * kMs, events, 7, &n, &why) != TE_OK) continue;
        for (uint32_t i = 0; i < n; ++i)
          if (events[i].kind == TE_EVENT_TRANSFER) {
            if (te_transfer_result(events[i].transfer, nullptr) == TE_AGAIN) total += 1'000'000;
            ++told[events[i].user];
            ++total;
          }
      }
    });
    for (size_t i = 0; i < transfers.size(); ++i) {
      transfers[i] = pair.write(0, 0, 500);
      if (te_transfer_notify(transfers[i].get(), i) == 1) {
        ++told[i];
        ++total;
      }
    }
    CHECK(eventually([&] { return total == count; }));
    done = true;
    te_events_wake(pair.writer.engine);
    dispatcher.join();
    CHECK(std::all_of(told.begin(), told.end(), [](const std::atomic<int>& n) { return n == 1; }));
  }
}

TEST_CASE("engine: closing under load ends every transfer once, within the bound") {
  for (const Setup& base : all_setups()) {
    Setup setup = base;
    setup.tune = [](te_settings& s) { s.peer_timeout_ns = 3 * kSecond * kSlowness; };
    CAPTURE(setup.text());
    for (int round = 0; round < scaled(3); ++round)
      for (const bool writer_closes : {true, false}) {
        CAPTURE(writer_closes);
        Pair pair(setup);
        std::atomic<bool> stop{false};
        std::atomic<int> hung{0}, odd{0};  // odd: a status that nobody should see here
        std::atomic<int64_t> started{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t)
          threads.emplace_back([&] {
            while (!stop.load()) {
              std::vector<Transfer> transfers;
              for (uint64_t i = 0; i < 10; ++i)
                transfers.push_back(pair.write(i * kLength, i * kLength, kLength, i % 2 == 0, 0, 5 * kSecond));
              for (Transfer& transfer : transfers) {
                const int32_t status = transfer.wait();
                ++started;
                if (status == TE_AGAIN) ++hung;
                if (!ended_well_or(status, {TE_ERR_CLOSED, TE_ERR_PEER_LOST, TE_ERR_PEER_UNREACHABLE,
                                            TE_ERR_REGION_CLOSED, TE_ERR_TIMEOUT}))
                  odd = status;
                if (status != TE_OK) stop = true;
              }
            }
          });
        REQUIRE(eventually([&] { return started > 50; }));
        const int64_t begin = monotonic_ns();
        const int32_t status = (writer_closes ? pair.writer : pair.owner).close(10 * kSecond);
        CHECK_MESSAGE(status == TE_OK, (writer_closes ? pair.writer : pair.owner).error.message);
        CHECK(monotonic_ns() - begin < 11 * kSecond);
        stop = true;
        for (std::thread& t : threads) t.join();
        CHECK(hung == 0);
        CHECK_MESSAGE(odd == 0, name_of(odd));
      }
  }
}

TEST_CASE("engine: both sides close at once under load, in either order, and both end") {
  for (int seed = 1; seed <= scaled(16); ++seed) {
    CAPTURE(seed);
    const std::string sim = "delay=3,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : "") +
                            (seed % 3 == 0 ? ",keys_enforced=0" : "");
    Pair pair({"sim", sim, static_cast<uint32_t>(1 + seed % 3), {}});
    Memory& back = pair.writer.memory(1 << 16);
    Memory& from = pair.owner.memory(1 << 16);
    const te_handle back_remote = pair.owner.remote(pair.writer, back);
    if (seed % 4 != 0) require_ok(pair.write(0, 0, 1));  // else closing meets connecting
    std::vector<Transfer> transfers;
    for (int i = 0; i < 30; ++i) {
      transfers.push_back(pair.write(0, 0, kLength));
      transfers.push_back(pair.owner.write(from, 0, back_remote, 0, kLength));
      transfers.push_back(pair.writer.send(pair.peer(), &i, sizeof i));
    }
    int32_t one = TE_AGAIN, two = TE_AGAIN;
    std::thread a([&] { one = pair.writer.close(10 * kSecond); }), b([&] { two = pair.owner.close(10 * kSecond); });
    a.join();
    b.join();
    CHECK(one == TE_OK);
    CHECK(two == TE_OK);
    for (Transfer& t : transfers) {
      const int32_t status = t.wait(0);
      CHECK_MESSAGE(ended_well_or(status, {TE_ERR_CLOSED, TE_ERR_PEER_LOST, TE_ERR_PEER_UNREACHABLE}), name_of(status),
                    ": ", t.message());
    }
    (seed % 2 == 0 ? pair.writer : pair.owner).free();
  }
}

TEST_CASE("engine: closing while a peer is silent ends at its bound, says so, and leaks nothing") {
  // Writes, page lists, batches and messages in flight that nobody will ever complete.
  for (const char* silence : {"pause", "kill"}) {
    CAPTURE(std::string(silence));
    Pair pair({"sim", "reorder=1", 2, {}});
    require_ok(pair.write(0, 0, kLength));
    (std::string(silence) == "pause" ? pair.writer : pair.owner).inject(silence);
    const std::vector<int32_t> indices = {0, 1, 2, 3};
    const te_page_args pages{pair.source.region,
                             pair.remote,
                             pair.remote_counter,
                             0,
                             0,
                             0,
                             1000,
                             1000,
                             1000,
                             4,
                             indices.data(),
                             indices.data(),
                             4,
                             4};
    std::vector<te_batch_entry> entries(3);
    entries[0].write = entries[1].write = {pair.source.region, pair.remote, pair.remote_counter, 0, 0, 0, kLength};
    entries[2].is_pages = 1;
    entries[2].pages = pages;
    std::vector<Transfer> transfers;
    transfers.push_back(pair.write(0, 0, kLength));
    transfers.push_back(pair.writer.pages(pages));
    transfers.push_back(pair.writer.batch(entries));
    transfers.push_back(pair.writer.send(pair.peer(), "into the void", 13));
    REQUIRE(eventually([&] { return pair.writer.peer_info(pair.peer()).in_flight > 3; }));
    const int64_t begin = monotonic_ns();
    const int32_t status = pair.writer.close(100 * kMs);
    CHECK(status == TE_ERR_TIMEOUT);
    CHECK(monotonic_ns() - begin < 5 * kSecond);
    for (Transfer& t : transfers) {
      CHECK(t.wait(0) == TE_ERR_CLOSED);
      CHECK_FALSE(t.quiesced());
    }
  }
}

TEST_CASE("engine: waits of other threads end when their engine is closed") {
  Pair pair({"sim", "", 1, {}});
  require_ok(pair.write(0, 0, 1));
  std::atomic<int32_t> counter_wait{TE_OK}, message_wait{TE_OK}, event_wait{TE_OK};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    te_error why{};
    counter_wait = te_counter_wait(pair.owner.engine, pair.counter, 99, kPatience, nullptr, 0, &why);
  });
  threads.emplace_back([&] {
    te_error why{};
    te_message message;
    message_wait = te_message_receive(pair.owner.engine, kPatience, &message, &why);
  });
  threads.emplace_back([&] {
    te_error why{};
    te_event events[4];
    uint32_t count = 0;
    int32_t status = TE_OK;
    while (status == TE_OK || status == TE_AGAIN)
      status = te_events_fetch(pair.owner.engine, kPatience, events, 4, &count, &why);
    event_wait = status;
  });
  Transfer reached = pair.owner.reached(pair.counter, 99, kPatience);
  CHECK(pair.owner.close() == TE_OK);
  for (std::thread& t : threads) t.join();
  CHECK(counter_wait == TE_ERR_CLOSED);
  CHECK(message_wait == TE_ERR_CLOSED);
  CHECK(event_wait == TE_ERR_CLOSED);
  CHECK(reached.wait() == TE_ERR_CLOSED);
}

TEST_CASE("engine: many threads close one engine at once") {
  for (int round = 0; round < 5; ++round) {
    Pair pair({"sim", "reorder=1", 1, {}});
    for (int i = 0; i < 20; ++i) pair.write(0, 0, kLength).release();
    std::atomic<int> good{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&] {
        te_error why{};
        if (te_engine_close(pair.writer.engine, kPatience, &why) == TE_OK) ++good;
      });
    for (std::thread& t : threads) t.join();
    CHECK(good == 8);
  }
}

TEST_CASE("engine: engines are opened and closed in numbers without running out of anything") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    for (int i = 0; i < scaled(setup.transport == "sim" ? 30 : 8); ++i) {
      Player player(setup);
      player.memory(1000);
      player.counter();
    }
  }
}

TEST_CASE("engine: a slot that never comes free is a time-out with the setting's name, not a hang") {
  Pair pair({"sim", "", 1, [](te_settings& s) {
               s.operations = 16;
               s.operations_per_peer = 16;
             }});
  require_ok(pair.write(0, 0, 1));
  pair.writer.inject("pause");
  std::vector<Transfer> stuck;
  for (int i = 0; i < 16; ++i) stuck.push_back(pair.write(0, 0, 10));
  Transfer refused = pair.write(0, 0, 10, true, 0, 30 * kMs);
  CHECK(refused.refused());
  CHECK(refused.wait() == TE_ERR_TIMEOUT);
  CHECK(refused.message().find("operations") != std::string::npos);
  pair.writer.inject("resume");
  for (Transfer& t : stuck) CHECK(t.wait() == TE_OK);
  require_ok(pair.write(0, 0, 10));
}

TEST_CASE("engine: the cap per peer holds one peer back and no other") {
  const Setup setup{"sim", "", 1, [](te_settings& s) { s.operations_per_peer = 4; }};
  Pair pair(setup);
  Player third(setup);
  Memory& other = third.memory(4096);
  const te_handle remote = pair.writer.remote(third, other);
  pair.owner.inject("pause");  // the first write waits for its attachment
  std::vector<Transfer> waiting;
  for (int i = 0; i < 4; ++i) waiting.push_back(pair.write(0, 0, 10));
  CHECK(pair.write(0, 0, 10, true, 0, 20 * kMs).wait() == TE_ERR_TIMEOUT);
  for (int i = 0; i < 20; ++i) require_ok(pair.writer.write(pair.source, 0, remote, 0, 10));
  pair.owner.inject("resume");
  for (Transfer& t : waiting) CHECK(t.wait() == TE_OK);
}

TEST_CASE("engine: a forked child gets FORKED from every call, and the parent is unharmed") {
  Pair pair({"sim", "reorder=1", 2, {}});
  require_ok(pair.write(0, 0, kLength));
  Transfer open = pair.owner.reached(pair.counter, 2, kPatience);
  const int32_t peer = pair.peer();
  const te_region_descriptor region = pair.owner.describe(pair.target);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    te_engine* engine = pair.writer.engine;
    te_error why{};
    te_stats stats;
    te_address address;
    te_message message;
    te_event event;
    te_handle handle = 0;
    uint32_t count = 0;
    uint64_t value = 0;
    int bad = 0;
    const auto expect = [&](int32_t status) { bad += status == TE_ERR_FORKED ? 0 : 1; };
    const auto refused = [&](te_transfer* t) { bad += t == nullptr && why.status == TE_ERR_FORKED ? 0 : 1; };
    expect(te_engine_stats(engine, &stats, &why));
    expect(te_engine_address(engine, &address, &why));
    expect(te_region_register(engine, &value, 8, 0, 0, &handle, &why));
    expect(te_region_close(engine, pair.source.region, kPatience, &why));
    expect(te_remote_region(engine, &region, &handle, &why));
    expect(te_counter_open(engine, &handle, &why));
    expect(te_counter_value(pair.owner.engine, pair.counter, &value, &why));
    expect(te_counter_wait(pair.owner.engine, pair.counter, 99, kPatience, nullptr, 0, &why));
    expect(te_message_receive(engine, kPatience, &message, &why));
    expect(te_events_fetch(engine, kPatience, &event, 1, &count, &why));
    expect(te_engine_close(engine, kPatience, &why));
    refused(te_write(engine, pair.source.region, 0, pair.remote, 0, 1, TE_NONE, 0, -1, &why));
    refused(te_send(engine, peer, "x", 1, -1, &why));
    refused(te_peer_connect(engine, peer, -1, &why));
    refused(te_peer_fence(engine, peer, -1, &why));
    if (te_transfer_wait(open.get(), 0) != TE_AGAIN) ++bad;
    te_transfer_cancel(open.get());
    te_engine_free(engine);
    _exit(bad);
  }
  int how = 0;
  REQUIRE(waitpid(child, &how, 0) == child);
  REQUIRE(WIFEXITED(how));
  CHECK(WEXITSTATUS(how) == 0);
  CHECK_FALSE(open.ended());
  for (int i = 0; i < 20; ++i) require_ok(pair.write(0, 0, kLength));
  CHECK(open.wait() == TE_OK);
  CHECK(pair.owner.counted(pair.counter, 21));
  CHECK(pair.writer.close() == TE_OK);
}

TEST_CASE("engine: an idle adaptive engine sleeps") {
  Pair pair({"sim", "", 1, [](te_settings& s) { s.polling = TE_POLL_ADAPTIVE; }});
  require_ok(pair.write(0, 0, kLength));
  const auto sleeps = [&] { return pair.writer.stats().sleeps; };
  const uint64_t before = sleeps();
  CHECK(eventually([&] { return sleeps() > before + 1; }));
  // While asleep it polls rarely.
  const uint64_t polls = pair.writer.stats().polls;
  const int64_t begin = monotonic_ns();
  while (monotonic_ns() - begin < 100 * kMs) std::this_thread::yield();
  CHECK(pair.writer.stats().polls - polls < 5000);
  require_ok(pair.write(0, 0, kLength));
}

}  // namespace te::engine_test
