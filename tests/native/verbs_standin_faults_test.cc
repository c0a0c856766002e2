// The faults that the stand-in for libibverbs can be told to have.
#if __has_include(<infiniband/verbs.h>)
#include <algorithm>
#include <utility>

#include "tests/native/verbs_support.h"

namespace te::test {
namespace {

// A chain of writes whose requests lie in `chain`.
int post_chain(End& a, End& b, std::vector<ibv_send_wr>* chain, size_t count, ibv_send_wr** bad) {
  chain->clear();
  for (size_t i = 0; i < count; ++i) chain->push_back(a.write(i, 0, b, 0, 8));
  for (size_t i = 0; i + 1 < count; ++i) (*chain)[i].next = &(*chain)[i + 1];
  return ibv_post_send(a.rc, chain->data(), bad);
}

TEST_CASE("stand-in: a post is cut where it is told, and the rest can be posted again") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  std::vector<ibv_send_wr> chain;
  ibv_send_wr* bad = nullptr;
  for (size_t take = 0; take < 4; ++take) {
    fabric.command("partial_next " + std::to_string(take));
    CHECK(post_chain(a, b, &chain, 4, &bad) == ENOMEM);
    CHECK(bad == &chain[take]);
    CHECK(ibv_post_send(a.rc, bad, &bad) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 4; }));
    for (uint64_t i = 0; i < 4; ++i) CHECK(a.done[i].wr_id == i);
    a.done.clear();
  }
  fabric.command("partial_every 3 1");
  int cut = 0;
  for (int i = 0; i < 9; ++i) cut += post_chain(a, b, &chain, 2, &bad) != 0;
  CHECK(cut == 3);
  fabric.command("partial_every 0");
  REQUIRE(run(a, b, [&] { return a.done.size() == 15; }));
  fabric.command("set post_partial=1");
  CHECK(post_chain(a, b, &chain, 2, &bad) == ENOMEM);
  CHECK(fabric.v.statistic("refused") == 4 + 3 + 1);
}

TEST_CASE("stand-in: shared receives, registrations and queue pairs are refused as often as it is told") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  fabric.command("srq_fail 1");
  CHECK(a.receive(1) == ENOMEM);
  CHECK(a.receive(1) == 0);
  fabric.command("reg_fail 1");
  CHECK(a.v.ibv_reg_mr_iova2(a.pd, a.bytes.data(), 64, 0x1000, 0) == nullptr);
  CHECK(errno == ENOMEM);
  fabric.command("qp_fail 1");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = a.cq;
  wanted.qp_type = IBV_QPT_RC;
  CHECK(a.v.ibv_create_qp(a.pd, &wanted) == nullptr);
  CHECK(errno == ENOMEM);
}

TEST_CASE("stand-in: the nth request ends with the status it is told, placed or not") {
  Fabric fabric;
  for (const bool landed : {false, true}) {
    End a, b;
    End::connect(a, b);
    a.fill(1, 0, 8192);
    fabric.command(std::string("wc_error 2 ") + std::to_string(IBV_WC_REM_OP_ERR) + (landed ? " landed" : ""));
    for (uint64_t i = 0; i < 3; ++i) REQUIRE(a.post(a.write(i, 0, b, i * 8192, 8192)) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 3; }));
    CHECK(statuses(a) == Statuses{IBV_WC_SUCCESS, IBV_WC_REM_OP_ERR, IBV_WC_WR_FLUSH_ERR});
    CHECK(b.holds(1, 0, 8192));
    CHECK(b.holds(1, 8192, 8192) == landed);
    CHECK((b.bytes[8192] != 0xAA) == landed);
    CHECK(b.bytes[2 * 8192] == 0xAA);
  }
}

TEST_CASE("stand-in: a killed queue pair tells its owner and does not answer its peer") {
  Fabric fabric;
  End a, b({.device = 1});
  End::connect(a, b);
  fabric.command("kill_qp 1 " + std::to_string(b.rc->qp_num));
  CHECK(b.events() == Events{IBV_EVENT_QP_FATAL, IBV_EVENT_QP_LAST_WQE_REACHED});
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_RETRY_EXC_ERR);
  b.open_datagrams(0);
  fabric.command("kill_ud 0");
  CHECK(b.events() == Events{IBV_EVENT_QP_FATAL});
  CHECK(fabric.v.command("kill_ud 1") == EINVAL);
  fabric.command("kill_rc 0");
  CHECK(a.events() == Events{IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_FATAL});
}

TEST_CASE("stand-in: receive completions that were not polled go with their queue pair") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  REQUIRE(b.receive(1) == 0);
  REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 8)) == 0);
  REQUIRE(run(a, a, [&] { return a.done.size() == 1; }));
  CHECK(b.v.ibv_destroy_qp(std::exchange(b.rc, nullptr)) == 0);
  CHECK(b.poll() == 0);
  CHECK(fabric.v.statistic("discarded") == 1);
}

