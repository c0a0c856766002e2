// The rules of efa-direct, each broken once: what a program must not do, and what the device answers.
#if __has_include(<rdma/fabric.h>)
#include <sys/wait.h>

#include <csignal>
#include <utility>

#include "tests/native/fabric_support.h"

namespace te::test {
namespace {

constexpr uint64_t kImmediate = FI_REMOTE_CQ_DATA;

TEST_CASE("stand-in of EFA: a breach of a rule ends the process, unless a test tolerates it") {
  EfaFabric fabric("quiet=1");
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, [](int) { _exit(1); });  // no report of a crash
    EfaEnd a;
    a.peer = a.insert(a);
    (void)a.send(0, 8193);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status != 0);
}

TEST_CASE("stand-in of EFA: only who speaks efa-direct's modes is offered it, after the fabric efa") {
  EfaFabric fabric;
  const efa::Library* library = nullptr;
  REQUIRE(efa::load_library(&library).ok());
  const int all = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  const struct {
    uint64_t caps, mode, order;
    int memory;
    size_t direct, other;
  } cases[] = {
      {FI_RMA | FI_MSG, FI_CONTEXT2 | FI_RX_CQ_DATA, 0, all, 16, 16},
      {FI_RMA | FI_MSG, FI_RX_CQ_DATA, 0, all, 0, 16},
      {FI_RMA | FI_MSG, FI_CONTEXT2, 0, all, 0, 16},
      {FI_RMA | FI_MSG, FI_CONTEXT2 | FI_RX_CQ_DATA, 0, all & ~FI_MR_LOCAL, 0, 16},
      {FI_RMA | FI_MSG, FI_CONTEXT2 | FI_RX_CQ_DATA, FI_ORDER_SAS, all, 0, 16},
      {FI_RMA | FI_MSG, FI_CONTEXT2 | FI_RX_CQ_DATA, 0, all & ~FI_MR_PROV_KEY, 0, 0},
      {FI_RMA | FI_RMA_EVENT, FI_CONTEXT2 | FI_RX_CQ_DATA, 0, all, 0, 0},
      {FI_RMA | FI_HMEM, FI_CONTEXT2 | FI_RX_CQ_DATA, 0, all, 0, 0},
  };
  for (const auto& each : cases) {
    const efa::InfoPtr hints(library->dupinfo(nullptr), efa::FreeInfo{library});
    hints->caps = each.caps;
    hints->mode = each.mode;
    hints->tx_attr->msg_order = each.order;
    hints->domain_attr->mr_mode = each.memory;
    hints->fabric_attr->prov_name = strdup("efa");
    fi_info* list = nullptr;
    const int status = library->getinfo(FI_VERSION(1, 18), nullptr, nullptr, 0, hints.get(), &list);
    CHECK(status == (each.direct + each.other > 0 ? 0 : -FI_ENODATA));
    size_t direct = 0, other = 0;
    for (const fi_info* info = list; info != nullptr; info = info->next) {
      const bool is_direct = std::string(info->fabric_attr->name) == "efa-direct";
      if (!is_direct) CHECK(direct == 0);
      ++(is_direct ? direct : other);
      CHECK(info->domain_attr->mr_key_size == 4);
      CHECK(info->domain_attr->cq_data_size == 4);
    }
    CHECK(direct == each.direct);
    CHECK(other == each.other);
    library->freeinfo(list);
  }
}

TEST_CASE("stand-in of EFA: a context is the provider's until its completion is read") {
  EfaFabric fabric;
  fabric.tolerate();
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  EfaContext context;
  const EfaContext untouched = context;
  REQUIRE(a.write({.target = &b, .context = &context}) == 0);
  CHECK_FALSE(context == untouched);  // it is used
  CHECK(a.write({.target = &b, .context = &context}) == -FI_EINVAL);
  CHECK(fabric.violated("belongs to a request"));
  CHECK(a.send(0, 8, &a.receive_contexts[0]) == -FI_EINVAL);  // that of a receive
  CHECK(fabric.violated("belongs to a request"));
  REQUIRE(run(a, b, [&] { return a.done.size() == 1; }));
  REQUIRE(a.write({.target = &b, .context = &context}) == 0);
  context.provider.internal[3] = &context;
  REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
  CHECK(fabric.violated("wrote into the context"));
  CHECK(fi_send(a.objects.endpoint.get(), a.bytes.data(), 8, fi_mr_desc(a.memory.get()), a.peer, nullptr) ==
        -FI_EINVAL);
  CHECK(fabric.violated("FI_CONTEXT2"));
}

