// What the stand-in for libibverbs refuses, and how errors look: as a device has it.
#if __has_include(<infiniband/verbs.h>)
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "tests/native/verbs_support.h"

namespace te::test {
namespace {

// --- requests -------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: in the error state all requests are flushed, unsignalled and later ones too") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  for (uint64_t i = 0; i < 5; ++i) REQUIRE(a.post(a.write(i, 0, b, 0, 64, 0)) == 0);
  REQUIRE(a.to(IBV_QPS_ERR) == 0);
  REQUIRE(a.post(a.write(5, 0, b, 0, 64)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 6; }));
  CHECK(statuses(a) == Statuses(6, IBV_WC_WR_FLUSH_ERR));
  for (uint64_t i = 0; i < 6; ++i) CHECK(a.done[i].wr_id == i);
  CHECK(a.events() == Events{IBV_EVENT_QP_LAST_WQE_REACHED});
}

TEST_CASE("stand-in: own receives of a queue pair are flushed, shared ones are not") {
  Fabric fabric;
  for (const bool shared : {true, false}) {
    End a({.shared_receives = shared}), b;
    End::connect(a, b);
    REQUIRE(a.receive(1) == 0);
    REQUIRE(a.to(IBV_QPS_ERR) == 0);
    fabric.command("tick 1");
    CHECK(a.poll() == (shared ? 0 : 1));
    CHECK(statuses(a) == Statuses(shared ? 0 : 1, IBV_WC_WR_FLUSH_ERR));
  }
}

TEST_CASE("stand-in: too many parts or inline bytes, and opcodes of other kinds, are refused at the post") {
  Fabric fabric;
  fabric.expect_violations(4);
  End a, b;
  End::connect(a, b);
  ibv_send_wr good = a.write(1, 0, b, 0, 64), wrong = a.write(2, 0, b, 0, 65, IBV_SEND_INLINE), *bad = nullptr;
  good.next = &wrong;
  CHECK(ibv_post_send(a.rc, &good, &bad) == EINVAL);
  CHECK(bad == &wrong);
  wrong = a.write(3, 0, b, 0, 8);
  wrong.num_sge = 3;
  CHECK(ibv_post_send(a.rc, &wrong, &bad) == EINVAL);
  wrong.num_sge = 1;
  wrong.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  CHECK(ibv_post_send(a.rc, &wrong, &bad) == EINVAL);
  ibv_recv_wr receive{1, nullptr, nullptr, 2}, *bad_receive = nullptr;
  CHECK(ibv_post_srq_recv(a.srq, &receive, &bad_receive) == EINVAL);
  CHECK(bad_receive == &receive);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));  // the good one was taken
}

TEST_CASE("stand-in: a bad local key, and one that was deregistered before execution, are protection errors") {
  Fabric fabric;
  for (int what = 0; what < 3; ++what) {
    End a, b;
    End::connect(a, b);
    std::vector<uint8_t> more(64);
    ibv_mr* mr = a.v.ibv_reg_mr_iova2(a.pd, more.data(), 64, reinterpret_cast<uint64_t>(more.data()), 0);
    REQUIRE(mr != nullptr);
    ibv_send_wr wr = a.write(1, 0, b, 0, 64);
    wr.sg_list->addr = reinterpret_cast<uint64_t>(more.data());
    wr.sg_list->lkey = what == 0 ? mr->rkey : mr->lkey;
    if (what == 1) ++wr.sg_list->length;
    REQUIRE(a.post(wr) == 0);
    REQUIRE(a.post(a.write(2, 0, b, 0, 64)) == 0);
    CHECK(a.v.ibv_dereg_mr(mr) == 0);  // before it is executed; in the first two cases it makes no difference
    REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
    CHECK(statuses(a) == Statuses{IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR});
    CHECK(b.bytes[0] == 0xAA);
  }
}