TEST_CASE("stand-in: while a port is down, or two are cut, nothing passes; then it goes on") {
  Fabric fabric;
  const std::pair<const char*, const char*> ways[] = {{"port_down 1", "port_up 1"}, {"cut 1 0", "join 0 1"}};
  for (const auto& [off, on] : ways) {
    End a, b({.device = 1});
    End::connect(a, b);
    fabric.command(off);
    REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
    CHECK(!run(a, b, [&] { return !a.done.empty(); }, 1000));
    fabric.command(on);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_SUCCESS);
    const Events events = b.events();
    if (std::string(off) == "port_down 1") CHECK(events == Events{IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE});
    else CHECK(events.empty());
    CHECK(a.events().empty());
  }
}

TEST_CASE("stand-in: a port may have another address from now on") {
  Fabric fabric;
  End a, b({.device = 1});
  End::connect(a, b);
  const ibv_gid before = b.gid();
  fabric.command("new_address 1");
  const ibv_gid after = b.gid();
  CHECK(std::memcmp(before.raw, after.raw, 16) != 0);
  CHECK(b.events() == Events{IBV_EVENT_GID_CHANGE});
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_RETRY_EXC_ERR);
  fabric.command("new_address 1");
  CHECK(b.gid().raw[13] == before.raw[13]);
  CHECK(b.events().size() == 1);
}

TEST_CASE("stand-in: a device that is lost completes nothing and takes nothing") {
  Fabric fabric;
  End a, b({.device = 1});
  End::connect(a, b);
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  fabric.command("fatal 0");
  CHECK(a.events() == Events{IBV_EVENT_DEVICE_FATAL});
  CHECK(a.post(a.write(2, 0, b, 0, 8)) == EIO);
  CHECK(a.receive(1) == EIO);
  CHECK(a.to(IBV_QPS_ERR) == EIO);
  CHECK(!run(a, b, [&] { return !a.done.empty(); }, 1000));
  REQUIRE(b.post(b.write(1, 0, a, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return b.done.size() == 1; }));
  CHECK(b.done[0].status == IBV_WC_RETRY_EXC_ERR);
}

TEST_CASE("stand-in: a shared receive queue tells when it falls below its limit, once") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  for (uint64_t i = 0; i < 4; ++i) REQUIRE(b.receive(i) == 0);
  ibv_srq_attr limit{};
  limit.srq_limit = 3;
  REQUIRE(b.v.ibv_modify_srq(b.srq, &limit, IBV_SRQ_LIMIT) == 0);
  for (uint64_t i = 0; i < 3; ++i) REQUIRE(a.post(a.request(IBV_WR_SEND, i, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return b.done.size() == 3; }));
  CHECK(b.events() == Events{IBV_EVENT_SRQ_LIMIT_REACHED});
}

TEST_CASE("stand-in: shared receives are used in any order") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  for (uint64_t i = 0; i < 32; ++i) REQUIRE(b.receive(i) == 0);
  for (uint64_t i = 0; i < 32; ++i) REQUIRE(a.post(a.request(IBV_WR_SEND, i, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return b.done.size() == 32; }));
  std::vector<uint64_t> order;
  for (const ibv_wc& wc : b.done) order.push_back(wc.wr_id);
  CHECK(!std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (uint64_t i = 0; i < 32; ++i) CHECK(order[i] == i);
}

