// What the stand-in for libibverbs does, held against what libibverbs and a device promise.
#if __has_include(<infiniband/verbs.h>)
#include <algorithm>

#include "tests/native/verbs_support.h"

namespace te::test {
namespace {

using Events = std::vector<ibv_event_type>;
using Statuses = std::vector<ibv_wc_status>;
Statuses statuses(const End& end) {
  Statuses found;
  for (const ibv_wc& wc : end.done) found.push_back(wc.status);
  return found;
}

TEST_CASE("stand-in: a write lands before its completion comes, with its immediate") {
  Fabric fabric;
  End a, b({.device = 1});
  End::connect(a, b);
  REQUIRE(b.receive(7) == 0);
  a.fill(3, 0, 100'000);
  ibv_send_wr wr = a.write(11, 0, b, 4096, 100'000);
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.imm_data = 0xdecade;
  REQUIRE(a.post(wr) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_SUCCESS);
  CHECK(a.done[0].wr_id == 11);
  CHECK(a.done[0].opcode == IBV_WC_RDMA_WRITE);
  CHECK(a.done[0].qp_num == a.rc->qp_num);
  CHECK(b.done[0].wr_id == 7);
  CHECK(b.done[0].opcode == IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK(b.done[0].wc_flags == IBV_WC_WITH_IMM);
  CHECK(b.done[0].imm_data == 0xdecade);
  CHECK(b.done[0].byte_len == 100'000);
  CHECK(b.done[0].qp_num == b.rc->qp_num);
  CHECK(b.holds(3, 4096, 100'000));
  CHECK(b.bytes[4095] == 0xAA);
  CHECK(b.bytes[4096 + 100'000] == 0xAA);
}

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

}  // namespace
}  // namespace te::test
#endif
