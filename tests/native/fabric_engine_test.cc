// Engines over efa with the stand-in for libfabric: what EFA does not promise, and what it does wrong.
#include "tests/native/engine_support.h"

#if __has_include(<rdma/fabric.h>)
#include "tests/native/fabric_support.h"

namespace te::engine_test {
namespace {

using test::EfaFabric;

Setup efa(uint32_t nics, int first_device, std::function<void(te_settings&)> tune = {}) {
  return {"efa", "", nics, std::move(tune), first_device};
}

// Messages, of one fragment and of several.
void converse(Pair& pair, int count) {
  const int32_t peer = pair.peer();
  std::vector<Transfer> transfers;
  for (int i = 0; i < count; ++i) {
    const std::string text = std::string(static_cast<size_t>(i * 97 % 20'000), 'x') + std::to_string(i);
    transfers.push_back(pair.writer.send(peer, text.data(), text.size()));
  }
  for (Transfer& transfer : transfers) require_ok(std::move(transfer));
}

}  // namespace

TEST_CASE("efa engine: nothing is lost or doubled whatever the device's limits, order and moods") {
  for (const char* options : {
           "steps=1,pieces=31",
           "unsolicited=1,eagain=0.2",
           "tx_size=8,eagain=0.1",
           "max_rma=1000,max_msg=4096",
           "reorder=0",
           "wait_fd=0",
           "direct=0,eagain=0.1",
           "tx_size=16,max_rma=700,unsolicited=1,pieces=7",
           "stale=0.5,ghosts=0.5,eagain=0.05",
       }) {
    CAPTURE(std::string(options));
    EfaFabric fabric(options);
    for (const uint32_t nics : {1u, 3u}) {
      Pair pair(efa(nics, 0), efa(nics, 8));
      exchange(pair, scaled(4));
      converse(pair, scaled(50));
      exchange(pair, 1);
      CHECK(pair.owner.stats().stray_immediates == 0);
    }
    CHECK(fabric.statistic("rnr") == 0);           // the credits
    CHECK(fabric.statistic("unknown_peer") == 0);  // the acquaintance on every NIC
    CHECK(fabric.statistic("error_completions") == 0);
  }
}

TEST_CASE("efa engine: an engine that disconnects from itself while it connects can be used again") {
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(scaled(20)); ++seed) {
    EfaFabric fabric("seed=" + std::to_string(seed));
    Player player(efa(2, 0));
    Memory& source = player.memory(4096);
    Memory& target = player.memory(4096);
    const te_handle remote = player.remote(player, target);
    const te_handle counter = player.counter(), notify = player.remote_counter(player, counter);
    for (int round = 0; round < 3; ++round) {
      std::vector<Transfer> transfers;
      for (int i = 0; i < 20; ++i) transfers.push_back(player.write(source, 0, remote, 0, 100, notify));
      require_ok(player.disconnect(player.peer(player)));
      require_ok(player.write(source, 0, remote, 0, 100, notify));
    }
  }
}

TEST_CASE("efa engine: peers come and go while requests to them lose their addresses") {
  EfaFabric fabric("stale=0.5,ghosts=0.5");
  Player hub(efa(2, 0));
  Memory& target = hub.memory(1 << 16);
  const te_handle counter = hub.counter();
  uint64_t counted = 0;
  for (int round = 0; round < scaled(20); ++round) {
    Player spoke(efa(2, 8));
    Memory& source = spoke.memory(4096);
    const te_handle remote = spoke.remote(hub, target), notify = spoke.remote_counter(hub, counter);
    for (int again = 0; again < 2; ++again) {
      std::vector<Transfer> transfers;
      for (uint64_t i = 0; i < 20; ++i) transfers.push_back(spoke.write(source, 0, remote, i * 512, 500, notify));
      for (Transfer& transfer : transfers) require_ok(std::move(transfer));
      counted += 20;
      REQUIRE(hub.counted(counter, counted));
      const int64_t begin = monotonic_ns();
      require_ok(spoke.disconnect(spoke.peer(hub)));
      CHECK(monotonic_ns() - begin < 2 * kSecond * kSlowness);
    }
  }
  CHECK(hub.stats().stray_immediates == 0);
}

TEST_CASE("efa engine: a region that the device does not register is a typed error") {
  EfaFabric fabric;
  Player player(efa(1, 0));
  Memory memory(4096);
  REQUIRE(fabric.command("reg_fail 1") == 0);
  CHECK(te_region_register(player.engine, memory.data(), memory.size, TE_DEVICE_HOST, 0, &memory.region,
                           &player.error) == TE_ERR_REGISTRATION);
  CHECK(player.error.provider_status == ENOMEM);
  CHECK(std::string(player.error.message).find("efa") != std::string::npos);
}

TEST_CASE("efa engine: a request that the device fails ends its transfer and nothing else") {
  EfaFabric fabric;
  for (const int status : {1, 2, 7, 8, 10, 13}) {
    CAPTURE(status);
    Pair pair(efa(2, 0), efa(2, 8));
    exchange(pair, 1);
    REQUIRE(fabric.command("error 1 " + std::to_string(status)) == 0);
    Transfer failed = pair.write(0, 0, 100);
    const int32_t why = failed.wait();
    CHECK(why != TE_OK);
    CHECK(why != TE_AGAIN);
    CHECK(failed.error().provider_status == TE_STATUS_EFA + status);
    REQUIRE(eventually([&] { return pair.write(0, 0, 100, false).wait() == TE_OK; }));
  }
}

TEST_CASE("efa engine: an engine that falls silent is a lost peer, to itself and to others") {
  EfaFabric fabric("retry_ticks=200");
  const auto tune = [](te_settings& s) { s.peer_timeout_ns = kShortLife; };
  Pair pair(efa(1, 0, tune), efa(1, 8, tune));
  exchange(pair, 1);
  REQUIRE(fabric.command("silence -1") == 0);
  Transfer lost = pair.write(0, 0, 100);
  CHECK(lost.wait() == TE_ERR_PEER_LOST);
  REQUIRE(eventually([&] { return pair.writer.state(pair.peer()) == TE_PEER_LOST; }));
}

TEST_CASE("efa engine: a device that is lost ends what it carried, and the others go on") {
  EfaFabric fabric("retry_ticks=200");
  const auto tune = [](te_settings& s) { s.peer_timeout_ns = 10 * kShortLife; };
  Pair pair(efa(3, 0, tune), efa(3, 8, tune));
  exchange(pair, 1);
  REQUIRE(fabric.command("lose 1") == 0);
  REQUIRE(eventually([&] { return pair.writer.nic_info(1).up == 0; }));
  REQUIRE(eventually([&] { return pair.write(0, 0, 100, false).wait() == TE_OK; }));
  CHECK(pair.writer.state(pair.peer()) == TE_PEER_CONNECTED);
}

TEST_CASE("efa engine: regions come and go in other threads while bytes flow") {
  EfaFabric fabric("eagain=0.05");
  Pair pair(efa(2, 0), efa(2, 8));
  std::atomic<bool> done{false};
  std::thread registrar([&] {
    std::vector<uint8_t> memory(1 << 16);
    while (!done) {
      te_handle region = TE_NONE;
      te_error why{};
      if (te_region_register(pair.owner.engine, memory.data(), memory.size(), TE_DEVICE_HOST, 0, &region, &why) !=
          TE_OK)
        break;
      if (te_region_close(pair.owner.engine, region, kPatience, &why) != TE_OK) break;
    }
  });
  exchange(pair, scaled(10));
  done = true;
  registrar.join();
}

TEST_CASE("efa engine: sixty-four peers at once, whose immediates never find a receive queue empty") {
  EfaFabric fabric;
  const auto tune = [](te_settings& s) {
    s.max_peers = 128;
    s.operations = 64;
    s.max_regions = s.max_counters = 16;
  };
  Player hub(efa(1, 0, tune));
  Memory& target = hub.memory(1 << 16);
  const te_handle counter = hub.counter();
  std::vector<std::unique_ptr<Player>> spokes;
  std::vector<Transfer> transfers;
  const int count = scaled(64), each = 40;
  for (int i = 0; i < count; ++i) {
    spokes.push_back(std::make_unique<Player>(efa(1, 1 + i % 15, tune)));
    Player& spoke = *spokes.back();
    Memory& source = spoke.memory(256);
    const te_handle remote = spoke.remote(hub, target), notify = spoke.remote_counter(hub, counter);
    for (int k = 0; k < each; ++k)
      transfers.push_back(spoke.write(source, 0, remote, 64u * static_cast<uint64_t>(i), 64, notify));
  }
  for (Transfer& transfer : transfers) require_ok(std::move(transfer));
  CHECK(hub.counted(counter, static_cast<uint64_t>(count * each)));
  CHECK(fabric.statistic("rnr") == 0);
}

}  // namespace te::engine_test
#endif
