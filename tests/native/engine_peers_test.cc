// Peers that die, restart, leave, return, meet head-on or do not exist: every operation ends once, with the right name, within the bound.
#include <atomic>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kLength = 3000;

Setup short_lived(const std::string& sim, uint32_t nics = 1) {
  return {"sim", sim, nics, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }};
}

Setup named(const std::string& name, const std::string& sim = "", uint32_t nics = 1) {
  return short_lived("address=" + name + (sim.empty() ? "" : "," + sim), nics);
}

std::string hex(const te_address& address) {
  std::string text;
  for (const uint8_t byte : address.identity) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

TEST_CASE(
    "engine: when a peer dies all work towards it fails once with PEER_LOST within the bound, and nothing else is "
    "touched") {
  for (const char* order : {"reorder=0", "reorder=1,delay=2"})
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      const Setup setup = short_lived(order, nics);
      Pair pair(setup);
      Player third(setup);
      Memory& other = third.memory(8192);
      const te_handle to_third = pair.writer.remote(third, other);
      require_ok(pair.write(0, 0, kLength));
      require_ok(pair.writer.write(pair.source, 0, to_third, 0, 100));
      pair.owner.inject("kill");
      const int64_t begin = monotonic_ns();
      std::vector<Transfer> doomed;
      for (int i = 0; i < 30; ++i) doomed.push_back(pair.write(0, 0, kLength));
      doomed.push_back(pair.writer.send(pair.peer(), "x", 1));
      while (!doomed[0].ended()) {  // the third is served all the while
        Transfer t = pair.writer.write(pair.source, 0, to_third, 0, 100);
        const int32_t status = t.wait();
        REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
      }
      for (Transfer& t : doomed) {
        CHECK(t.wait() == TE_ERR_PEER_LOST);
        CHECK(t.error().peer == pair.peer());
        CHECK_FALSE(t.message().empty());
      }
      CHECK(monotonic_ns() - begin < 3 * kShortLife + kSecond * kSlowness);
      CHECK(pair.writer.state(pair.peer()) == TE_PEER_LOST);
      require_ok(pair.writer.write(pair.source, 0, to_third, 0, 100));
    }
}

TEST_CASE("engine: slots of operations towards dead peers serve the living") {
  const Setup setup{"sim", "reorder=1", 1, [](te_settings& s) {
                      s.peer_timeout_ns = kShortLife;
                      s.operations = 16;
                    }};
  for (int round = 0; round < 3; ++round) {
    Pair pair(setup);
    require_ok(pair.write(0, 0, kLength));
    pair.owner.inject("kill");
    std::vector<Transfer> doomed;
    for (int i = 0; i < 16; ++i) doomed.push_back(pair.write(0, 0, kLength));
    for (Transfer& t : doomed) REQUIRE(t.wait() == TE_ERR_PEER_LOST);
    Player living(setup);
    Memory& target = living.memory(8192);
    const te_handle remote = pair.writer.remote(living, target);
    for (int i = 0; i < 100; ++i) require_ok(pair.writer.write(pair.source, 0, remote, 0, kLength));
  }
}

TEST_CASE("engine: dead peers one after the other do not use up the slab") {
  const Setup setup{"sim", "reorder=1", 1, [](te_settings& s) {
                      s.peer_timeout_ns = 60 * kMs * kSlowness;
                      s.operations = 16;
                      s.default_timeout_ns = kPatience / 3;
                    }};
  Player writer(setup);
  Memory& source = writer.memory(4096);
  for (int round = 0; round < 6; ++round) {
    CAPTURE(round);
    Player owner(setup);
    Memory& target = owner.memory(4096);
    const te_handle remote = writer.remote(owner, target);
    require_ok(writer.write(source, 0, remote, 0, 100));
    owner.inject("kill");
    std::vector<Transfer> doomed;
    for (int i = 0; i < 10; ++i) doomed.push_back(writer.write(source, 0, remote, 0, 100));
    for (Transfer& t : doomed) {
      const int32_t status = t.wait();
      REQUIRE_MESSAGE(status == TE_ERR_PEER_LOST, name_of(status), ": ", t.message());
    }
  }
}