TEST_CASE("stand-in: the responder refuses wrong keys, ranges, rights and domains, and both ends break") {
  Fabric fabric;
  for (int what = 0; what < 5; ++what) {
    CAPTURE(what);
    End a, b, stranger;
    End::connect(a, b);
    ibv_mr* read_only = b.v.ibv_reg_mr_iova2(b.pd, b.bytes.data(), 4096, reinterpret_cast<uint64_t>(b.bytes.data()),
                                             IBV_ACCESS_REMOTE_READ);
    ibv_mr* gone = b.v.ibv_reg_mr_iova2(b.pd, b.bytes.data(), 4096, reinterpret_cast<uint64_t>(b.bytes.data()),
                                        IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE);
    const uint32_t keys[] = {b.mr->lkey, b.mr->rkey, read_only->rkey, gone->rkey, stranger.mr->rkey};
    ibv_send_wr wr = a.write(1, 0, b, what == 1 ? End::kBytes - 63 : 0, 64);
    if (what == 4) wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(stranger.bytes.data());
    wr.wr.rdma.rkey = keys[what];
    CHECK(b.v.ibv_dereg_mr(gone) == 0);
    REQUIRE(a.post(wr) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_REM_ACCESS_ERR);
    CHECK(a.done[0].wr_id == 1);
    CHECK(b.bytes[0] == 0xAA);
    CHECK(stranger.bytes[0] == 0xAA);
    CHECK(b.events() == Events{IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_LAST_WQE_REACHED});
    CHECK(b.v.ibv_dereg_mr(read_only) == 0);
    REQUIRE(b.post(b.write(2, 0, a, 0, 64)) == 0);
    REQUIRE(run(a, b, [&] { return b.done.size() == 1; }));
    CHECK(b.done[0].status == IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_CASE("stand-in: of a completion with an error only the name, the status and the queue pair can be used") {
  Fabric fabric;
  bool like_receives = false, with_immediate = false, differs = false;
  uint32_t before = 0;
  for (int round = 0; round < 20; ++round) {
    End a, b;
    End::connect(a, b);
    REQUIRE(a.to(IBV_QPS_ERR) == 0);
    REQUIRE(a.post(a.write(1, 0, b, 0, 64)) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    like_receives |= (a.done[0].opcode & IBV_WC_RECV) != 0;
    with_immediate |= a.done[0].wc_flags != 0;
    differs |= round > 0 && a.done[0].byte_len != before;
    before = a.done[0].byte_len;
    CHECK(a.done[0].qp_num == a.rc->qp_num);
    CHECK(a.done[0].vendor_err != 0);
  }
  CHECK(like_receives);
  CHECK(with_immediate);
  CHECK(differs);
}

// --- receivers ------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: without a receive the sender waits, for ever or as often as it is told") {
  Fabric fabric;
  for (const bool send : {true, false}) {
    End a, b;
    End::connect(a, b);
    a.fill(1, 0, 5000);
    ibv_send_wr wr = a.write(1, 0, b, 0, 5000);
    wr.opcode = send ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.wr.rdma.remote_addr = send ? 0 : wr.wr.rdma.remote_addr;
    if (send) wr.sg_list->length = 4000;
    REQUIRE(a.post(wr) == 0);
    CHECK(!run(a, b, [&] { return !a.done.empty(); }, 5000));
    CHECK(fabric.v.statistic("rnr") > 7);
    REQUIRE(b.receive(1) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_SUCCESS);
  }
  End a({.rnr_retries = 2}), b;
  End::connect(a, b);
  fabric.command("reset");
  REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_RNR_RETRY_EXC_ERR);
  CHECK(fabric.v.statistic("rnr") == 3);
}

TEST_CASE("stand-in: a receive that is too short breaks both ends") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a, b;
  End::connect(a, b);
  REQUIRE(b.receive(4, 100) == 0);
  REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 101)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_REM_INV_REQ_ERR);
  CHECK(b.done[0].status == IBV_WC_LOC_LEN_ERR);
  CHECK(b.done[0].wr_id == 4);
}

TEST_CASE("stand-in: a message longer than the port takes is a length error") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a, b;
  End::connect(a, b);
  REQUIRE(a.post(a.write(1, 0, b, 0, (1 << 20) + 1)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_LOC_LEN_ERR);
}

TEST_CASE("stand-in: who is gone does not answer, and the first request without an answer has the error") {
  Fabric fabric;
  for (const char* how : {"destroyed", "reset", "error", "silent"}) {
    CAPTURE(how);
    End a({.retries = 2}), b;
    End::connect(a, b);
    const std::string word = how;
    if (word == "destroyed") CHECK(b.v.ibv_destroy_qp(std::exchange(b.rc, nullptr)) == 0);
    if (word == "reset") CHECK(b.to(IBV_QPS_RESET) == 0);
    if (word == "error") CHECK(b.to(IBV_QPS_ERR) == 0);
    if (word == "silent") fabric.command("kill_context -1");
    const uint64_t before = fabric.v.statistic("retries");
    REQUIRE(a.post(a.write(1, 0, b, 0, 8, 0)) == 0);
    REQUIRE(a.post(a.write(2, 0, b, 0, 8)) == 0);
    CHECK(!run(a, b, [&] { return !a.done.empty(); }, 900));
    REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
    CHECK(statuses(a) == Statuses{IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR});
    CHECK(a.done[0].wr_id == 1);
    CHECK(fabric.v.statistic("retries") - before == 2);
    CHECK(b.bytes[0] == 0xAA);
  }
}

