// What the stand-in for libibverbs does with datagrams: headers, keys, and all that a network may do to them.
#if __has_include(<infiniband/verbs.h>)
#include <algorithm>
#include <map>

#include "tests/native/verbs_support.h"

namespace te::test {
namespace {

constexpr uint32_t kKey = 0x1234;

// Two ends with datagram queue pairs, and the way from the first to the second.
struct Couple {
  End a, b;
  ibv_ah* way = nullptr;

  explicit Couple(const End::Wishes& near = {}, const End::Wishes& far = {.device = 1}, int receives = 64)
      : a(near), b(far) {
    a.open_datagrams(0);
    b.open_datagrams(receives);
    ibv_ah_attr route = a.way_to(b);
    way = a.v.ibv_create_ah(a.pd, &route);
    REQUIRE(way != nullptr);
  }
  ~Couple() { CHECK(a.v.ibv_destroy_ah(way) == 0); }

  int send(uint64_t id, size_t from, size_t length, uint32_t key = kKey, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_send_wr wr = a.request(IBV_WR_SEND, id, from, length, flags);
    wr.wr.ud = {way, b.ud->qp_num, key};
    return a.post(wr);
  }
  // Sends numbered ones, and returns which arrived, in order.
  std::vector<uint8_t> volley(uint8_t count) {
    for (uint8_t i = 0; i < count; ++i) {
      a.bytes[i] = i;
      REQUIRE(send(i, i, 1) == 0);
      REQUIRE(run(a, b, [&] { return a.done.size() == i + 1u; }));
    }
    static_cast<void>(run(a, b, [] { return false; }, 2000));
    std::vector<uint8_t> arrived;
    for (const ibv_wc& wc : b.done) arrived.push_back(b.receive_buffer(wc.wr_id)[40]);
    return arrived;
  }
};

TEST_CASE("stand-in: a datagram comes with forty bytes before it, and with its sender's number") {
  Fabric fabric;
  for (const uint8_t gid : {1, 0}) {
    Couple c({.gid = gid}, {.device = 1, .gid = gid});
    c.a.fill(3, 0, 48);
    REQUIRE(c.send(9, 0, 48) == 0);
    REQUIRE(run(c.a, c.b, [&] { return c.a.done.size() == 1 && c.b.done.size() == 1; }));
    CHECK(c.a.done[0].status == IBV_WC_SUCCESS);
    CHECK(c.a.done[0].opcode == IBV_WC_SEND);
    const ibv_wc& wc = c.b.done[0];
    CHECK(wc.opcode == IBV_WC_RECV);
    CHECK(wc.byte_len == 88);
    CHECK(wc.wc_flags == IBV_WC_GRH);
    CHECK(wc.src_qp == c.a.ud->qp_num);
    CHECK(wc.qp_num == c.b.ud->qp_num);
    uint8_t* bytes = c.b.receive_buffer(wc.wr_id);
    CHECK(c.b.holds(3, static_cast<size_t>(bytes + 40 - c.b.bytes.data()), 48));
    const ibv_gid from = c.a.gid();
    if (gid == 0) CHECK(std::memcmp(bytes + 8, from.raw, 16) == 0);
    else CHECK(std::memcmp(bytes + 32, from.raw + 12, 4) == 0);
  }
}

TEST_CASE("stand-in: datagrams with another key, to nobody, or without a receive are dropped without a word") {
  Fabric fabric;
  Couple c({}, {.device = 1}, 1);
  REQUIRE(c.send(1, 0, 8, kKey + 1) == 0);
  ibv_send_wr wr = c.a.request(IBV_WR_SEND, 2, 0, 8);
  wr.wr.ud = {c.way, c.b.ud->qp_num + 1, kKey};
  REQUIRE(c.a.post(wr) == 0);
  wr.wr.ud.remote_qpn = c.b.rc->qp_num;
  REQUIRE(c.a.post(wr) == 0);
  REQUIRE(c.send(3, 0, 8) == 0);  // takes the only receive
  REQUIRE(c.send(4, 0, 8) == 0);
  REQUIRE(run(c.a, c.b, [&] { return c.a.done.size() == 5; }));
  CHECK(statuses(c.a) == Statuses(5, IBV_WC_SUCCESS));
  CHECK(fabric.v.statistic("datagrams_dropped") == 4);
  CHECK(c.b.done.size() + static_cast<size_t>(c.b.poll()) >= 1);
}

TEST_CASE("stand-in: a datagram longer than the port takes breaks its sender, a receive too short its receiver") {
  Fabric fabric;
  fabric.expect_violations(2);
  {
    Couple c;
    REQUIRE(c.send(1, 0, 4097) == 0);
    REQUIRE(run(c.a, c.b, [&] { return c.a.done.size() == 1; }));
    CHECK(c.a.done[0].status == IBV_WC_LOC_LEN_ERR);
  }
  Couple c({}, {.device = 1}, 0);
  REQUIRE(c.b.receive_datagram(0, 47) == 0);
  REQUIRE(c.send(1, 0, 8) == 0);
  REQUIRE(run(c.a, c.b, [&] { return c.b.done.size() == 1; }));
  CHECK(c.b.done[0].status == IBV_WC_LOC_LEN_ERR);
}

TEST_CASE("stand-in: keys for the privileged, foreign and destroyed address handles are refused") {
  Fabric fabric;
  fabric.expect_violations(4);
  Couple c;
  CHECK(c.send(1, 0, 8, 1u << 31) == EINVAL);
  ibv_ah_attr route = c.b.way_to(c.a);
  ibv_ah* foreign = c.b.v.ibv_create_ah(c.b.pd, &route);
  ibv_send_wr wr = c.a.request(IBV_WR_SEND, 2, 0, 8);
  wr.wr.ud = {foreign, c.b.ud->qp_num, kKey};
  CHECK(c.a.post(wr) == EINVAL);
  CHECK(c.b.v.ibv_destroy_ah(foreign) == 0);
  CHECK(c.a.post(wr) == EINVAL);
  route.grh.sgid_index = 0;  // link-local to IPv4
  CHECK(c.b.v.ibv_create_ah(c.b.pd, &route) == nullptr);
  fabric.command("ah_fail 1");
  route.grh.sgid_index = 1;
  CHECK(c.b.v.ibv_create_ah(c.b.pd, &route) == nullptr);
  CHECK(errno == ENOMEM);
}

TEST_CASE("stand-in: datagrams are lost, doubled, overtaken and late as the options say") {
  Fabric fabric;
  const auto count = [](const std::vector<uint8_t>& all) {
    std::map<uint8_t, int> counts;
    for (const uint8_t each : all) ++counts[each];
    return counts;
  };
  std::vector<uint8_t> plain = Couple().volley(40);
  CHECK(plain.size() == 40);
  CHECK(std::is_sorted(plain.begin(), plain.end()));

  fabric.command("set ud_loss=0.3");
  const size_t arrived = Couple().volley(40).size();
  CHECK(arrived > 10);
  CHECK(arrived < 40);
  CHECK(fabric.v.statistic("datagrams_lost") == 40 - arrived);

  fabric.command("set ud_loss=0,ud_dup=0.3");
  const std::vector<uint8_t> doubled = Couple().volley(40);
  CHECK(doubled.size() > 40);
  CHECK(count(doubled).size() == 40);

  fabric.command("set ud_dup=0,ud_reorder=0.5");
  std::vector<uint8_t> shuffled = Couple().volley(40);
  CHECK(shuffled.size() == 40);
  CHECK(!std::is_sorted(shuffled.begin(), shuffled.end()));

  fabric.command("set ud_reorder=0,ud_delay=0.5");
  std::vector<uint8_t> late = Couple().volley(40);
  CHECK(late.size() == 40);
  CHECK(!std::is_sorted(late.begin(), late.end()));
}

}  // namespace
}  // namespace te::test
#endif
