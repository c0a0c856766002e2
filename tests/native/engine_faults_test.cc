// Work requests that fail, with certain and uncertain outcome: the transfer says so, the counter stays honest, nothing runs out.
#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr size_t kBytes = 1 << 16;

// Without reordering an error breaks the path, so that what was posted behind it is flushed.
const char* const kOrders[] = {"reorder=0", "reorder=1,delay=2"};

uint64_t stat(Player& player, const std::string& name) {
  te_error text{};
  REQUIRE(te_engine_inject(player.engine, "stats", &text) == TE_OK);
  const std::string all = std::string(" ") + text.message;
  const size_t at = all.find(" " + name + "=");
  REQUIRE(at != std::string::npos);
  return std::stoull(all.substr(at + name.size() + 2));
}

// Whatever the writer still had on its way to the owner has been polled there: later requests on every NIC have been counted, and
// completion queues keep order. Rounds cover what a reordering fabric delays.
struct Marker {
  explicit Marker(Pair& pair)
      : pair(pair), counter(pair.owner.counter()), remote(pair.writer.remote_counter(pair.owner, counter)) {}
  void settle() {
    for (int round = 0; round < 6; ++round) {
      require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, kBytes / 2, remote));
      REQUIRE(pair.owner.counted(counter, ++sent));
    }
  }
  Pair& pair;
  const te_handle counter, remote;
  uint64_t sent = 0;
};

// Writes that follow a failure work and count exactly.
void check_healthy(Pair& pair, int writes = 40, uint64_t length = 10'000) {
  const uint64_t before = pair.owner.value(pair.counter);
  for (int i = 0; i < writes; ++i) {
    pair.target.poison();
    Transfer t = pair.write(7, 99, length, true, 0, kPatience / 3);
    const int32_t status = t.wait();
    REQUIRE_MESSAGE(status == TE_OK, "write ", i, " after the failures: ", name_of(status), ": ", t.message());
    const uint64_t expected = before + static_cast<uint64_t>(i) + 1;
    const int32_t reached = pair.owner.wait(pair.counter, expected, kPatience / 3);
    REQUIRE_MESSAGE(reached == TE_OK, "write ", i, " after the failures is not counted");
    REQUIRE(pair.owner.value(pair.counter) == expected);
    REQUIRE(pair.target.holds(99, pair.source.data() + 7, length));
  }
}

}  // namespace

TEST_CASE("engine: a write that fails cleanly says so, counts nothing and leaves the next ones whole") {
  for (const char* order : kOrders)
    for (const uint32_t nics : {1u, 2u, 5u}) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      Pair pair({"sim", order, nics, {}}, kBytes);
      require_ok(pair.write(0, 0, 10'000));
      pair.writer.inject("error_next 1 clean");
      Transfer t = pair.write(0, 0, 10'000);
      CHECK(t.wait() == TE_ERR_TRANSPORT);
      CHECK(t.error().peer == pair.peer());
      CHECK(t.error().nic >= 0);
      CHECK(t.error().provider_status != 0);
      CHECK(t.wait_quiesced());
      CHECK(pair.owner.counted(pair.counter, 1));
      check_healthy(pair);
    }
}

TEST_CASE("engine: of two cut writes under way at once one fails and the counter rises by exactly one") {
  for (const char* order : kOrders)
    for (uint32_t nics = 2; nics <= 4; ++nics) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      Pair pair({"sim", std::string(order) + ",mtu=256", nics, {}}, kBytes);
      Marker marker(pair);
      require_ok(pair.write(0, 0, 1));
      for (const char* fate : {"clean", "unknown", "partial", "late"})
        for (int skip = 0; skip < static_cast<int>(2 * nics); ++skip) {
          CAPTURE(std::string(fate));
          CAPTURE(skip);
          marker.settle();
          const uint64_t before = pair.owner.value(pair.counter);
          pair.writer.inject("fail_after " + std::to_string(skip) + " " + fate);
          Transfer one = pair.write(0, 0, 8000), two = pair.write(20'000, 20'000, 8000);
          const int failed = (one.wait() != TE_OK) + (two.wait() != TE_OK);
          // In order, an error flushes what was posted behind it: then both may fail.
          CHECK(failed >= 1);
          CHECK(one.wait_quiesced());
          CHECK(two.wait_quiesced());
          marker.settle();
          const uint64_t good = static_cast<uint64_t>(2 - failed);
          // "late" bytes, immediate included, may complete a write that was reported as failed: wholly in memory, so it may count.
          const uint64_t most = std::string(fate) == "late" ? 2 : good;
          const uint64_t rise = pair.owner.value(pair.counter) - before;
          REQUIRE(rise >= good);
          REQUIRE(rise <= most);
          check_healthy(pair, 2);
        }
    }
}

TEST_CASE("engine: hundreds of failures with known outcome use up neither slots nor credits") {
  for (const char* order : kOrders)
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      Pair pair({"sim", order, nics,
                 [](te_settings& s) {
                   s.assembly_slots = 4;
                   s.immediate_window = 8;
                 }},
                kBytes);
      for (int i = 0; i < scaled(300); ++i) {
        pair.writer.inject("error_next 1 clean");
        Transfer t = pair.write(0, 0, 8000, true, 0, kPatience / 3);
        REQUIRE(t.wait() == TE_ERR_TRANSPORT);
      }
      CHECK(pair.owner.value(pair.counter) == 0);
      check_healthy(pair);
      CHECK(pair.writer.idle());
    }
}