TEST_CASE("stand-in: bytes may have landed although the sender hears of an error") {
  Fabric fabric("steps=1");
  bool landed = false, partly = false, clean = false;
  for (int round = 0; round < 60; ++round) {
    End a({.retries = 0}), b;
    End::connect(a, b);
    a.fill(1, 0, 8192);
    REQUIRE(a.post(a.write(1, 0, b, 0, 8192)) == 0);
    for (int i = round % 6; i > 0 && a.done.empty(); --i) a.poll();
    if (!a.done.empty()) continue;
    REQUIRE(b.to(IBV_QPS_ERR) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
    CHECK(a.done[0].status == IBV_WC_RETRY_EXC_ERR);
    const bool whole = b.holds(1, 0, 8192);
    landed |= whole;
    clean |= b.bytes[0] == 0xAA;
    partly |= !whole && b.bytes[0] != 0xAA;
  }
  CHECK(landed);
  CHECK(partly);
  CHECK(clean);
}

TEST_CASE("stand-in: a queue of completions that overruns is dead") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a({.entries = 4}), b;
  End::connect(a, b);
  for (uint64_t i = 0; i < 5; ++i) REQUIRE(a.post(a.write(i, 0, b, 0, 8)) == 0);
  fabric.command("tick 1");
  const Events events = a.events();
  CHECK(std::count(events.begin(), events.end(), IBV_EVENT_CQ_ERR) == 1);
  CHECK(a.poll() == 0);
}

// --- states ---------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: transitions need their attributes, take no others, and check the values") {
  Fabric fabric;
  fabric.expect_violations(10);
  End a, b;
  const auto modify = [&](ibv_qp_attr attributes, int mask) { return a.v.ibv_modify_qp(a.rc, &attributes, mask); };
  CHECK(a.to_rtr(b) == EINVAL);  // from RESET
  CHECK(a.post(a.write(1, 0, b, 0, 8)) == EINVAL);
  REQUIRE(a.to_init(a.rc) == 0);
  REQUIRE(b.to_init(b.rc) == 0);
  CHECK(a.to_rts() == EINVAL);
  ibv_qp_attr rtr{};
  rtr.qp_state = IBV_QPS_RTR;
  rtr.ah_attr = a.way_to(b);
  rtr.path_mtu = IBV_MTU_1024;
  rtr.dest_qp_num = b.rc->qp_num;
  CHECK(modify(rtr, End::kToRtr & ~IBV_QP_MIN_RNR_TIMER) == EINVAL);
  CHECK(modify(rtr, End::kToRtr | IBV_QP_TIMEOUT) == EINVAL);
  ibv_qp_attr wrong = rtr;
  wrong.rq_psn = 1 << 24;
  CHECK(modify(wrong, End::kToRtr) == EINVAL);
  wrong = rtr;
  wrong.ah_attr.is_global = 0;
  CHECK(modify(wrong, End::kToRtr) == EINVAL);
  wrong = rtr;
  wrong.ah_attr.grh.sgid_index = 2;  // an empty slot
  CHECK(modify(wrong, End::kToRtr) == EINVAL);
  fabric.command("set mtu=512");
  CHECK(modify(rtr, End::kToRtr) == EINVAL);
  fabric.command("set mtu=4096");
  CHECK(modify(rtr, End::kToRtr) == 0);
  ibv_qp* ud = a.make(IBV_QPT_UD);
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  init.qkey = 1u << 31;
  CHECK(a.v.ibv_modify_qp(ud, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == EINVAL);
  CHECK(a.v.ibv_destroy_qp(ud) == 0);
}

TEST_CASE("stand-in: sequence numbers that do not pair are never answered") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a({.retries = 1}), b;
  for (End* end : {&a, &b}) REQUIRE(end->to_init(end->rc) == 0);
  REQUIRE(a.to_rtr(b) == 0);
  ibv_qp_attr rtr{};
  rtr.qp_state = IBV_QPS_RTR;
  rtr.ah_attr = b.way_to(a);
  rtr.path_mtu = IBV_MTU_1024;
  rtr.dest_qp_num = a.rc->qp_num;
  rtr.rq_psn = a.psn() + 1;
  REQUIRE(b.v.ibv_modify_qp(b.rc, &rtr, End::kToRtr) == 0);
  REQUIRE(a.to_rts() == 0);
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_RETRY_EXC_ERR);
  CHECK(b.bytes[0] == 0xAA);
}