TEST_CASE("stand-in of EFA: every range has the descriptor of a region that covers it, even an empty one") {
  EfaFabric fabric;
  fabric.tolerate();
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  fid_ep* endpoint = a.objects.endpoint.get();
  auto part = a.open_region(a.bytes.data(), 100);
  void* stale = fi_mr_desc(part.get());
  const auto blind = a.open_region(a.bytes.data(), 4096, FI_RECV | FI_REMOTE_WRITE);
  const auto foreign = b.open_region(a.bytes.data(), 4096);
  const auto refused = [&](void* descriptor, size_t length) {
    CHECK(fi_send(endpoint, a.bytes.data(), length, descriptor, a.peer, a.context()) == -FI_EINVAL);
    return fabric.violated("FI_MR_LOCAL");
  };
  CHECK(refused(nullptr, 8));
  CHECK(refused(nullptr, 0));
  CHECK(refused(stale, 101));
  CHECK(refused(fi_mr_desc(blind.get()), 8));
  CHECK(refused(fi_mr_desc(foreign.get()), 8));
  part.reset();
  CHECK(refused(stale, 8));
  CHECK(a.write({.target = &b, .local = blind.get()}) == -FI_EINVAL);
  CHECK(fabric.violated("FI_MR_LOCAL"));
  CHECK(fi_recv(endpoint, a.bytes.data(), 64, nullptr, FI_ADDR_UNSPEC, a.context()) == -FI_EINVAL);
  CHECK(fabric.violated("FI_MR_LOCAL"));
}

