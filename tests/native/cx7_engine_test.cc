// Engines over cx7 with the stand-in for libibverbs: what a device does wrong, and what the engine makes of it.
#include "cx7/wire.h"
#include "tests/native/engine_support.h"

#if __has_include(<infiniband/verbs.h>)
#include "tests/native/verbs_support.h"

namespace te::engine_test {
namespace {

using test::Fabric;

Setup cx7(uint32_t nics, int first_device, std::function<void(te_settings&)> tune = {}) {
  return {"cx7", "", nics, std::move(tune), first_device};
}

}  // namespace

TEST_CASE("cx7 engine: a chain of work requests that is taken in part goes on exactly where it stopped") {
  Fabric fabric;
  for (const uint32_t nics : {1u, 3u}) {
    Pair pair(cx7(nics, 0, [](te_settings& s) { s.chunk_bytes = 1000; }), cx7(nics, 8));
    exchange(pair, 1);
    for (int taken = 0; taken <= 32; ++taken) {
      CAPTURE(taken);
      fabric.command("partial_every 3 " + std::to_string(taken));
      exchange(pair, 1);
    }
    fabric.command("partial_every 0 0");
    fabric.command("set post_partial=0.3,srq_full=0.3");
    exchange(pair, scaled(20));
    fabric.command("set post_partial=0,srq_full=0");
  }
}

TEST_CASE("cx7 engine: connections come up over a network that loses, doubles and reorders datagrams") {
  Fabric fabric("ud_loss=0.4,ud_dup=0.3,ud_reorder=0.5,ud_delay=0.3");
  for (int round = 0; round < scaled(10); ++round) {
    Pair pair(cx7(2, 0), cx7(3, 8));
    Transfer there = pair.writer.connect(pair.peer());
    Transfer back = pair.owner.connect(pair.owner.peer(pair.writer));
    require_ok(std::move(there));
    require_ok(std::move(back));
    exchange(pair, 1);
  }
}

TEST_CASE("cx7 engine: a NIC whose connection breaks leaves, the peer stays, and the NIC comes back") {
  Fabric fabric;
  const auto tune = [](te_settings& s) { s.rdma.retry_count = 1; };
  Pair pair(cx7(3, 0, tune), cx7(3, 8, tune));
  exchange(pair, 1);
  fabric.command("cut 1 9");
  // Something has to be under way for the break to be noticed; what is may fail, named by its NIC, and nothing else may.
  uint64_t done = pair.owner.value(pair.counter);
  bool failed = false;
  REQUIRE(eventually([&] {
    std::vector<Transfer> transfers;
    for (int i = 0; i < 6; ++i) transfers.push_back(pair.write(0, 0, 256));
    for (Transfer& transfer : transfers) {
      const int32_t status = transfer.wait();
      if (status == TE_OK) {
        ++done;
        continue;
      }
      failed = true;
      CHECK_MESSAGE(status == TE_ERR_TRANSPORT, transfer.message());
      CHECK(transfer.error().nic == 1);
    }
    return failed;
  }));
  CHECK(pair.writer.state(pair.peer()) == TE_PEER_CONNECTED);
  REQUIRE(pair.owner.wait(pair.counter, done) == TE_OK);
  const uint64_t without = pair.writer.nic_info(1).writes;
  exchange(pair, 3);  // over the two that are left
  CHECK(pair.writer.nic_info(1).writes == without);
  fabric.command("join 1 9");
  REQUIRE(eventually([&] {
    exchange(pair, 1);
    return pair.writer.nic_info(1).writes > without;
  }));
  CHECK(pair.writer.state(pair.peer()) == TE_PEER_CONNECTED);
  CHECK(pair.owner.stats().stray_immediates == 0);
}

TEST_CASE("cx7 engine: without the connection of the first NIC the peer is lost, and found again") {
  Fabric fabric;
  const auto tune = [](te_settings& s) {
    s.rdma.retry_count = 1;
    s.connect_timeout_ns = 300 * kMs * kSlowness;
  };
  Pair pair(cx7(2, 0, tune), cx7(2, 8, tune));
  exchange(pair, 1);
  fabric.command("cut 0 8");
  REQUIRE(eventually([&] { return pair.write(0, 0, 100, false).wait() != TE_OK; }));
  REQUIRE(eventually([&] { return pair.writer.state(pair.peer()) == TE_PEER_LOST; }));
  Transfer lost = pair.write(0, 0, 100);
  CHECK(lost.wait() == TE_ERR_PEER_UNREACHABLE);
  CHECK_MESSAGE(lost.message().find("handshake") != std::string::npos, lost.message());
  fabric.command("join 0 8");
  REQUIRE(eventually([&] { return pair.write(0, 0, 100, false).wait() == TE_OK; }));
  exchange(pair, 1);
}

TEST_CASE("cx7 engine: a port that goes down is told, gets no new work, and gets it again when it is up") {
  Fabric fabric;
  Pair pair(cx7(3, 0), cx7(3, 8));
  exchange(pair, 1);
  fabric.command("port_down 2");
  REQUIRE(eventually([&] { return pair.writer.nic_info(2).up == 0; }));
  CHECK(std::string(pair.writer.nic_info(2).state) == "port down");
  const uint64_t without = pair.writer.nic_info(2).writes;
  exchange(pair, 3);
  CHECK(pair.writer.nic_info(2).writes == without);
  fabric.command("port_up 2");
  REQUIRE(eventually([&] { return pair.writer.nic_info(2).up == 1; }));
  REQUIRE(eventually([&] {
    exchange(pair, 1);
    return pair.writer.nic_info(2).writes > without;
  }));
  CHECK(std::string(pair.writer.nic_info(2).state).empty());
}

TEST_CASE("cx7 engine: a device that is lost ends what it carried and nothing else") {
  Fabric fabric;
  {
    Pair pair(cx7(3, 0), cx7(3, 8));
    exchange(pair, 1);
    fabric.command("fatal 1");
    REQUIRE(eventually([&] { return pair.writer.nic_info(1).up == 0; }));
    CHECK(std::string(pair.writer.nic_info(1).state) == "device lost");
    REQUIRE(eventually([&] { return pair.write(0, 0, 100, false).wait() == TE_OK; }));
    exchange(pair, 3);
    CHECK(pair.writer.state(pair.peer()) == TE_PEER_CONNECTED);
  }
}

TEST_CASE("cx7 engine: a registration and a queue pair that the device refuses are typed errors") {
  Fabric fabric;
  Player player(cx7(1, 0));
  Memory memory(4096);
  fabric.command("reg_fail 1");
  CHECK(te_region_register(player.engine, memory.data(), memory.size, TE_DEVICE_HOST, 0, &memory.region,
                           &player.error) == TE_ERR_REGISTRATION);
  CHECK(std::string(player.error.message).find("standin0") != std::string::npos);
  Player other(cx7(1, 8));
  fabric.command("qp_fail 1");
  Transfer connect = player.connect(player.peer(other));
  CHECK(connect.wait() == TE_ERR_PEER_UNREACHABLE);
  require_ok(player.connect(player.peer(other)));
}

TEST_CASE("cx7 engine: garbage at the datagram queue pair is ignored") {
  Fabric fabric;
  Player player(cx7(1, 0));
  cx7::NicAddress address;
  REQUIRE(cx7::decode(player.address.nics[0], &address));
  {
    test::End::Wishes wishes;
    wishes.device = 5;
    test::End stranger(wishes);
    stranger.open_datagrams(0);
    ibv_ah_attr way = stranger.way_to(stranger);
    std::memcpy(way.grh.dgid.raw, address.gid, 16);
    ibv_ah* handle = fabric.v.ibv_create_ah(stranger.pd, &way);
    REQUIRE(handle != nullptr);
    Random random(1);
    for (uint64_t i = 0; i < 300; ++i) {
      for (size_t k = 0; k < 200; ++k) stranger.bytes[k] = static_cast<uint8_t>(random.next() >> 32);
      ibv_send_wr wr = stranger.request(IBV_WR_SEND, i, 0, 1 + random.below(1000));
      wr.wr.ud.ah = handle;
      wr.wr.ud.remote_qpn = address.queue_pair;
      wr.wr.ud.remote_qkey = address.queue_key;
      REQUIRE(stranger.post(wr) == 0);
      REQUIRE(eventually([&] { return stranger.poll() > 0; }));
    }
    CHECK(fabric.v.ibv_destroy_ah(handle) == 0);
  }
  Pair pair(cx7(1, 1), cx7(1, 9));
  exchange(pair, 1);
  require_ok(pair.writer.connect(pair.writer.peer(player)));
}

TEST_CASE("cx7 engine: a hundred peers, windows of each, one NIC") {
  Fabric fabric;
  const auto tune = [](te_settings& s) {
    s.max_peers = 256;
    s.immediate_window = 8;
    s.operations = 64;
    s.max_regions = 16;
  };
  Player hub(cx7(1, 0, tune));
  Memory& target = hub.memory(1 << 16);
  const te_handle counter = hub.counter();
  std::vector<std::unique_ptr<Player>> spokes;
  std::vector<Transfer> transfers;
  const int count = scaled(100), each = 40;
  for (int i = 0; i < count; ++i) {
    spokes.push_back(std::make_unique<Player>(cx7(1, 1 + i % 15, tune)));
    Player& spoke = *spokes.back();
    Memory& source = spoke.memory(256);
    const te_handle remote = spoke.remote(hub, target), notify = spoke.remote_counter(hub, counter);
    for (int k = 0; k < each; ++k)
      transfers.push_back(spoke.write(source, 0, remote, 64u * static_cast<uint64_t>(i), 64, notify));
  }
  for (Transfer& transfer : transfers) require_ok(std::move(transfer));
  CHECK(hub.counted(counter, static_cast<uint64_t>(count * each)));
}

}  // namespace te::engine_test
#endif
