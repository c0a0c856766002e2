// Deadlines, cancel, quiescence and fences: what ends early says so, and "quiesced" is true only when nothing can land any more.
#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kLength = 5000;

Setup short_lived(const std::string& sim, uint32_t nics) {
  return {"sim", sim, nics, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }};
}

}  // namespace

TEST_CASE("engine: a write that cannot land ends at its deadline, is not quiesced, and is once it has drained") {
  for (const char* order : {"reorder=0", "reorder=1"})
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      Pair pair({"sim", order, nics, {}});
      require_ok(pair.write(0, 0, kLength));
      pair.target.poison();
      pair.writer.inject("pause");
      Transfer t = pair.write(0, 0, kLength, true, 0, 30 * kMs);
      CHECK(t.wait() == TE_ERR_TIMEOUT);
      CHECK(t.error().elapsed_ns >= 30 * kMs);
      CHECK(t.error().peer == pair.peer());
      CHECK_FALSE(t.quiesced());
      CHECK_FALSE(t.wait_quiesced(10 * kMs));
      CHECK(pair.target.poisoned(0, kLength));
      pair.writer.inject("resume");
      CHECK(t.wait_quiesced());
      CHECK(t.result() == TE_ERR_TIMEOUT);  // it stays what it was
      CHECK(pair.writer.idle());
      // Later writes are whole and counted exactly once each, whether or not the late one was counted.
      const uint64_t base = pair.owner.value(pair.counter);
      CHECK(base >= 1);
      CHECK(base <= 2);
      for (uint64_t i = 1; i <= 40; ++i) {
        require_ok(pair.write(0, 0, kLength));
        REQUIRE(pair.owner.wait(pair.counter, 1 + i) == TE_OK);
      }
      CHECK(eventually([&] {
        const uint64_t v = pair.owner.value(pair.counter);
        return v == 41 || v == 42;
      }));
    }
}

TEST_CASE("engine: cancel ends a transfer at once and tells the truth about its bytes") {
  for (const uint32_t nics : {1u, 2u}) {
    CAPTURE(nics);
    Pair pair({"sim", "reorder=1", nics, {}});
    require_ok(pair.write(0, 0, kLength));
    pair.writer.inject("pause");
    Transfer stuck = pair.write(0, 0, kLength), other = pair.write(0, 0, kLength);
    REQUIRE(eventually([&] { return pair.writer.peer_info(pair.peer()).in_flight > 0; }));
    stuck.cancel();
    CHECK(stuck.wait() == TE_ERR_CANCELLED);
    CHECK_FALSE(stuck.quiesced());
    CHECK_FALSE(other.ended());
    pair.writer.inject("resume");
    CHECK(other.wait() == TE_OK);
    CHECK(stuck.wait_quiesced());
    stuck.cancel();  // of an ended one: nothing
    CHECK(stuck.result() == TE_ERR_CANCELLED);
    other.cancel();
    CHECK(other.result() == TE_OK);
  }
}

TEST_CASE("engine: a cancel that follows its submission at once is never lost") {
  Pair pair({"sim", "", 1, {}});
  pair.owner.inject("pause");  // nothing is ever connected, so nothing else ends the writes
  int lost = 0;
  for (int i = 0; i < scaled(3000) && lost < 3; ++i) {
    Transfer t = pair.write(0, 0, kLength);
    t.cancel();
    if (t.wait(2 * kSecond * kSlowness) != TE_ERR_CANCELLED) ++lost;
  }
  CHECK(lost == 0);
}