TEST_CASE("stand-in: the first message tells that the connection is established") {
  Fabric fabric;
  End a, b;
  for (End* end : {&a, &b}) REQUIRE(end->to_init(end->rc) == 0);
  REQUIRE(a.to_rtr(b) == 0);
  REQUIRE(b.to_rtr(a) == 0);
  REQUIRE(a.to_rts() == 0);
  for (int i = 0; i < 2; ++i) REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
  CHECK(b.events() == Events{IBV_EVENT_COMM_EST});
  REQUIRE(b.to_rts() == 0);
}

TEST_CASE("stand-in: a queue pair that was reset has forgotten all, also its completions") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  fabric.command("tick 1");
  REQUIRE(a.post(a.write(2, 0, b, 0, 8)) == 0);
  for (const End* end : {&a, &b}) REQUIRE(end->to(IBV_QPS_RESET) == 0);
  CHECK(a.poll() == 0);
  End::connect(a, b);
  REQUIRE(a.post(a.write(3, 0, b, 0, 8)) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].wr_id == 3);
}

// --- objects --------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: what is in use is busy, what was destroyed is not used") {
  Fabric fabric;
  fabric.expect_violations(8);
  End a({.channel = true});
  CHECK(a.v.ibv_dealloc_pd(a.pd) == EBUSY);
  CHECK(a.v.ibv_destroy_cq(a.cq) == EBUSY);
  CHECK(a.v.ibv_destroy_srq(a.srq) == EBUSY);
  CHECK(a.v.ibv_destroy_comp_channel(a.channel) == EBUSY);
  CHECK(a.v.ibv_close_device(a.context) == EBUSY);
  ibv_qp* gone = a.make(IBV_QPT_RC);
  CHECK(a.v.ibv_destroy_qp(gone) == 0);
  CHECK(a.v.ibv_destroy_qp(gone) == EINVAL);
  ibv_send_wr wr = a.request(IBV_WR_SEND, 1, 0, 8), *bad = nullptr;
  CHECK(ibv_post_send(gone, &wr, &bad) == EINVAL);
  ibv_cq* queue = a.v.ibv_create_cq(a.context, 4, nullptr, nullptr, 0);
  CHECK(a.v.ibv_destroy_cq(queue) == 0);
  ibv_wc wc;
  CHECK(ibv_poll_cq(queue, 1, &wc) == -1);
}

TEST_CASE("stand-in: memory must be there, and remote writing needs local writing") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a;
  const auto refused = [&](void* at, size_t length, unsigned access) {
    errno = 0;
    CHECK(a.v.ibv_reg_mr_iova2(a.pd, at, length, reinterpret_cast<uint64_t>(at), access) == nullptr);
    return errno;
  };
  void* hole = mmap(nullptr, 3 << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  munmap(static_cast<char*>(hole) + (1 << 12), 1 << 12);
  CHECK(refused(hole, 3 << 12, IBV_ACCESS_LOCAL_WRITE) == EFAULT);
  munmap(hole, 3 << 12);
  CHECK(refused(a.bytes.data(), 4096, IBV_ACCESS_REMOTE_WRITE) == EINVAL);
  CHECK(refused(a.bytes.data(), 0, IBV_ACCESS_LOCAL_WRITE) == EINVAL);
}

TEST_CASE("stand-in: limits of the device hold") {
  Fabric fabric("max_cqe=64,max_srq_wr=64,max_inline=16,max_qp_wr=32,max_qp=2");
  End a({.entries = 64, .inline_bytes = 0, .depth = 32});
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = a.cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap = {33, 1, 1, 1, 0};
  CHECK(a.v.ibv_create_qp(a.pd, &wanted) == nullptr);
  wanted.cap = {1, 1, 1, 1, 17};
  CHECK(a.v.ibv_create_qp(a.pd, &wanted) == nullptr);
  CHECK(errno == EINVAL);
  CHECK(a.v.ibv_create_cq(a.context, 65, nullptr, nullptr, 0) == nullptr);
  wanted.cap = {1, 1, 1, 1, 16};
  ibv_qp* second = a.v.ibv_create_qp(a.pd, &wanted);
  CHECK(second != nullptr);
  CHECK(a.v.ibv_create_qp(a.pd, &wanted) == nullptr);
  CHECK(errno == ENOMEM);
  CHECK(a.v.ibv_destroy_qp(second) == 0);
}

}  // namespace
}  // namespace te::test
#endif