TEST_CASE("engine: a peer whose death the network reports is lost at once") {
  const Setup setup{"sim", "reports_dead_peer=1", 2, {}};  // the peer time-out of the fixture is long
  Pair pair(setup);
  require_ok(pair.write(0, 0, kLength));
  pair.owner.inject("kill_loud");
  const int64_t begin = monotonic_ns();
  CHECK(pair.write(0, 0, kLength).wait() == TE_ERR_PEER_LOST);
  CHECK(monotonic_ns() - begin < 5 * kSecond);
}

TEST_CASE("engine: whoever waits for a counter and names a peer learns of its loss") {
  const Setup setup = short_lived("reorder=1");
  Pair pair(setup);
  require_ok(pair.write(0, 0, kLength));
  const int32_t peer = pair.owner.peer(pair.writer);
  Transfer named_wait = pair.owner.reached(pair.counter, 5, kPatience, {peer});
  Transfer other_wait = pair.owner.reached(pair.counter, 5, kPatience);
  std::atomic<int32_t> waited{TE_OK};
  std::string text;
  std::thread waiter([&] {
    te_error why{};
    waited = te_counter_wait(pair.owner.engine, pair.counter, 5, kPatience, &peer, 1, &why);
    text = why.message;
  });
  pair.writer.inject("kill");
  waiter.join();
  CHECK(waited == TE_ERR_PEER_LOST);
  CHECK(text.find("1/5") != std::string::npos);
  CHECK(named_wait.wait() == TE_ERR_PEER_LOST);
  CHECK(named_wait.error().peer == peer);
  CHECK(named_wait.message().find("1/5") != std::string::npos);
  CHECK_FALSE(other_wait.ended());
  // What has arrived already is not lost by the loss.
  CHECK(pair.owner.wait(pair.counter, 1, kPatience, {peer}) == TE_OK);
  CHECK(pair.owner.reached(pair.counter, 1, kPatience, {peer}).wait() == TE_OK);
  CHECK(pair.owner.wait(pair.counter, 2, kPatience, {peer}) == TE_ERR_PEER_LOST);
}

TEST_CASE("engine: a loss is told once as an event") {
  const Setup setup = short_lived("reorder=1");
  Pair pair(setup);
  require_ok(pair.write(0, 0, kLength));
  pair.owner.inject("kill");
  int lost = 0;
  REQUIRE(eventually([&] {
    te_event events[8];
    uint32_t count = 0;
    te_error why{};
    const int32_t status = te_events_fetch(pair.writer.engine, 20 * kMs, events, 8, &count, &why);
    for (uint32_t i = 0; status == TE_OK && i < count; ++i)
      if (events[i].kind == TE_EVENT_PEER_LOST && events[i].peer == pair.peer()) ++lost;
    return lost > 0;
  }));
  te_event events[8];
  uint32_t count = 0;
  CHECK(te_events_fetch(pair.writer.engine, 50 * kMs, events, 8, &count, &pair.writer.error) == TE_AGAIN);
  CHECK(lost == 1);
}

TEST_CASE("engine: an idle connection stays, however long nobody says anything") {
  const Setup setup{"sim", "reorder=1", 2, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }};
  Pair pair(setup);
  require_ok(pair.write(0, 0, kLength));
  const int64_t begin = monotonic_ns();
  REQUIRE(eventually([&] { return monotonic_ns() - begin > kShortLife * 2; }));
  CHECK(pair.writer.state(pair.peer()) == TE_PEER_CONNECTED);
  CHECK(pair.owner.state(pair.owner.peer(pair.writer)) == TE_PEER_CONNECTED);
  require_ok(pair.write(0, 0, kLength));
}

TEST_CASE("engine: the shortest peer time-out that is allowed notices a death too") {
  const Setup setup{"sim", "reorder=1", 1, [](te_settings& s) { s.peer_timeout_ns = 100 * kMs; }};
  Pair pair(setup);
  require_ok(pair.write(0, 0, kLength));
  pair.owner.inject("kill");
  CHECK(eventually([&] { return pair.writer.state(pair.peer()) == TE_PEER_LOST; }, 5 * kSecond));
}

// --- restarts ----------------------------------------------------------------------------------------------------------