TEST_CASE("engine: cancelling hundreds of writes at random leaves counter and windows right") {
  for (int seed = 1; seed <= scaled(6); ++seed) {
    Pair pair({"sim", "delay=4,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : ""),
               static_cast<uint32_t>(1 + seed % 3), [](te_settings& s) {
                 s.immediate_window = 8;
                 s.assembly_slots = 3;
               }});
    CAPTURE(seed);
    Random random(static_cast<uint64_t>(seed));
    uint64_t good = 0, cancelled = 0;
    for (int round = 0; round < 20; ++round) {
      std::vector<Transfer> transfers;
      for (int i = 0; i < 20; ++i) {
        transfers.push_back(pair.write(0, 0, random.below(8000), true, 0, kPatience / 3));
        if (random.chance(0.4)) transfers[random.below(transfers.size())].cancel();
      }
      for (Transfer& t : transfers) {
        const int32_t status = t.wait();
        REQUIRE_MESSAGE((status == TE_OK || status == TE_ERR_CANCELLED), name_of(status), ": ", t.message());
        CHECK(t.wait_quiesced());
        (status == TE_OK ? good : cancelled)++;
      }
    }
    REQUIRE(pair.owner.wait(pair.counter, good) == TE_OK);
    CHECK(pair.owner.value(pair.counter) <= good + cancelled);
    for (int i = 0; i < 30; ++i) require_ok(pair.write(0, 0, 8000, true, 0, kPatience / 3));
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: a write that waits for a connection or an attachment ends at its deadline too, and is quiesced") {
  Pair pair({"sim", "", 1, {}});
  pair.owner.inject("pause");  // it hears, but its answers do not arrive
  Transfer t = pair.write(0, 0, kLength, true, 0, 30 * kMs);
  CHECK(t.wait() == TE_ERR_TIMEOUT);
  CHECK(t.wait_quiesced(kSecond * kSlowness));  // nothing was ever posted
  Transfer cancelled = pair.write(0, 0, kLength);
  cancelled.cancel();
  CHECK(cancelled.wait() == TE_ERR_CANCELLED);
  CHECK(cancelled.wait_quiesced(kSecond * kSlowness));
  pair.owner.inject("resume");
  require_ok(pair.write(0, 0, kLength));
  CHECK(pair.owner.counted(pair.counter, 1));
}

// The first NIC of the owner is reachable, the second leads to a dead machine: control messages flow while writes over NIC 1 hang. That is
// what a stuck queue looks like; only the owner's fence gives certainty.
te_region_descriptor with_dead_nic(te_region_descriptor d, const Player& dead) {
  d.address.nics[1] = dead.address.nics[0];
  return d;
}

TEST_CASE("engine: a write that stays stuck becomes quiesced by the owner's fence") {
  const auto tune = [](te_settings& s) {
    s.peer_timeout_ns = kShortLife * 2;
    s.shard_bytes = 100;
  };
  Setup setup{"sim", "reorder=1", 2, tune};
  Player writer(setup), owner(setup);
  Memory& source = writer.memory(8192);
  Memory& target = owner.memory(8192);
  Player dead(setup);
  dead.inject("kill");
  const te_handle remote = writer.remote(with_dead_nic(owner.describe(target), dead));
  Transfer t = writer.write(source, 0, remote, 0, 8000, TE_NONE, 0, 50 * kMs);
  CHECK(t.wait() == TE_ERR_TIMEOUT);
  CHECK_FALSE(t.quiesced());
  CHECK(t.wait_quiesced());
  // Short writes go over one NIC at a time; those over NIC 0 work with the new keys.
  bool one_worked = false;
  for (int i = 0; i < 4; ++i)
    one_worked |= writer.write(source, 0, remote, 0, 50, TE_NONE, 0, 200 * kMs).wait() == TE_OK;
  CHECK(one_worked);
  // The stuck request cannot land any more, so it cannot hold up the owner either.
  TE_CHECK_STATUS(owner.close(target, kPatience / 3), TE_OK, owner.error);
}

TEST_CASE("engine: other transfers are not hurt by the fence that one stuck transfer needs") {
  const auto tune = [](te_settings& s) {
    s.peer_timeout_ns = kShortLife * 2;
    s.shard_bytes = 1 << 20;
  };
  Setup setup{"sim", "reorder=1", 2, tune};
  Player writer(setup), owner(setup);
  Memory& source = writer.memory(8192);
  Memory& target = owner.memory(8192);
  const te_handle counter = owner.counter();
  Player dead(setup);
  dead.inject("kill");
  const te_handle remote = writer.remote(with_dead_nic(owner.describe(target), dead)),
                  remote_counter = writer.remote_counter(owner, counter);
  // Writes alternate between the NICs; every second one hangs.
  std::vector<Transfer> first;
  for (int i = 0; i < 2; ++i) first.push_back(writer.write(source, 0, remote, 0, 100, remote_counter, 0, 50 * kMs));
  for (Transfer& t : first) t.wait();
  uint64_t good = 0;
  const int64_t begin = monotonic_ns();
  std::vector<Transfer> stuck;
  while (monotonic_ns() - begin < kShortLife * 3) {
    Transfer t = writer.write(source, 0, remote, 0, 100, remote_counter, 0, 20 * kMs * kSlowness);
    const int32_t status = t.wait();
    REQUIRE_MESSAGE((status == TE_OK || status == TE_ERR_TIMEOUT), name_of(status), ": ", t.message());
    if (status == TE_OK) ++good;
    else stuck.push_back(std::move(t));
  }
  CHECK(good > 0);
  for (Transfer& t : stuck) CHECK(t.wait_quiesced());
  for (Transfer& t : first) CHECK(t.wait_quiesced());
}

// --- fences ------------------------------------------------------------------------------------------------------------

TEST_CASE("engine: fencing a living peer hurts none of its writes") {
  for (const char* sim :
       {"reorder=0,delay=2", "reorder=1,delay=3", "reorder=1,delay=2,keys_enforced=0", "reorder=0,stale_keys_land=1"})
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(sim));
      CAPTURE(nics);
      Pair pair({"sim", std::string(sim) + ",max_write=700", nics, {}});
      require_ok(pair.write(0, 0, kLength));
      const int32_t peer = pair.owner.peer(pair.writer);
      std::vector<Transfer> transfers;
      for (int round = 0; round < scaled(10); ++round) {
        for (int i = 0; i < 10; ++i) transfers.push_back(pair.write(0, 0, kLength));
        Transfer fence = pair.owner.fence(peer);
        const int32_t status = fence.wait();
        REQUIRE_MESSAGE(status == TE_OK, fence.message());
      }
      for (Transfer& t : transfers) {
        const int32_t status = t.wait();
        REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
      }
      CHECK(pair.owner.counted(pair.counter, 1 + transfers.size()));
      CHECK(pair.owner.state(peer) == TE_PEER_CONNECTED);
    }
}