TEST_CASE("stand-in of EFA: lengths, keys, immediates, ranges and flags beyond what the device takes") {
  EfaFabric fabric("max_rma=100000");
  fabric.tolerate();
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  fid_ep* endpoint = a.objects.endpoint.get();
  void* descriptor = fi_mr_desc(a.memory.get());
  REQUIRE(a.send(0, 8192) == 0);
  CHECK(a.send(0, 8193) == -FI_EINVAL);
  CHECK(fabric.violated("FI_OPT_MAX_MSG_SIZE"));
  REQUIRE(a.write({&b, 0, 0, 100'000}) == 0);
  CHECK(a.write({&b, 0, 0, 100'001}) == -FI_EINVAL);
  CHECK(fabric.violated("FI_OPT_MAX_RMA_SIZE"));
  CHECK(a.write({&b, 0, 0, 8, kImmediate, uint64_t{1} << 32}) == -FI_EINVAL);
  CHECK(fabric.violated("immediate of more than 4 bytes"));
  CHECK(a.write({&b, 0, 0, 8, FI_INJECT}) == -FI_EINVAL);
  CHECK(fabric.violated("FI_INJECT"));
  CHECK(a.write({&b, 0, 0, 8, FI_FENCE}) == -FI_EINVAL);
  CHECK(fabric.violated("flags"));
  CHECK(fi_write(endpoint, a.bytes.data(), 8, descriptor, a.peer, 0, uint64_t{1} << 32, a.context()) == -FI_EINVAL);
  CHECK(fabric.violated("key of more than 4 bytes"));
  CHECK(fi_inject_write(endpoint, a.bytes.data(), 8, a.peer, 0, 0) == -FI_ENOSYS);
  CHECK(fabric.violated("inject"));
  const iovec two[2] = {{a.bytes.data(), 4}, {a.bytes.data() + 8, 4}};
  void* descriptors[2] = {descriptor, descriptor};
  const fi_rma_iov remote{reinterpret_cast<uint64_t>(b.bytes.data()), 8, fi_mr_key(b.memory.get())};
  const fi_msg_rma message{two, descriptors, 2, a.peer, &remote, 1, a.context(), 0};
  CHECK(fi_writemsg(endpoint, &message, 0) == -FI_EINVAL);
  CHECK(fabric.violated("one local and one remote range"));
  REQUIRE(run(a, b, [&] { return a.done.size() == 2; }));
}

TEST_CASE("stand-in of EFA: a full queue loses what FI_MORE held back, and a full completion queue is the end of it") {
  EfaFabric fabric("tx_size=4");
  fabric.tolerate();
  EfaEnd a, b({.entries = 4});
  EfaEnd::meet(a, b);
  for (int i = 0; i < 4; ++i) REQUIRE(a.write({&b, 0, 0, 8, FI_MORE}) == 0);
  CHECK(a.write({&b}) == -FI_EAGAIN);
  CHECK(fabric.violated("held back by FI_MORE"));

  EfaEnd c;
  c.peer = c.insert(b);
  (void)b.insert(c);
  for (int i = 0; i < 5; ++i) {
    REQUIRE(c.send(0, 8) == 0);
    REQUIRE(run(c, c, [&] { return c.done.size() == static_cast<size_t>(i) + 1; }));
  }
  CHECK(fabric.violated("overran"));
  fi_cq_data_entry entry{};
  CHECK(fi_cq_read(b.objects.queue.get(), &entry, 1) == -FI_EIO);
}

TEST_CASE("stand-in of EFA: what others stand on cannot be closed, and endpoints must be enabled") {
  EfaFabric fabric;
  fabric.tolerate();
  EfaEnd a;
  CHECK(fi_close(&a.objects.queue->fid) == -FI_EBUSY);
  CHECK(fabric.violated("completion queue"));
  CHECK(fi_close(&a.objects.addresses->fid) == -FI_EBUSY);
  CHECK(fabric.violated("address vector"));
  CHECK(fi_close(&a.objects.domain->fid) == -FI_EBUSY);
  CHECK(fabric.violated("domain"));
  CHECK(fi_close(&a.objects.fabric->fid) == -FI_EBUSY);
  CHECK(fabric.violated("fabric"));
  fid_ep* made = nullptr;
  REQUIRE(fi_endpoint(a.objects.domain.get(), a.info.get(), &made, nullptr) == 0);
  const efa::FidPtr<fid_ep> endpoint(made);
  CHECK(fi_send(made, a.bytes.data(), 8, fi_mr_desc(a.memory.get()), 0, a.context()) == -FI_EOPBADSTATE);
  CHECK(fabric.violated("not enabled"));
  CHECK(fi_enable(made) == -FI_ENOAV);
}

// --- what the device answers -----------------------------------------------------------------------------------------

TEST_CASE("stand-in of EFA: keys and ranges are enforced at the target, and what they refuse has not landed") {
  EfaFabric fabric;
  EfaEnd a, b, stranger;
  EfaEnd::meet(a, b);
  auto gone = b.open_region(b.bytes.data(), 4096);
  const auto read_only = b.open_region(b.bytes.data(), 4096, FI_REMOTE_READ);
  const auto small = b.open_region(b.bytes.data() + 64, 64);
  const auto foreign = stranger.open_region(b.bytes.data(), 4096);
  const auto answer = [&](size_t to, size_t length, fid_mr* region) {
    REQUIRE(a.write({.target = &b, .to = to, .length = length, .flags = kImmediate, .remote = region}) == 0);
    if (region == gone.get()) gone.reset();  // before it is executed
    REQUIRE(run(a, b, [&] { return !a.errors.empty(); }));
    CHECK(a.errors.back().err == FI_EINVAL);
    return a.failure();
  };
  CHECK(answer(0, 64, read_only.get()) == 7);
  CHECK(answer(64, 65, small.get()) == 7);
  CHECK(answer(63, 8, small.get()) == 7);
  CHECK(answer(0, 64, foreign.get()) == 7);
  CHECK(answer(0, 64, gone.get()) == 7);
  CHECK(b.done.empty());
  for (size_t i = 0; i < 4096; ++i) REQUIRE((b.bytes[i] == 0xAA || (i >= 64 && i < 128)));
}

TEST_CASE("stand-in of EFA: a local region that is closed under a request is the request's error") {
  EfaFabric fabric;
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  auto local = a.open_region(a.bytes.data(), 64);
  REQUIRE(a.write({.target = &b, .local = local.get()}) == 0);
  local.reset();
  REQUIRE(run(a, b, [&] { return !a.errors.empty(); }));
  CHECK(a.failure() == 5);
  CHECK(b.bytes[0] == 0xAA);
}

TEST_CASE("stand-in of EFA: RDMA of an initiator that the target does not know is refused, a message is not") {
  EfaFabric fabric;
  EfaEnd a, b;
  a.peer = a.insert(b);
  REQUIRE(a.write({&b}) == 0);
  REQUIRE(a.send(0, 8) == 0);
  REQUIRE(run(a, b, [&] { return !a.errors.empty() && b.done.size() == 1; }));
  CHECK(a.failure() == 14);
  CHECK(fabric.statistic("unknown_peer") == 1);
  CHECK(b.bytes[0] == 0xAA);
  (void)b.insert(a);
  REQUIRE(a.write({&b}) == 0);
  REQUIRE(run(a, b, [&] { return a.count(FI_WRITE) == 1; }));
}

TEST_CASE("stand-in of EFA: without a receive messages and immediates wait, and in the end fail") {
  EfaFabric fabric("rnr_retries=20,rnr_ticks=10");
  for (const bool immediate : {false, true}) {
    EfaEnd a, b({.receives = 0});
    EfaEnd::meet(a, b);
    const auto post = [&] { return immediate ? a.write({&b, 0, 0, 8, kImmediate, 3}) : a.send(0, 8); };
    REQUIRE(post() == 0);
    REQUIRE(run(a, b, [&] { return fabric.statistic("rnr") > 5; }));
    REQUIRE(b.receive(0) == 0);
    REQUIRE(run(a, b, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
    REQUIRE(post() == 0);
    REQUIRE(run(a, b, [&] { return !a.errors.empty(); }));
    CHECK(a.errors.back().err == FI_ENORX);
    CHECK(a.failure() == 10);
    CHECK(fabric.command("reset") == 0);
    fabric.set("rnr_retries=20,rnr_ticks=10");
  }
}

TEST_CASE("stand-in of EFA: peers that are gone, silent, cut off or on a lost device") {
  EfaFabric fabric("retry_ticks=50");
  EfaEnd a;
  const auto answer = [&](EfaEnd& b) {
    REQUIRE(a.write({&b}) == 0);
    REQUIRE(run(a, a, [&] { return !a.errors.empty(); }));
    CHECK(b.bytes[0] == 0xAA);
    return a.failure();
  };
  {
    EfaEnd b({.device = 1});
    EfaEnd::meet(a, b);
    REQUIRE(fabric.command("cut 0 1") == 0);
    CHECK(answer(b) == 13);
    REQUIRE(fabric.command("join 0 1") == 0);
    REQUIRE(fabric.command("silence -1") == 0);
    CHECK(answer(b) == 13);
    b.objects.endpoint.reset();
    CHECK(answer(b) == 9);
  }
  EfaEnd again({.device = 1});  // the same queue pair number, another key
  REQUIRE(a.write({&again}) == 0);
  REQUIRE(run(a, a, [&] { return !a.errors.empty(); }));
  CHECK(a.failure() == 9);
  EfaEnd::meet(a, again);
  REQUIRE(fabric.command("lose 1") == 0);
  CHECK(answer(again) == 13);
  CHECK(again.write({&a}) == -FI_EIO);
  fi_cq_data_entry entry{};
  CHECK(fi_cq_read(again.objects.queue.get(), &entry, 1) == -FI_EIO);
}

TEST_CASE("stand-in of EFA: injected errors come before or after the bytes, registrations and posts fail on demand") {
  EfaFabric fabric;
  EfaEnd a, b;
  EfaEnd::meet(a, b);
  a.fill(1, 0, 64);
  REQUIRE(fabric.command("error 2 13") == 0);
  for (size_t i = 0; i < 3; ++i) REQUIRE(a.write({&b, 0, i * 64}) == 0);
  REQUIRE(run(a, b, [&] { return a.done.size() == 2 && a.errors.size() == 1; }));
  CHECK(a.failure() == 13);
  CHECK(b.holds(1, 0, 64));
  CHECK(b.bytes[64] == 0xAA);
  CHECK(b.holds(1, 128, 64));
  REQUIRE(fabric.command("error 1 8 landed") == 0);
  REQUIRE(a.write({&b, 0, 256, 64, kImmediate, 1}) == 0);
  REQUIRE(run(a, b, [&] { return a.errors.size() == 1; }));
  CHECK(a.failure() == 8);
  CHECK(b.holds(1, 256, 64));
  CHECK(b.done.size() == 1);
  REQUIRE(fabric.command("reg_fail 1") == 0);
  fid_mr* region = nullptr;
  CHECK(fi_mr_reg(a.objects.domain.get(), a.bytes.data(), 64, FI_SEND, 0, 0, 0, &region, nullptr) == -FI_ENOMEM);
  REQUIRE(fabric.command("refuse 2") == 0);
  CHECK(a.write({&b}) == -FI_EAGAIN);
  CHECK(a.send(0, 8) == -FI_EAGAIN);
  CHECK(a.write({&b}) == 0);
  CHECK(fabric.command("no such thing") != 0);
  CHECK(fabric.command("set seed=x") != 0);
}

TEST_CASE("stand-in of EFA: what a closed endpoint was sending may still land") {
  EfaFabric fabric("ghosts=1");
  EfaEnd b;
  {
    EfaEnd a;
    EfaEnd::meet(a, b);
    a.fill(4, 0, 4096);
    REQUIRE(a.write({&b, 0, 0, 4096}) == 0);
    a.objects.endpoint.reset();
  }
  CHECK(b.holds(4, 0, 4096));
  CHECK(fabric.statistic("ghosts") == 1);
}

}  // namespace
}  // namespace te::test
#endif
