// What the stand-in for libibverbs does, held against what libibverbs and a device promise: connections and completions.
#if __has_include(<infiniband/verbs.h>)
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <set>
#include <thread>

#include "tests/native/verbs_support.h"

namespace te::test {
namespace {

TEST_CASE("stand-in: a write lands before its completion comes, with its immediate") {
  Fabric fabric;
  const End::Wishes wishes[] = {{.device = 0}, {.device = 1}, {.device = 1, .gid = 0}};
  for (const End::Wishes& far : wishes) {
    End a({.gid = far.gid}), b(far);
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
    CHECK(b.bytes[b.receive_buffer(7) - b.bytes.data()] == 0xAA);  // an immediate takes a receive, not its buffer
  }
}

TEST_CASE("stand-in: a send fills a receive, a read fetches, an empty write needs no key") {
  Fabric fabric;
  for (const bool shared : {true, false}) {
    End a({.shared_receives = shared}), b({.device = 2, .shared_receives = shared});
    End::connect(a, b);
    REQUIRE(b.receive(1) == 0);
    a.fill(5, 0, 2000);
    b.fill(6, 9000, 3000);
    REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 2000)) == 0);
    ibv_send_wr read = a.write(2, 100'000, b, 9000, 3000);
    read.opcode = IBV_WR_RDMA_READ;
    REQUIRE(a.post(read) == 0);
    ibv_send_wr empty = a.write(3, 0, b, 0, 0);
    empty.num_sge = 0;
    empty.wr.rdma.rkey = 1;
    REQUIRE(a.post(empty) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 3 && b.done.size() == 1; }));
    CHECK(statuses(a) == Statuses(3, IBV_WC_SUCCESS));
    CHECK(a.done[1].opcode == IBV_WC_RDMA_READ);
    CHECK(a.done[1].byte_len == 3000);
    CHECK(a.holds(6, 100'000, 3000));
    CHECK(b.done[0].opcode == IBV_WC_RECV);
    CHECK(b.done[0].byte_len == 2000);
    CHECK(b.holds(5, static_cast<size_t>(b.receive_buffer(1) - b.bytes.data()), 2000));
  }
}

TEST_CASE("stand-in: inline bytes are taken at the post, others when the request is executed") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  a.fill(1, 0, 64);
  a.fill(1, 1000, 64);
  REQUIRE(a.post(a.write(1, 0, b, 0, 64, IBV_SEND_SIGNALED | IBV_SEND_INLINE)) == 0);
  REQUIRE(a.post(a.write(2, 1000, b, 1000, 64)) == 0);
  a.fill(2, 0, 64);
  a.fill(2, 1000, 64);
  REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
  CHECK(b.holds(1, 0, 64));
  CHECK(b.holds(2, 1000, 64));
}

TEST_CASE("stand-in: requests of a queue pair end in order, those of several by chance that the seed gives") {
  const auto order = [](const std::string& seed) {
    Fabric fabric("seed=" + seed + ",steps=3");
    End a, b, c;
    End::connect(a, b);
    ibv_qp* second = c.rc;
    End d;
    End::connect(c, d);
    CHECK(second->qp_num != a.rc->qp_num);
    std::vector<uint64_t> ends;
    for (uint64_t i = 0; i < 20; ++i) {
      REQUIRE(a.post(a.write(i, 0, b, 0, 5000)) == 0);
      REQUIRE(c.post(c.write(100 + i, 0, d, 0, 5000)) == 0);
    }
    while (ends.size() < 40)
      for (End* end : {&a, &c}) {
        end->poll();
        for (const ibv_wc& wc : end->done) ends.push_back(wc.wr_id);
        end->done.clear();
      }
    uint64_t next[2] = {0, 100};
    for (const uint64_t id : ends) CHECK(id == next[id >= 100]++);
    return ends;
  };
  const std::vector<uint64_t> first = order("1");
  CHECK(order("1") == first);
  CHECK(order("2") != first);
}

TEST_CASE("stand-in: the bytes of a long message come in pieces, and a receiver may see its end before the sender") {
  Fabric fabric("steps=1");
  bool partly = false, earlier = false;
  for (int round = 0; round < 50; ++round) {
    End a, b({.device = 1});
    End::connect(a, b);
    REQUIRE(b.receive(1) == 0);
    a.fill(1, 0, 64 << 10);
    ibv_send_wr wr = a.write(1, 0, b, 0, 64 << 10);
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    REQUIRE(a.post(wr) == 0);
    while (a.done.empty()) {
      a.poll(), b.poll();
      partly |= b.done.empty() && b.bytes[0] != 0xAA && b.bytes[(64 << 10) - 1] == 0xAA;
      earlier |= !b.done.empty() && a.done.empty();
      if (!b.done.empty()) CHECK(b.holds(1, 0, 64 << 10));
    }
  }
  CHECK(partly);
  CHECK(earlier);
}