TEST_CASE("engine: fencing a peer that does not answer takes its keys away, and nothing of it lands when it wakes up") {
  for (const char* order : {"reorder=0", "reorder=1,delay=2"})
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(order));
      CAPTURE(nics);
      Pair pair(short_lived(std::string(order) + ",keys_enforced=1", 1), short_lived(order, nics));
      require_ok(pair.write(0, 0, kLength));
      pair.writer.inject("pause");
      std::vector<Transfer> stuck;
      for (uint64_t i = 0; i < 5; ++i) stuck.push_back(pair.write(0, i * kLength, kLength));
      REQUIRE(eventually([&] { return pair.writer.peer_info(pair.peer()).in_flight > 0; }));
      Transfer fence = pair.owner.fence(pair.owner.peer(pair.writer));
      const int32_t status = fence.wait();
      REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", fence.message());
      pair.target.poison();  // the owner reuses its memory
      pair.writer.inject("resume");
      for (Transfer& t : stuck) CHECK(t.wait() < 0);
      for (Transfer& t : stuck) CHECK(t.wait_quiesced());
      CHECK(pair.target.poisoned(0, pair.target.size));
      CHECK(pair.owner.value(pair.counter) == 1);
      // They find each other again, with the same handles.
      const bool again = eventually([&] {
        Transfer t = pair.write(0, 0, kLength, true, 0, kPatience / 8);
        const int32_t outcome = t.wait();
        if (outcome != TE_OK) MESSAGE("after the fence: ", name_of(outcome), ": ", t.message());
        return outcome == TE_OK;
      });
      REQUIRE(again);
      CHECK(pair.landed(0, 0, kLength));
    }
}

TEST_CASE(
    "engine: where the network enforces no keys, the fence of a silent peer tells the truth: not certain until it is "
    "proven dead") {
  for (const char* network : {"keys_enforced=0", "stale_keys_land=1"}) {
    CAPTURE(std::string(network));
    Pair pair(short_lived(network, 1));
    require_ok(pair.write(0, 0, kLength));
    pair.writer.inject("pause");
    Transfer stuck = pair.write(0, 0, kLength);
    const int32_t peer = pair.owner.peer(pair.writer);
    CHECK(pair.owner.fence(peer, 2 * kShortLife).wait() == TE_ERR_TIMEOUT);
    pair.writer.inject("kill");
    Transfer fence = pair.owner.fence(peer);
    const int32_t status = fence.wait();
    CHECK_MESSAGE(status == TE_OK, name_of(status), ": ", fence.message());
    CHECK(pair.owner.state(peer) == TE_PEER_LOST);
    TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
  }
}

TEST_CASE("engine: fencing a killed peer ends within the bound, and others keep writing") {
  for (const char* network : {"keys_enforced=1", "keys_enforced=0", "stale_keys_land=1"}) {
    CAPTURE(std::string(network));
    Pair pair(short_lived(network, 2));
    Player third(short_lived(network, 2));
    Memory& source = third.memory(8192);
    const te_handle remote = third.remote(pair.owner, pair.target);
    require_ok(third.write(source, 0, remote, 0, 100));
    require_ok(pair.write(0, 0, kLength));
    pair.writer.inject("pause");
    Transfer stuck = pair.write(0, 0, kLength);
    REQUIRE(eventually([&] { return pair.writer.peer_info(pair.peer()).in_flight > 0; }));
    pair.writer.inject("kill");
    const int64_t begin = monotonic_ns();
    Transfer fence = pair.owner.fence(pair.owner.peer(pair.writer));
    while (!fence.ended()) {
      Transfer t = third.write(source, 0, remote, 0, 100);
      const int32_t status = t.wait();
      REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
      REQUIRE(monotonic_ns() - begin < kPatience);
    }
    CHECK(fence.wait() == TE_OK);
    require_ok(third.write(source, 0, remote, 0, 100));
  }
}

TEST_CASE("engine: a fence of a peer without any session is done at once") {
  Player a({"sim", "", 1, {}}), b({"sim", "", 1, {}});
  CHECK(a.fence(a.peer(b)).wait() == TE_OK);
}

TEST_CASE("engine: closing a region while its holder is being fenced ends both") {
  for (int round = 0; round < scaled(10); ++round) {
    const bool killed = round % 2 == 0;
    CAPTURE(killed);
    Pair pair(short_lived("reorder=1,seed=" + std::to_string(round + 1), 2));
    require_ok(pair.write(0, 0, kLength));
    if (killed) pair.writer.inject("kill");
    Transfer fence = pair.owner.fence(pair.owner.peer(pair.writer));
    int32_t closed = TE_AGAIN;
    std::thread closer([&] { closed = pair.owner.close(pair.target); });
    CHECK(fence.wait() == TE_OK);
    closer.join();
    CHECK(closed == TE_OK);
    CHECK(pair.owner.stats().regions == 0);
  }
}

}  // namespace te::engine_test