TEST_CASE("engine: after a restart at the same address old handles give PEER_RESTARTED and new ones work") {
  for (const bool silent : {true, false})
    for (const bool same_identity : {true, false})
      for (const bool noticed : {true, false}) {
        if ((silent != same_identity) == noticed) continue;  // half of the combinations, each pair of values among them
        CAPTURE(silent);
        CAPTURE(same_identity);
        CAPTURE(noticed);
        const std::string name =
            "restarting." + std::to_string(silent) + std::to_string(same_identity) + std::to_string(noticed);
        Setup setup = named(name);
        if (same_identity)
          setup.tune = [](te_settings& s) {
            s.peer_timeout_ns = kShortLife;
            s.identity[0] = 42;
          };
        Player writer(short_lived(""));
        Memory& source = writer.memory(8192);
        auto first = std::make_unique<Player>(setup);
        Memory& old_target = first->memory(8192);
        const te_handle old_remote = writer.remote(*first, old_target);
        require_ok(writer.write(source, 0, old_remote, 0, kLength));
        const int32_t old_peer = writer.peer(*first);
        first->inject(silent ? "kill" : "kill_loud");
        if (noticed)
          REQUIRE(eventually([&] {
            // A loud death is noticed when something is sent.
            writer.write(source, 0, old_remote, 0, 1, TE_NONE, 0, kShortLife).wait();
            return writer.state(old_peer) == TE_PEER_LOST;
          }));
        Player second(setup);
        Memory& target = second.memory(8192);
        CHECK(second.address.generation != first->address.generation);
        // Whatever is tried with the old handle never reaches the successor, and soon has the right name.
        REQUIRE(eventually([&] {
          Transfer t = writer.write(source, 0, old_remote, 0, kLength, TE_NONE, 0, kPatience / 4);
          const int32_t status = t.wait();
          // The first may still meet the successor's NIC, which refuses the key.
          if (status != TE_ERR_PEER_LOST && status != TE_ERR_PEER_RESTARTED && status != TE_ERR_REMOTE_ACCESS)
            MESSAGE(name_of(status), ": ", t.message());
          return status == TE_ERR_PEER_RESTARTED;
        }));
        CHECK(writer.connect(old_peer).wait() == TE_ERR_PEER_RESTARTED);
        CHECK(writer.send(old_peer, "x", 1).wait() == TE_ERR_PEER_RESTARTED);
        CHECK(target.poisoned(0, target.size));
        const int32_t new_peer = writer.peer(second);
        CHECK(new_peer != old_peer);
        const te_handle remote = writer.remote(second, target);
        require_ok(writer.write(source, 0, remote, 0, kLength));
        CHECK(std::memcmp(source.data(), target.data(), kLength) == 0);
        CHECK(writer.write(source, 0, old_remote, 0, kLength).wait() == TE_ERR_PEER_RESTARTED);
        CHECK(writer.state(new_peer) == TE_PEER_CONNECTED);
      }
}

TEST_CASE("engine: a restarted peer that speaks first is known as new at once") {
  Player owner(short_lived("", 2));
  Memory& target = owner.memory(8192);
  const te_handle counter = owner.counter();
  std::unique_ptr<Player> writer;
  int32_t last_peer = -1;
  for (int generation = 0; generation < 5; ++generation) {
    if (writer) writer->inject("kill");
    std::unique_ptr<Player> next = std::make_unique<Player>(named("talker", "", 2));
    Memory& source = next->memory(8192);
    require_ok(next->write(source, 0, next->remote(owner, target), 0, kLength, next->remote_counter(owner, counter)));
    CHECK(owner.counted(counter, static_cast<uint64_t>(generation) + 1));
    if (last_peer >= 0) {
      const uint32_t state = owner.state(last_peer);
      CHECK((state == TE_PEER_LOST || state == TE_PEER_CLOSED));
    }
    last_peer = owner.peer(*next);
    writer = std::move(next);
  }
}