TEST_CASE("stand-in: a slot of the send queue is free once a later completion has been polled") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  for (uint64_t i = 0; i + 1 < End::kDepth; ++i) REQUIRE(a.post(a.write(i, 0, b, 0, 8, 0)) == 0);
  REQUIRE(fabric.v.command("tick 1") == 0);
  CHECK(fabric.v.statistic("pending") == 0);
  REQUIRE(a.post(a.write(99, 0, b, 0, 8)) == 0);
  REQUIRE(fabric.v.command("tick 1") == 0);
  ibv_send_wr wr = a.write(100, 0, b, 0, 8), *bad = nullptr;
  CHECK(ibv_post_send(a.rc, &wr, &bad) == ENOMEM);
  CHECK(bad == &wr);
  CHECK(a.poll() == 1);
  CHECK(a.done[0].wr_id == 99);
  for (uint64_t i = 0; i < End::kDepth; ++i) CHECK(a.post(a.write(i, 0, b, 0, 8, 0)) == 0);
  CHECK(a.post(a.write(0, 0, b, 0, 8, 0)) == ENOMEM);
}

// --- notification ---------------------------------------------------------------------------------------------------

bool readable(int descriptor, int ms = 0) {
  pollfd entry{descriptor, POLLIN, 0};
  return ::poll(&entry, 1, ms) == 1;
}

void take_event(End& end) {
  ibv_cq* from = nullptr;
  void* user = nullptr;
  REQUIRE(end.v.ibv_get_cq_event(end.channel, &from, &user) == 0);
  CHECK(from == end.cq);
  CHECK(user == &end);
  end.v.ibv_ack_cq_events(from, 1);
}

TEST_CASE("stand-in: an armed queue tells its next completion, once") {
  Fabric fabric;
  End a({.channel = true}), b;
  End::connect(a, b);
  REQUIRE(a.post(a.write(1, 0, b, 0, 8)) == 0);
  fabric.command("tick 1");
  REQUIRE(ibv_req_notify_cq(a.cq, 0) == 0);
  CHECK(!readable(a.channel->fd));  // for what was there already
  REQUIRE(a.post(a.write(2, 0, b, 0, 8)) == 0);
  REQUIRE(a.post(a.write(3, 0, b, 0, 8)) == 0);
  fabric.command("tick 1");
  CHECK(readable(a.channel->fd));
  take_event(a);
  CHECK(!readable(a.channel->fd));
  CHECK(a.poll() == 3);
  REQUIRE(fcntl(a.channel->fd, F_SETFL, O_NONBLOCK) == 0);
  ibv_cq* from = nullptr;
  void* user = nullptr;
  CHECK(a.v.ibv_get_cq_event(a.channel, &from, &user) == -1);
  CHECK(errno == EAGAIN);
  CHECK(fabric.v.statistic("events") == 1);
}

TEST_CASE("stand-in: solicited-only arming waits for a solicited receive, or an error") {
  Fabric fabric;
  End a, b({.channel = true});
  End::connect(a, b);
  for (uint64_t i = 0; i < 4; ++i) REQUIRE(b.receive(i) == 0);
  REQUIRE(ibv_req_notify_cq(b.cq, 1) == 0);
  REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 8)) == 0);
  fabric.command("tick 1");
  CHECK(!readable(b.channel->fd));
  REQUIRE(a.post(a.request(IBV_WR_SEND, 2, 0, 8, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED)) == 0);
  fabric.command("tick 1");
  CHECK(readable(b.channel->fd));
  take_event(b);
}

TEST_CASE("stand-in: work goes on while all sleep") {
  Fabric fabric;
  End a({.retries = 1}), b({.channel = true});
  End::connect(a, b);
  REQUIRE(ibv_req_notify_cq(b.cq, 0) == 0);
  REQUIRE(a.post(a.request(IBV_WR_SEND, 1, 0, 8)) == 0);  // waits for a receive; nobody polls from here on
  REQUIRE(b.receive(1) == 0);
  REQUIRE(readable(b.channel->fd, 10'000));
  take_event(b);
  ibv_wc wc;
  CHECK(ibv_poll_cq(b.cq, 1, &wc) == 1);
}

TEST_CASE("stand-in: an event that was not acknowledged keeps its queue") {
  Fabric fabric;
  fabric.expect_violations(1);
  End a({.channel = true}), b;
  End::connect(a, b);
  REQUIRE(ibv_req_notify_cq(a.cq, 0) == 0);
  REQUIRE(a.post(a.write(2, 0, b, 0, 8)) == 0);
  fabric.command("tick 1");
  ibv_cq* from = nullptr;
  void* user = nullptr;
  REQUIRE(a.v.ibv_get_cq_event(a.channel, &from, &user) == 0);
  REQUIRE(a.v.ibv_destroy_qp(a.rc) == 0);
  a.rc = nullptr;
  CHECK(a.v.ibv_destroy_cq(a.cq) == EBUSY);
  a.v.ibv_ack_cq_events(from, 1);
}

// --- set-up ---------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: devices, ports and GIDs are what sysfs says") {
  Fabric fabric;
  std::string root = "/tmp/standin-test-XXXXXX";
  REQUIRE(mkdtemp(root.data()) != nullptr);
  REQUIRE(fabric.v.write_sysfs(root.c_str()) == 0);
  const auto line = [&](const std::string& path) {
    char text[64] = "";
    const int file = open((root + "/sys/class/infiniband/standin1/" + path).c_str(), O_RDONLY);
    REQUIRE(file >= 0);
    static_cast<void>(!read(file, text, sizeof text - 1));
    close(file);
    return std::string(text);
  };
  CHECK(line("ports/1/state") == "4: ACTIVE\n");
  CHECK(line("ports/1/gids/1") == "0000:0000:0000:0000:0000:ffff:0a58:0002\n");
  CHECK(line("ports/1/gid_attrs/types/1") == "RoCE v2\n");
  fabric.command("port_down 1");
  CHECK(line("ports/1/state") == "1: DOWN\n");
  End end({.device = 1});
  ibv_port_attr port;
  REQUIRE(verbs_get_ctx(end.context)->query_port(end.context, 1, &port, sizeof port) == 0);
  CHECK(port.state == IBV_PORT_DOWN);
  CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET);
  CHECK(port.max_msg_sz == 1 << 20);
  ibv_gid_entry entry;
  REQUIRE(end.v._ibv_query_gid_ex(end.context, 1, 1, &entry, 0, sizeof entry) == 0);
  CHECK(entry.gid_type == IBV_GID_TYPE_ROCE_V2);
  const ibv_gid gid = end.gid();
  CHECK(std::memcmp(gid.raw, entry.gid.raw, 16) == 0);
  CHECK(gid.raw[12] == 10);
  CHECK(end.v._ibv_query_gid_ex(end.context, 1, 3, &entry, 0, sizeof entry) != 0);
  static_cast<void>(!system(("rm -r " + root).c_str()));
}

