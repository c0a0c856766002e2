// What the stand-in for libfabric does, held against what libfabric and a device of EFA promise, and do not promise.
#if __has_include(<rdma/fabric.h>)
#include <poll.h>

#include <algorithm>
#include <set>

#include "tests/native/fabric_support.h"

namespace te::test {
namespace {

constexpr uint64_t kImmediate = FI_REMOTE_CQ_DATA;

TEST_CASE("stand-in of EFA: a write lands before its completion comes, with its immediate, which uses up a receive") {
  EfaFabric fabric;
  for (const uint32_t device : {0u, 1u}) {
    EfaEnd a, b({.device = device});
    EfaEnd::meet(a, b);
    a.fill(3, 0, 100'000);
    EfaContext context;
    REQUIRE(a.write({&b, 0, 4096, 100'000, kImmediate, 0xdecade01, &context}) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
    CHECK(a.done[0].op_context == &context);
    CHECK(a.done[0].flags == (FI_RMA | FI_WRITE));
    CHECK(b.done[0].op_context == &b.receive_contexts[0]);
    CHECK(b.done[0].flags == (FI_REMOTE_CQ_DATA | FI_RMA | FI_REMOTE_WRITE));
    CHECK(b.done[0].data == 0xdecade01);
    CHECK(b.done[0].len == 100'000);
    CHECK(b.holds(3, 4096, 100'000));
    CHECK(b.bytes[4095] == 0xAA);
    CHECK(b.bytes[4096 + 100'000] == 0xAA);
    CHECK(*b.receive_buffer(0) == 0xAA);  // the receive, not its buffer
  }
}

TEST_CASE("stand-in of EFA: without FI_RX_CQ_DATA immediates come without a context and use no receive") {
  EfaFabric fabric("unsolicited=1");
  EfaEnd a, b({.receives = 0});
  CHECK((b.info->mode & FI_RX_CQ_DATA) == 0);
  EfaEnd::meet(a, b);
  REQUIRE(a.write({&b, 0, 0, 8, kImmediate, 5}) == 0);
  REQUIRE(run(a, b, [&] { return b.done.size() == 1; }));
  CHECK(b.done[0].op_context == nullptr);
  CHECK(b.done[0].data == 5);
}

TEST_CASE("stand-in of EFA: a send fills a receive, a read fetches, an empty write needs no key") {
  EfaFabric fabric;
  EfaEnd a, b({.device = 1});
  EfaEnd::meet(a, b);
  a.fill(5, 0, 2000);
  b.fill(6, 9000, 300'000);
  REQUIRE(a.send(0, 2000) == 0);
  REQUIRE(fi_read(a.objects.endpoint.get(), a.bytes.data() + 100'000, 300'000, fi_mr_desc(a.memory.get()), a.peer,
                  reinterpret_cast<uint64_t>(b.bytes.data() + 9000), fi_mr_key(b.memory.get()), a.context()) == 0);
  const auto closed = b.open_region(b.bytes.data(), 64);
  REQUIRE(a.write({.target = &b, .length = 0, .remote = closed.get()}) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 3 && b.done.size() == 1; }));
  CHECK(a.count(FI_SEND) == 1);
  CHECK(a.count(FI_READ) == 1);
  CHECK(a.holds(6, 100'000, 300'000));
  CHECK(b.done[0].flags == (FI_MSG | FI_RECV));
  CHECK(b.done[0].len == 2000);
  CHECK(b.holds(5, static_cast<size_t>(b.receive_buffer(0) - b.bytes.data()), 2000));
}

TEST_CASE("stand-in of EFA: requests overtake each other, pieces of one too, unless that is turned off") {
  for (const bool reorder : {true, false}) {
    EfaFabric fabric(reorder ? "steps=1,pieces=8" : "steps=1,pieces=8,reorder=0");
    EfaEnd a, b;
    EfaEnd::meet(a, b);
    std::vector<uint64_t> order;
    bool scrambled = false;
    for (uint64_t i = 0; i < 50; ++i) REQUIRE(a.write({&b, 0, i * 64, 64, kImmediate, i}) == 0);
    a.fill(9, 0, 64'000);
    for (size_t i = 1; i <= 8; ++i) REQUIRE(a.write({&b, 0, i * 100'000, 64'000}) == 0);
    REQUIRE(run(a, b, [&] {
      for (size_t i = 1; i <= 8; ++i)
        scrambled |= b.bytes[i * 100'000] == 0xAA && b.bytes[i * 100'000 + 63'999] != 0xAA;
      return a.done.size() == 58 && b.done.size() == 50;
    }));
    for (const fi_cq_data_entry& entry : b.done) order.push_back(entry.data);
    CHECK(std::is_sorted(order.begin(), order.end()) != reorder);
    CHECK(std::set<uint64_t>(order.begin(), order.end()).size() == 50);
    CHECK(scrambled == reorder);
    for (size_t i = 1; i <= 8; ++i) CHECK(b.holds(9, i * 100'000, 64'000));
  }
}

TEST_CASE("stand-in of EFA: FI_MORE holds requests back until one comes without it") {
  EfaFabric fabric;
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  for (int i = 0; i < 3; ++i) REQUIRE(a.write({&b, 0, 0, 64, kImmediate | FI_MORE, 7}) == 0);
  REQUIRE(fabric.command("tick 100") == 0);
  CHECK_FALSE(a.poll());
  CHECK_FALSE(b.poll());
  REQUIRE(a.send(0, 8) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 4 && b.done.size() == 4; }));
}

TEST_CASE("stand-in of EFA: a queue takes as many as it has places, and reading completions makes room") {
  EfaFabric fabric("tx_size=8,rx_size=70");
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  for (int i = 0; i < 8; ++i) REQUIRE(a.write({&b}) == 0);
  CHECK(a.write({&b}) == -FI_EAGAIN);
  CHECK(a.send(0, 8) == -FI_EAGAIN);
  REQUIRE(fabric.command("tick 1000") == 0);
  CHECK(a.write({&b}) == -FI_EAGAIN);  // done, but not read
  CHECK(a.poll());
  CHECK(a.write({&b}) == 0);
  for (size_t i = 64; i < 70; ++i) REQUIRE(a.receive(i) == 0);
  CHECK(a.receive(70) == -FI_EAGAIN);
  fabric.set("eagain=1");
  CHECK(b.write({&a}) == -FI_EAGAIN);
  CHECK(b.receive(64) == 0);
}

TEST_CASE("stand-in of EFA: an address has one handle, however often it is inserted, and goes at the first removal") {
  EfaFabric fabric;
  fabric.tolerate();
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  fi_addr_t again = a.insert(b);
  CHECK(again == a.peer);
  CHECK(fi_av_remove(a.objects.addresses.get(), &again, 1, 0) == 0);
  CHECK(a.write({&b}) == -FI_EINVAL);
  CHECK(fabric.violated("not in the address vector"));
  CHECK(fi_av_remove(a.objects.addresses.get(), &again, 1, 0) == -FI_EINVAL);
  CHECK(fabric.violated("fi_av_remove"));
}

TEST_CASE("stand-in of EFA: who sleeps is woken by what comes, and never sleeps over work of its own") {
  EfaFabric fabric;
  EfaEnd a({.wait = FI_WAIT_FD}), b({.wait = FI_WAIT_FD});
  EfaEnd::meet(a, b);
  int descriptor = -1;
  REQUIRE(fi_control(&b.objects.queue->fid, FI_GETWAIT, &descriptor) == 0);
  fid* queue = &b.objects.queue->fid;
  const auto may_sleep = [&] { return fi_trywait(b.objects.fabric.get(), &queue, 1); };
  pollfd entry{descriptor, POLLIN, 0};
  REQUIRE(may_sleep() == 0);
  CHECK(::poll(&entry, 1, 0) == 0);
  REQUIRE(a.write({&b, 0, 0, 64, kImmediate, 1}) == 0);
  REQUIRE(run(a, a, [&] { return a.done.size() == 1; }));
  CHECK(::poll(&entry, 1, 0) == 1);
  CHECK(may_sleep() == -FI_EAGAIN);
  CHECK(b.poll());
  CHECK(may_sleep() == 0);
  CHECK(::poll(&entry, 1, 0) == 0);
  REQUIRE(fabric.command("silence -2") == 0);  // a's
  REQUIRE(b.write({&a}) == 0);
  CHECK(may_sleep() == -FI_EAGAIN);  // until it is given up
  REQUIRE(run(a, b, [&] { return b.failure() == 13; }));
  CHECK(may_sleep() == 0);

  fabric.set("wait_fd=0");
  fi_cq_attr attributes{};
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* refused = nullptr;
  CHECK(fi_cq_open(a.objects.domain.get(), &attributes, &refused, nullptr) == -FI_ENOSYS);
}

TEST_CASE("stand-in of EFA: free endpoints complete writes that they do not carry out, and carry out everything else") {
  EfaFabric fabric("free=1");
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  a.fill(1, 0, 64);
  EfaContext context;
  const EfaContext untouched = context;
  REQUIRE(a.write({.target = &b, .context = &context}) == 0);
  CHECK(context == untouched);
  REQUIRE(a.poll());
  CHECK(a.done[0].op_context == &context);
  CHECK(b.bytes[0] == 0xAA);
  REQUIRE(a.send(0, 64) == 0);
  REQUIRE(run(a, b, [&] { return b.done.size() == 1 && a.done.size() == 2; }));
}

TEST_CASE("stand-in of EFA: the fabric efa keeps the order of sends, wants no contexts and takes any length") {
  EfaFabric fabric("max_rma=1000");
  EfaEnd a({.fabric = "efa"}), b({.device = 1, .fabric = "efa"});
  CHECK(a.info->mode == 0);
  CHECK((a.info->domain_attr->mr_mode & FI_MR_LOCAL) == 0);
  EfaEnd::meet(a, b);
  EfaContext context;
  const EfaContext untouched = context;
  for (size_t i = 0; i < 50; ++i) {
    a.bytes[i * 8] = static_cast<uint8_t>(i);
    REQUIRE(a.send(i * 8, 8, &context) == 0);
  }
  a.fill(2, 1000, 50'000);
  REQUIRE(a.write({&b, 1000, 1000, 50'000, kImmediate, 1, &context}) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 51 && b.done.size() == 51; }));
  CHECK(context == untouched);
  CHECK(b.holds(2, 1000, 50'000));
  size_t next = 0;
  for (const fi_cq_data_entry& entry : b.done) {
    if ((entry.flags & FI_RECV) == 0) continue;
    CHECK(*b.receive_buffer(next) == next);
    ++next;
  }
  CHECK(next == 50);
}

}  // namespace
}  // namespace te::test
#endif