TEST_CASE("engine: peers that come and go with new descriptors do not run the tables out") {
  Player writer({"sim", "", 1, [](te_settings& s) {
                   s.max_regions = 8;
                   s.max_counters = 8;
                   s.max_peers = 64;
                 }});
  Memory& source = writer.memory(4096);
  for (int generation = 0; generation < 30; ++generation) {
    CAPTURE(generation);
    Player owner({"sim", "address=visitor", 1, {}});
    Memory& target = owner.memory(4096);
    const te_region_descriptor d = owner.describe(target);
    te_handle remote = TE_NONE;
    TE_CHECK_STATUS(te_remote_region(writer.engine, &d, &remote, &writer.error), TE_OK, writer.error);
    if (remote == TE_NONE) break;
    require_ok(writer.write(source, 0, remote, 0, 100));
  }
}

// --- leaving and returning ---------------------------------------------------------------------------------------------

TEST_CASE("engine: disconnect and connect again, from either side, hundreds of times") {
  for (const char* sim : {"reorder=0", "reorder=1,delay=3"})
    for (const uint32_t nics : {1u, 2u}) {
      CAPTURE(std::string(sim));
      CAPTURE(nics);
      Pair pair({"sim", sim, nics, {}});
      const int rounds = scaled(60);
      for (int round = 0; round < rounds; ++round) {
        CAPTURE(round);
        Transfer t = pair.write(0, 0, kLength, true, 0, kPatience / 3);
        const int32_t written = t.wait();
        REQUIRE_MESSAGE(written == TE_OK, name_of(written), ": ", t.message());
        REQUIRE(pair.owner.counted(pair.counter, static_cast<uint64_t>(round) + 1));
        Transfer d =
            round % 2 == 0 ? pair.writer.disconnect(pair.peer()) : pair.owner.disconnect(pair.owner.peer(pair.writer));
        const int32_t status = d.wait();
        REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", d.message());
        // The other side hears of it; a write that meets it head-on may fail as lost.
        REQUIRE(eventually([&] {
          return pair.writer.state(pair.peer()) != TE_PEER_CONNECTED &&
                 pair.owner.state(pair.owner.peer(pair.writer)) != TE_PEER_CONNECTED;
        }));
      }
      CHECK(pair.owner.stats().stray_immediates == 0);
      CHECK(pair.owner.close(pair.target) == TE_OK);
    }
}

TEST_CASE("engine: disconnecting fails what is under way with CANCELLED, once, and frees what the peer held") {
  Pair pair({"sim", "reorder=1,delay=3", 2, {}});
  require_ok(pair.write(0, 0, kLength));
  std::vector<Transfer> transfers;
  for (int i = 0; i < 40; ++i) transfers.push_back(pair.write(0, 0, kLength));
  Transfer d = pair.writer.disconnect(pair.peer());
  CHECK(d.wait() == TE_OK);
  for (Transfer& t : transfers) {
    const int32_t status = t.wait();
    CHECK((status == TE_OK || status == TE_ERR_CANCELLED));
    CHECK(t.wait_quiesced());
  }
  CHECK(pair.writer.idle());
  TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
  CHECK(pair.writer.disconnect(pair.peer()).wait() == TE_OK);  // once more
}

TEST_CASE("engine: what was written before a disconnect is counted, whatever NIC it came over") {
  for (const bool close : {false, true})
    for (int seed = 1; seed <= scaled(15); ++seed) {
      CAPTURE(close);
      CAPTURE(seed);
      const std::string sim = "delay=2,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : "");
      Pair pair({"sim", sim, static_cast<uint32_t>(2 + seed % 4), {}});
      std::vector<Transfer> transfers;
      for (uint64_t i = 0; i < 100; ++i) transfers.push_back(pair.write(0, 0, i % 3 == 0 ? kLength : 100));
      for (Transfer& t : transfers) REQUIRE(t.wait() == TE_OK);
      if (close) REQUIRE(pair.writer.close() == TE_OK);
      else REQUIRE(pair.writer.disconnect(pair.peer()).wait() == TE_OK);
      const bool counted = eventually([&] { return pair.owner.value(pair.counter) == 100; }, 2 * kSecond * kSlowness);
      REQUIRE_MESSAGE(counted, pair.owner.value(pair.counter),
                      " of 100, strays: ", pair.owner.stats().stray_immediates);
    }
}