TEST_CASE("stand-in: queue pair numbers are the same on all devices, keys never") {
  Fabric fabric;
  std::set<uint32_t> numbers, keys;
  for (uint32_t device = 0; device < 3; ++device) {
    End end({.device = device});
    numbers.insert(end.rc->qp_num);
    keys.insert(end.mr->lkey);
    keys.insert(end.mr->rkey);
  }
  CHECK(numbers.size() < 3);
  CHECK(keys.size() == 6);
}

TEST_CASE("stand-in: a dma-buf is registered where that is switched on, at any address") {
  Fabric fabric;
  End a, b;
  End::connect(a, b);
  const int file = memfd_create("standin", MFD_CLOEXEC);
  REQUIRE(ftruncate(file, 64 << 10) == 0);
  constexpr uint64_t kAddress = 0x7000'0000'1000;
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  CHECK(b.v.ibv_reg_dmabuf_mr(b.pd, 4096, 8192, kAddress, file, kAccess) == nullptr);
  CHECK(errno == EOPNOTSUPP);
  fabric.command("set dmabuf=1");
  CHECK(b.v.ibv_reg_dmabuf_mr(b.pd, 1, 8192, kAddress, file, kAccess) == nullptr);
  ibv_mr* mr = b.v.ibv_reg_dmabuf_mr(b.pd, 4096, 8192, kAddress, file, kAccess);
  REQUIRE(mr != nullptr);
  a.fill(1, 0, 8192);
  ibv_send_wr wr = a.write(1, 0, b, 0, 8192);
  wr.wr.rdma = {kAddress, mr->rkey};
  REQUIRE(a.post(wr) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  CHECK(a.done[0].status == IBV_WC_SUCCESS);
  std::vector<uint8_t> found(8192);
  REQUIRE(pread(file, found.data(), found.size(), 4096) == 8192);
  CHECK(std::equal(found.begin(), found.end(), a.bytes.begin()));
  CHECK(b.v.ibv_dereg_mr(mr) == 0);
  close(file);
}

// --- threads --------------------------------------------------------------------------------------------------------

TEST_CASE("stand-in: threads share the fabric") {
  Fabric fabric;
  constexpr uint64_t kWrites = 2000;
  const auto player = [](End& own, End& far) {
    uint64_t posted = 0, ended = 0, received = 0;
    uint64_t taken = 0;
    while (ended < kWrites || received < kWrites) {
      while (taken < received + 32 && own.receive(taken % 32) == 0) ++taken;
      ibv_send_wr wr = own.write(posted, 0, far, 4096, 512);
      wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      if (posted < kWrites && own.post(wr) == 0) ++posted;
      if (own.parts.size() > 1000) own.parts.erase(own.parts.begin(), own.parts.begin() + 900);
      own.poll();
      for (const ibv_wc& wc : own.done) {
        if (wc.status != IBV_WC_SUCCESS) return;
        ++(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM ? received : ended);
      }
      own.done.clear();
    }
    own.done.resize(1);
  };
  End a, b({.device = 1}), c, d({.device = 1});
  End::connect(a, b);
  End::connect(c, d);
  std::vector<std::thread> threads;
  for (auto [own, far] : {std::pair{&a, &b}, {&b, &a}, {&c, &d}, {&d, &c}})
    threads.emplace_back(player, std::ref(*own), std::ref(*far));
  for (std::thread& thread : threads) thread.join();
  for (End* end : {&a, &b, &c, &d}) CHECK(end->done.size() == 1);
}

}  // namespace
}  // namespace te::test
#endif