TEST_CASE("engine: hundreds of failures with unknown outcome use up neither slots nor credits") {
  for (const char* order : kOrders)
    for (const char* fate : {"unknown", "partial"})
      for (const uint32_t nics : {1u, 3u}) {
        CAPTURE(std::string(order));
        CAPTURE(std::string(fate));
        CAPTURE(nics);
        Pair pair({"sim", order, nics,
                   [](te_settings& s) {
                     s.assembly_slots = 4;
                     s.immediate_window = 8;
                   }},
                  kBytes);
        for (int i = 0; i < scaled(300); ++i) {
          pair.writer.inject("error_next 1 " + std::string(fate));
          Transfer t = pair.write(0, 0, 8000, true, 0, kPatience / 6);
          const int32_t status = t.wait();
          REQUIRE_MESSAGE(status == TE_ERR_TRANSPORT, "failure ", i, ": ", name_of(status), ": ", t.message());
        }
        CHECK(pair.owner.value(pair.counter) == 0);
        check_healthy(pair);
        CHECK(pair.writer.idle());
      }
}

// A provider that reports an error for a request that did land: the write is in memory, so the counter may say so, but each
// write counts at most once and later writes exactly once.
TEST_CASE("engine: writes that land in spite of an error count at most once and spoil no later count") {
  for (const char* order : kOrders)
    for (const char* fate : {"landed", "late"})
      for (const uint32_t nics : {1u, 2u, 3u}) {
        CAPTURE(std::string(order));
        CAPTURE(std::string(fate));
        CAPTURE(nics);
        Pair pair({"sim", order, nics,
                   [](te_settings& s) {
                     s.assembly_slots = 4;
                     s.immediate_window = 8;
                   }},
                  kBytes);
        Marker marker(pair);
        const int failures = scaled(100);
        for (int i = 0; i < failures; ++i) {
          pair.writer.inject("fail_after " + std::to_string(i % nics) + " " + fate);
          Transfer t = pair.write(0, 0, 8000, true, 0, kPatience / 6);
          const int32_t status = t.wait();
          REQUIRE_MESSAGE(status == TE_ERR_TRANSPORT, "failure ", i, ": ", name_of(status), ": ", t.message());
        }
        marker.settle();
        CHECK(pair.owner.value(pair.counter) <= static_cast<uint64_t>(failures));
        check_healthy(pair);
      }
}

TEST_CASE("engine: failures in the middle of page lists and of long writes count only what is wholly in memory") {
  for (const char* order : kOrders)
    for (const char* fate : {"clean", "unknown", "partial"})
      for (const uint32_t nics : {1u, 3u})
        for (const uint32_t how : {TE_PAGES_EACH, TE_PAGES_LAST}) {
          CAPTURE(std::string(order));
          CAPTURE(std::string(fate));
          CAPTURE(nics);
          CAPTURE(how);
          Pair pair({"sim", std::string(order) + ",mtu=64", nics, [how](te_settings& s) { s.page_immediates = how; }},
                    kBytes);
          constexpr uint64_t kPages = 60, kPage = 200;
          std::vector<int32_t> order_of_pages(kPages);
          for (int32_t i = 0; i < static_cast<int32_t>(kPages); ++i)
            order_of_pages[static_cast<size_t>(i)] = (i * 7) % static_cast<int32_t>(kPages);
          const te_page_args args{pair.source.region,
                                  pair.remote,
                                  pair.remote_counter,
                                  0,
                                  0,
                                  0,
                                  kPage,
                                  kPage,
                                  kPage,
                                  kPages,
                                  order_of_pages.data(),
                                  order_of_pages.data(),
                                  4,
                                  4};
          Marker marker(pair);
          for (int skip = 0; skip < 70; skip += 9) {
            marker.settle();
            const uint64_t before = pair.owner.value(pair.counter);
            pair.target.poison();
            pair.writer.inject("fail_after " + std::to_string(skip) + " " + fate);
            Transfer t = pair.writer.pages(args, kPatience / 3);
            const int32_t status = t.wait();
            CHECK((status == TE_ERR_TRANSPORT || (status == TE_OK && skip >= static_cast<int>(kPages))));
            CHECK(t.wait_quiesced());
            pair.writer.inject("error_next 0");
            uint64_t whole = 0;
            for (uint64_t i = 0; i < kPages; ++i) whole += pair.landed(i * kPage, i * kPage, kPage) ? 1 : 0;
            marker.settle();  // overwrites the target, which has been looked at
            CHECK(pair.owner.value(pair.counter) - before <= whole);
            if (status == TE_OK) CHECK(pair.owner.counted(pair.counter, before + kPages));
          }
          check_healthy(pair, 10, 5000);
        }
}