TEST_CASE("stand-in: what was on the wire may still land when its sender is gone, unless the receiver is, too") {
  Fabric fabric("steps=0,ghosts=1");
  for (const bool reset : {false, true}) {
    const uint64_t before = fabric.v.statistic("ghosts");
    End a, b;
    End::connect(a, b);
    a.fill(1, 0, 4096);
    REQUIRE(a.post(a.write(1, 0, b, 0, 4096)) == 0);
    REQUIRE(a.to(IBV_QPS_ERR) == 0);
    std::fill_n(a.bytes.begin(), 4096, 0);
    if (reset) REQUIRE(b.to(IBV_QPS_RESET) == 0);
    fabric.command("tick 1000");
    CHECK(b.holds(1, 0, 4096) == !reset);
    CHECK(fabric.v.statistic("ghosts") - before == (reset ? 0 : 1));
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_CASE("stand-in: acknowledged bytes may be late, but not for what comes after them") {
  Fabric fabric("late=1,late_ticks=1000000");
  enum How { kRead, kSend, kImmediate, kDeregister, kDestroy, kTime };
  for (const How how : {kRead, kSend, kImmediate, kDeregister, kDestroy, kTime}) {
    CAPTURE(how);
    End a, b;
    End::connect(a, b);
    a.fill(1, 0, 8192);
    REQUIRE(a.post(a.write(1, 0, b, 0, 8192)) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_SUCCESS);
    CHECK(b.bytes[0] == 0xAA);
    REQUIRE(b.receive(1) == 0);
    ibv_send_wr next = a.write(2, 9000, b, 0, 8);
    if (how == kRead) next.opcode = IBV_WR_RDMA_READ;
    if (how == kImmediate) next.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    if (how == kImmediate) next.wr.rdma.remote_addr += 10'000;
    if (how == kSend) next = a.request(IBV_WR_SEND, 2, 9000, 8);
    if (how <= kImmediate) REQUIRE(a.post(next) == 0);
    if (how <= kImmediate) REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
    if (how == kDestroy) CHECK(b.v.ibv_destroy_qp(std::exchange(b.rc, nullptr)) == 0);
    if (how == kTime) fabric.command("tick 1000001");
    if (how == kDeregister) {
      CHECK(b.v.ibv_dereg_mr(b.mr) == 0);
      b.mr = b.v.ibv_reg_mr_iova2(b.pd, b.bytes.data(), 64, 0, 0);
    }
    CHECK(b.holds(1, 0, 8192));
  }
}

TEST_CASE("stand-in: with relaxed ordering later bytes may come first, without it they may not") {
  Fabric fabric("late=0.5");
  for (const bool relaxed : {false, true}) {
    int overtaken = 0;
    End::Wishes wishes;
    if (relaxed) wishes.access |= IBV_ACCESS_RELAXED_ORDERING;
    End a, b(wishes);
    End::connect(a, b);
    for (int round = 0; round < 200; ++round) {
      a.done.clear();
      a.bytes[0] = 1;
      a.bytes[1] = 2;
      b.bytes[0] = 0;
      REQUIRE(a.post(a.write(1, 0, b, 0, 1)) == 0);
      REQUIRE(a.post(a.write(2, 1, b, 0, 1)) == 0);
      REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
      fabric.command("tick 1000");
      overtaken += b.bytes[0] == 1;
    }
    CHECK((overtaken > 0) == relaxed);
  }
}

TEST_CASE("stand-in: commands and options that are not known are refused") {
  Fabric fabric;
  for (const char* wrong :
       {"", "jump", "set", "set seed", "set speed=1", "set seed=x", "cut 0", "cut 0 99", "port_down", "port_down 77",
        "partial_next", "kill_qp 0 1", "kill_context 99999", "wc_error 1 0"})
    CHECK_MESSAGE(fabric.v.command(wrong) == EINVAL, wrong);
  CHECK(fabric.v.statistic("no such thing") == UINT64_MAX);
}

// --- fast -----------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: fast queue pairs complete writes without carrying them out; sends arrive") {
  Fabric fabric("fast=1");
  End a({.channel = true}), b;
  End::connect(a, b);
  REQUIRE(b.receive(1) == 0);
  a.fill(1, 0, 64);
  std::vector<ibv_send_wr> chain;
  ibv_send_wr* bad = nullptr;
  CHECK(post_chain(a, b, &chain, 3, &bad) == 0);
  CHECK(a.poll() == 3);
  REQUIRE(ibv_req_notify_cq(a.cq, 0) == 0);
  REQUIRE(a.post(a.write(9, 0, b, 0, 64)) == 0);
  pollfd entry{a.channel->fd, POLLIN, 0};
  CHECK(::poll(&entry, 1, 0) == 1);
  ibv_cq* from = nullptr;
  void* user = nullptr;
  REQUIRE(a.v.ibv_get_cq_event(a.channel, &from, &user) == 0);
  a.v.ibv_ack_cq_events(from, 1);
  REQUIRE(a.post(a.request(IBV_WR_SEND, 10, 0, 64)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 5 && b.done.size() == 1; }));
  CHECK(statuses(a) == Statuses(5, IBV_WC_SUCCESS));
  CHECK(a.done[0].opcode == IBV_WC_RDMA_WRITE);
  CHECK(a.done[0].qp_num == a.rc->qp_num);
  CHECK(a.done[3].wr_id == 9);
  CHECK(a.done[4].wr_id == 10);
  CHECK(b.holds(1, static_cast<size_t>(b.receive_buffer(1) - b.bytes.data()), 64));
  CHECK(b.bytes[0] == 0xAA);
  CHECK(fabric.v.statistic("posted") == 5);
  CHECK(fabric.v.statistic("calls") == 3);
  REQUIRE(a.to(IBV_QPS_ERR) == 0);
  REQUIRE(a.post(a.write(11, 0, b, 0, 64)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 6; }));
  CHECK(a.done[5].status == IBV_WC_WR_FLUSH_ERR);
}

TEST_CASE("stand-in: fast writes deliver their immediates if they shall") {
  Fabric fabric("fast=1,fast_imm=1");
  End a, b;
  End::connect(a, b);
  REQUIRE(b.receive(1) == 0);
  ibv_send_wr wr = a.write(1, 0, b, 0, 4096);
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.imm_data = 5;
  REQUIRE(a.post(wr) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
  CHECK(b.done[0].opcode == IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK(b.done[0].imm_data == 5);
  CHECK(b.bytes[0] == 0xAA);
}

}  // namespace
}  // namespace te::test
#endif