TEST_CASE("engine: both disconnect at once, and both end") {
  for (int seed = 1; seed <= scaled(15); ++seed) {
    CAPTURE(seed);
    Pair pair({"sim", "delay=4,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : ""), 2, {}});
    require_ok(pair.write(0, 0, kLength));
    Transfer one = pair.writer.disconnect(pair.peer()), two = pair.owner.disconnect(pair.owner.peer(pair.writer));
    CHECK(one.wait() == TE_OK);
    CHECK(two.wait() == TE_OK);
    require_ok(pair.write(0, 0, kLength, true, 0, kPatience / 2));
    CHECK(pair.owner.counted(pair.counter, 2));
  }
}

TEST_CASE("engine: connects that cross end in one session, and work in both directions at once") {
  for (int seed = 1; seed <= scaled(25); ++seed) {
    CAPTURE(seed);
    const std::string sim = "delay=" + std::to_string(seed % 8) + ",busy=0.2,seed=" + std::to_string(seed) +
                            (seed % 3 == 0 ? ",reorder=0" : "");
    Setup setup{"sim", sim, static_cast<uint32_t>(1 + seed % 3), {}};
    Player a(setup), b(setup);
    Memory& in_a = a.memory(8192);
    Memory& in_b = b.memory(8192);
    const te_handle counter_a = a.counter(), counter_b = b.counter();
    const int32_t b_of_a = a.peer(b), a_of_b = b.peer(a);
    const te_handle to_b = a.remote(b, in_b), to_a = b.remote(a, in_a);
    const te_handle tick_b = a.remote_counter(b, counter_b), tick_a = b.remote_counter(a, counter_a);
    std::vector<Transfer> transfers;
    transfers.push_back(a.connect(b_of_a));
    transfers.push_back(b.connect(a_of_b));
    for (int i = 0; i < 10; ++i) {
      transfers.push_back(a.write(in_a, 0, to_b, 0, kLength, tick_b));
      transfers.push_back(b.write(in_b, 4096, to_a, 4096, kLength, tick_a));
    }
    for (Transfer& t : transfers) {
      const int32_t status = t.wait();
      REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
    }
    CHECK(a.counted(counter_a, 10));
    CHECK(b.counted(counter_b, 10));
    CHECK(a.state(b_of_a) == TE_PEER_CONNECTED);
    CHECK(b.state(a_of_b) == TE_PEER_CONNECTED);
    CHECK(a.stats().stray_immediates + b.stats().stray_immediates == 0);
  }
}

// A write that arrives while its owner has given the writer up finds no counter: it is done (its bytes are there), not counted, and the
// owner notes a stray immediate. From the new session on everything is counted.
TEST_CASE("engine: a session that only one side has lost is made anew, and no write is lost without a trace") {
  for (const char* network : {"keys_enforced=1", "keys_enforced=0"})
    for (int seed = 1; seed <= scaled(4); ++seed) {
      CAPTURE(std::string(network));
      CAPTURE(seed);
      Pair pair(short_lived(
          std::string(network) + ",delay=2,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : ""), 2));
      uint64_t done = 0, tried = 0;
      const auto write = [&] {
        const int32_t status = pair.write(0, 0, kLength, true, 0, kPatience / 8).wait();
        ++tried;
        if (status == TE_OK) ++done;
        return status == TE_OK;
      };
      REQUIRE(eventually(write));  // on a busy machine so short a patience may already have ended a session
      // Silence until both, or one of the two, have given up.
      pair.writer.inject("partition " + hex(pair.owner.address));
      REQUIRE(eventually([&] {
        return pair.writer.state(pair.peer()) == TE_PEER_LOST ||
               pair.owner.state(pair.owner.peer(pair.writer)) == TE_PEER_LOST;
      }));
      pair.writer.inject("heal");
      REQUIRE(eventually(write));
      for (int i = 0; i < 20; ++i) write();
      REQUIRE(eventually(write));
      const auto seen = [&] { return pair.owner.value(pair.counter) + pair.owner.stats().stray_immediates; };
      const bool counted = eventually([&] { return seen() >= done; }, kPatience / 8);
      CHECK_MESSAGE(counted, pair.owner.value(pair.counter), " counted, ", done, " reported done");
      CHECK(pair.owner.value(pair.counter) <= tried);
    }
}

TEST_CASE("engine: connecting to nobody ends as PEER_UNREACHABLE in time") {
  const auto tune = [](te_settings& s) { s.connect_timeout_ns = 100 * kMs; };
  Player player({"sim", "", 2, tune});
  Memory& source = player.memory(4096);
  for (const bool was_there : {false, true}) {
    CAPTURE(was_there);
    te_region_descriptor d{};
    {
      Player gone({"sim", "", 2, {}});
      Memory& target = gone.memory(4096);
      d = gone.describe(target);
    }
    if (!was_there)
      for (te_nic_address& nic : d.address.nics) {
        nic.length = 10;
        std::memcpy(nic.bytes, "sim:nobody", 10);
      }
    const int64_t begin = monotonic_ns();
    Transfer connect = player.connect(player.peer(d.address));
    Transfer write = player.write(source, 0, player.remote(d), 0, 100);
    Transfer send = player.send(player.peer(d.address), "x", 1);
    CHECK(connect.wait() == TE_ERR_PEER_UNREACHABLE);
    CHECK(write.wait() == TE_ERR_PEER_UNREACHABLE);
    CHECK(send.wait() == TE_ERR_PEER_UNREACHABLE);
    CHECK(write.quiesced());
    CHECK(monotonic_ns() - begin >= 90 * kMs);
    CHECK(monotonic_ns() - begin < 5 * kSecond);
    CHECK(player.connect(player.peer(d.address)).wait() == TE_ERR_PEER_UNREACHABLE);  // and again
  }
  CHECK(player.idle());
}

namespace {

void check_closed_engine_is_unreachable(const char* transport) {
  if (!usable(transport)) return;
  const auto tune = [](te_settings& s) { s.connect_timeout_ns = 200 * kMs; };
  Player player({transport, "", 1, tune});
  Memory& source = player.memory(4096);
  te_region_descriptor d{};
  {
    Player gone({transport, "", 1, {}});
    Memory& target = gone.memory(4096);
    d = gone.describe(target);
  }
  Transfer write = player.write(source, 0, player.remote(d), 0, 100);
  const int32_t status = write.wait();
  CHECK_MESSAGE((status == TE_ERR_PEER_UNREACHABLE || status == TE_ERR_PEER_LOST), name_of(status), ": ",
                write.message());
  Player living({transport, "", 1, {}});
  Memory& target = living.memory(4096);
  require_ok(player.write(source, 0, player.remote(living, target), 0, 100));
  CHECK(std::memcmp(source.data(), target.data(), 100) == 0);
}

}  // namespace

TEST_CASE("engine: over tcp connecting to a closed engine ends as PEER_UNREACHABLE in time") {
  check_closed_engine_is_unreachable("tcp");
}
TEST_CASE("engine: over shm connecting to a closed engine ends as PEER_UNREACHABLE in time") {
  check_closed_engine_is_unreachable("shm");
}

TEST_CASE("engine: more peers than max_peers allows for is a typed error") {
  Player player({"sim", "", 1, [](te_settings& s) { s.max_peers = 1; }});
  te_address address = player.address;
  int32_t status = TE_OK;
  int known = 0;
  for (int i = 0; i < 1000 && status == TE_OK; ++i) {
    ++address.generation;
    int32_t index = -7;
    status = te_peer(player.engine, &address, &index, &player.error);
    if (status == TE_OK) ++known;
    else CHECK(index == -7);
  }
  CHECK(status == TE_ERR_EXHAUSTED);
  CHECK(known >= 1);
}

TEST_CASE("engine: a closing engine is told to its peers: their work fails at once, not after silence") {
  Pair pair({"sim", "reorder=1,delay=1", 2, {}});  // the peer time-out is long
  require_ok(pair.write(0, 0, kLength));
  const int64_t begin = monotonic_ns();
  CHECK(pair.owner.close() == TE_OK);
  const int32_t status = pair.write(0, 0, kLength, true, 0, 500 * kMs).wait();
  CHECK_MESSAGE((status == TE_ERR_PEER_LOST || status == TE_ERR_TIMEOUT), name_of(status));
  CHECK(pair.writer.state(pair.peer()) != TE_PEER_CONNECTED);
  CHECK(monotonic_ns() - begin < 10 * kSecond);
}

}  // namespace te::engine_test