TEST_CASE(
    "engine: a noisy fabric: every transfer ends, and the counter is the number of successes and at most the uncertain "
    "ones more") {
  for (int seed = 1; seed <= scaled(6); ++seed) {
    const std::string sim = "error=0.03,busy=0.1,delay=3,mtu=200,seed=" + std::to_string(seed) +
                            (seed % 2 == 0 ? ",reorder=0" : ",reorder=1");
    CAPTURE(std::string(sim));
    Pair pair({"sim", sim, static_cast<uint32_t>(1 + seed % 4), [](te_settings& s) { s.peer_timeout_ns = kPatience; }},
              kBytes);
    uint64_t good = 0, bad = 0;
    for (int i = 0; i < scaled(100); ++i) {
      std::vector<Transfer> transfers;
      for (uint64_t k = 0; k < 8; ++k)
        transfers.push_back(pair.write(k * 8000, k * 8000, 500 * (k + 1), true, 0, kPatience / 3));
      for (uint64_t k = 0; k < 8; ++k) {
        const int32_t status = transfers[k].wait();
        REQUIRE_MESSAGE((status == TE_OK || status == TE_ERR_TRANSPORT), name_of(status), ": ", transfers[k].message());
        (status == TE_OK ? good : bad)++;
        if (status == TE_OK && !pair.landed(k * 8000, k * 8000, 500 * (k + 1)))
          FAIL("a write that was reported done is not in memory");
      }
    }
    REQUIRE(pair.owner.wait(pair.counter, good) == TE_OK);
    CHECK(pair.owner.value(pair.counter) <= good + bad);
    CHECK(bad > 0);
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: a flipped bit is seen") {  // the check of the checks
  Pair pair({"sim", "reorder=0", 1, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  pair.writer.inject("flip_next 1");
  require_ok(pair.write(0, 0, 5000));
  CHECK_FALSE(pair.target.holds(0, pair.source.data(), 5000));
}

TEST_CASE("engine: a NIC that goes down fails what it carries, with its name, and the engine goes on when it returns") {
  for (const char* order : kOrders) {
    CAPTURE(std::string(order));
    Pair pair({"sim", order, 2, {}}, kBytes);
    require_ok(pair.write(0, 0, 10'000));
    pair.writer.inject("nic_down 1");
    bool failed = false;
    for (int i = 0; i < 10; ++i) {
      Transfer t = pair.write(0, 0, 10'000, true, 0, kPatience / 3);
      const int32_t status = t.wait();
      if (status == TE_OK) continue;
      failed = true;
      CHECK((status == TE_ERR_TRANSPORT || status == TE_ERR_PEER_LOST));
      CHECK(t.error().nic == 1);
    }
    CHECK(failed);
    pair.writer.inject("nic_up 1");
    const int32_t connected = pair.writer.connect(pair.peer()).wait();
    CHECK(connected == TE_OK);
    Marker(pair).settle();
    check_healthy(pair, 10);
  }
}

TEST_CASE("engine: a refused registration says so and leaves nothing behind") {
  Player player({"sim", "", 4, {}});
  Memory memory(1000);
  for (int failing = 1; failing <= 4; ++failing) {
    player.inject("register_fail 1");
    te_handle region = 77;
    te_error why{};
    CHECK(te_region_register(player.engine, memory.data(), memory.size, TE_DEVICE_HOST, 0, &region, &why) ==
          TE_ERR_REGISTRATION);
    CHECK(region == 77);
    CHECK(why.nic == 0);
    CHECK(player.stats().regions == 0);
  }
  te_handle region = TE_NONE;
  CHECK(te_region_register(player.engine, memory.data(), memory.size, TE_DEVICE_HOST, 0, &region, &player.error) ==
        TE_OK);
  CHECK(te_region_close(player.engine, region, kPatience, &player.error) == TE_OK);
}

// --- completion queues -------------------------------------------------------------------------------------------------

TEST_CASE("engine: credits keep a small completion queue from running over") {
  for (const char* order : kOrders) {
    CAPTURE(std::string(order));
    // What one peer may have outstanding here: 64 immediates, 32 of the owner's own requests, and control messages.
    const std::string sim = std::string(order) + ",completion_depth=256,depth=32";
    Pair pair({"sim", sim, 2, [](te_settings& s) { s.immediate_window = 64; }}, kBytes);
    const int writes = scaled(2000);
    for (int i = 0; i < writes; ++i) REQUIRE_FALSE(pair.write(0, 0, 16).refused());
    CHECK(pair.owner.counted(pair.counter, static_cast<uint64_t>(writes)));
    CHECK(pair.writer.idle());
    CHECK(stat(pair.owner, "overruns") == 0);
    CHECK(stat(pair.writer, "overruns") == 0);
    CHECK(stat(pair.writer, "tampered") == 0);
  }
}

TEST_CASE("engine: many senders do not overrun a receiver's completion queue") {
  constexpr int kSenders = 12;
  // 12 windows of 256 immediates are three times what the queue holds.
  const std::string sim = "reorder=0,completion_depth=1024,depth=256,receive_depth=4096";
  Player owner({"sim", sim, 1, {}});
  Memory& target = owner.memory(4096);
  const te_handle counter = owner.counter();
  std::vector<std::unique_ptr<Player>> senders;
  std::vector<Transfer> transfers;
  for (int i = 0; i < kSenders; ++i) {
    senders.push_back(std::make_unique<Player>(Setup{"sim", sim, 1, {}}));
    Player& sender = *senders.back();
    sender.memory(4096);
    require_ok(sender.connect(sender.peer(owner)));
    require_ok(sender.write(*sender.memories[0], 0, sender.remote(owner, target), 0, 16,
                            sender.remote_counter(owner, counter)));
  }
  // Held back, then all at once.
  for (auto& sender : senders) sender->inject("pause");
  constexpr int kEach = 300;  // fewer than the sender has slots
  for (auto& sender : senders)
    for (int i = 0; i < kEach; ++i)
      transfers.push_back(sender->write(*sender->memories[0], 0, sender->remote(owner, target), 0, 16,
                                        sender->remote_counter(owner, counter)));
  for (auto& sender : senders) sender->inject("resume");
  CHECK(eventually([&] {
    return stat(owner, "overruns") > 0 ||
           std::all_of(transfers.begin(), transfers.end(), [](Transfer& t) { return t.ended(); });
  }));
  REQUIRE(stat(owner, "overruns") == 0);
  for (Transfer& t : transfers) {
    const int32_t status = t.wait();
    REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
  }
  CHECK(owner.counted(counter, kSenders * (kEach + 1)));
  CHECK(stat(owner, "overruns") == 0);
}

TEST_CASE("engine: receives do not run out, however many peers talk at once") {
  constexpr int kPeers = 10, kMessages = 50;
  const std::string sim = "reorder=1,delay=2,receive_depth=64";  // far fewer than the windows of all peers
  Player owner({"sim", sim, 1, {}});
  std::vector<std::unique_ptr<Player>> peers;
  for (int i = 0; i < kPeers; ++i) peers.push_back(std::make_unique<Player>(Setup{"sim", sim, 1, {}}));
  std::vector<Transfer> transfers;
  for (int m = 0; m < kMessages; ++m)
    for (auto& peer : peers) transfers.push_back(peer->send(peer->peer(owner), &m, sizeof m));
  std::vector<int> next(64, 0);
  for (int got = 0; got < kPeers * kMessages; ++got) {
    te_message message{};
    const int32_t status = te_message_receive(owner.engine, kPatience, &message, &owner.error);
    REQUIRE_MESSAGE(status == TE_OK, "message ", got, ": ", name_of(status));
    int number = -1;
    REQUIRE(message.length == sizeof number);
    std::memcpy(&number, message.data, sizeof number);
    CHECK(number == next[static_cast<size_t>(message.peer)]++);
    te_message_release(owner.engine, &message);
  }
  for (Transfer& t : transfers) CHECK(t.wait() == TE_OK);
}

}  // namespace te::engine_test
