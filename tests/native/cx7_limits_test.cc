// Devices that are smaller than what the transport would like.
#include <doctest/doctest.h>

#if __has_include(<infiniband/verbs.h>)
#include "cx7/limits.h"
#include "tests/native/engine_support.h"
#include "tests/native/verbs_support.h"

namespace te::engine_test {
namespace {

using cx7::fit_queues;
using cx7::QueueSizes;
using test::Fabric;

ibv_device_attr large() {
  ibv_device_attr device{};
  device.max_qp = device.max_cq = device.max_srq = 1 << 16;
  device.max_qp_wr = device.max_srq_wr = 32768;
  device.max_cqe = 1 << 22;
  device.max_sge = device.max_srq_sge = 30;
  return device;
}

constexpr uint32_t kOwn = 8;  // entries that the engine keeps for requests of its own, beside those of its depth

// What proxy/worker.cc grants its peers of what it was told.
uint32_t immediates(const QueueSizes& q) {
  const uint32_t own = std::min(q.sends - 1 + kOwn, q.granted / 2);
  return (q.granted - own) / 2;
}

}  // namespace

TEST_CASE("pure: a large device gets the queues that were wished for") {
  QueueSizes q;
  REQUIRE(fit_queues("nic", large(), 0, 0, &q).ok());
  CHECK(q.sends == 512);
  CHECK(q.completions == 2048);
  CHECK(q.incoming == 128);
  CHECK(q.outgoing == 64);
  REQUIRE(fit_queues("nic", large(), 1000, 30'000, &q).ok());
  CHECK(q.sends == 1024);
  CHECK(q.completions == 30'000);
  CHECK(q.granted == q.completions);
}

TEST_CASE(
    "pure: no queue of any device that is not refused can overrun, and no more receives are promised than there are") {
  Random random(7);
  int fitted = 0;
  for (int round = 0; round < scaled(20'000); ++round) {
    ibv_device_attr device = large();
    for (int* limit : {&device.max_qp_wr, &device.max_srq_wr, &device.max_cqe})
      if (random.below(3) != 0) *limit = static_cast<int>(random.below(uint64_t{1} << random.below(18)));
    const auto sends = static_cast<uint32_t>(random.below(2) * random.below(3000));
    const auto completions = static_cast<uint32_t>(random.below(2) * random.below(32'768));
    QueueSizes q;
    if (!fit_queues("nic", device, sends, completions, &q).ok()) continue;
    ++fitted;
    CAPTURE(device.max_qp_wr);
    CAPTURE(device.max_srq_wr);
    CAPTURE(device.max_cqe);
    CAPTURE(sends);
    CAPTURE(completions);
    REQUIRE(q.sends >= 16);
    REQUIRE(q.receives >= 16);
    REQUIRE(q.sends <= static_cast<uint32_t>(device.max_qp_wr));
    REQUIRE(q.receives <= static_cast<uint32_t>(device.max_srq_wr));
    REQUIRE(q.completions <= static_cast<uint32_t>(device.max_cqe));
    REQUIRE(q.sends + 2 * q.receives <= q.completions);
    REQUIRE(q.incoming >= 16);
    REQUIRE(q.outgoing >= 8);
    REQUIRE(q.incoming <= static_cast<uint32_t>(device.max_qp_wr));
    REQUIRE(q.outgoing <= static_cast<uint32_t>(device.max_qp_wr));
    REQUIRE(q.incoming + q.outgoing <= q.datagram_entries);
    REQUIRE(q.datagram_entries <= static_cast<uint32_t>(device.max_cqe));
    REQUIRE(immediates(q) <= q.receives);
    REQUIRE(immediates(q) >= 8);
  }
  CHECK(fitted > 1000);
}

TEST_CASE("pure: a device that is too small is refused by its name, the limit and what is needed") {
  struct Case {
    int ibv_device_attr::* limit;
    int value;
    const char* name;
  };
  for (const Case& c :
       {Case{&ibv_device_attr::max_qp, 2, "max_qp = 2"}, Case{&ibv_device_attr::max_cq, 1, "max_cq = 1"},
        Case{&ibv_device_attr::max_srq, 0, "max_srq = 0"}, Case{&ibv_device_attr::max_sge, 0, "max_sge = 0"},
        Case{&ibv_device_attr::max_srq_sge, 0, "max_srq_sge = 0"},
        Case{&ibv_device_attr::max_qp_wr, 15, "max_qp_wr = 15"},
        Case{&ibv_device_attr::max_srq_wr, 15, "max_srq_wr = 15"}, Case{&ibv_device_attr::max_cqe, 63, "max_cqe = 63"},
        Case{&ibv_device_attr::max_cqe, -1, "max_cqe = -1"}}) {
    CAPTURE(std::string(c.name));
    ibv_device_attr device = large();
    device.*c.limit = c.value;
    QueueSizes q;
    const Error error = fit_queues("mlx5_7", device, 0, 0, &q);
    CHECK(error.status() == Status::kTransportUnavailable);
    CHECK(error.message().find("mlx5_7") != std::string::npos);
    CHECK(error.message().find(c.name) != std::string::npos);
    CHECK(error.message().find("at least") != std::string::npos);
    CHECK(q.sends == 0);
  }
}

TEST_CASE("cx7 engine: writes, immediates and messages get through devices with the smallest queues") {
  for (const char* limits :
       {"max_qp_wr=16", "max_qp_wr=100", "max_cqe=64", "max_cqe=300", "max_srq_wr=16", "max_sge=1,max_inline=0",
        "max_qp_wr=16,max_cqe=64,max_srq_wr=16,max_sge=1,max_inline=0,max_rd_atom=1,max_srq=2"}) {
    CAPTURE(std::string(limits));
    Fabric fabric(limits);
    Pair pair({"cx7", "", 2, {}, 0}, {"cx7", "", 2, {}, 8});
    uint64_t expected = 0;
    for (int round = 0; round < 3; ++round) {
      std::vector<Transfer> transfers;
      pair.target.poison();
      for (uint64_t i = 0; i < 200; ++i) transfers.push_back(pair.write(i * 64, i * 64, i % 64));
      transfers.push_back(pair.write(16'384, 16'384, 40'000));
      for (Transfer& transfer : transfers) require_ok(std::move(transfer));
      expected += 201;
      REQUIRE(pair.owner.counted(pair.counter, expected));
      for (uint64_t i = 0; i < 200; ++i) CHECK(pair.target.holds(i * 64, pair.source.data() + i * 64, i % 64, 0));
      CHECK(pair.landed(16'384, 16'384, 40'000));
    }
  }
}

TEST_CASE("cx7 engine: a device that is too small is refused at open, and nothing of it is kept") {
  Fabric fabric("max_srq_wr=8");
  te_settings settings{};
  te_settings_defaults(&settings);
  settings.transport = "cx7";
  settings.nics = "standin0";
  te_engine* engine = nullptr;
  te_error error{};
  CHECK(te_engine_open(&settings, &engine, &error) == TE_ERR_TRANSPORT_UNAVAILABLE);
  CHECK(engine == nullptr);
  CHECK(error.nic == 0);
  CHECK(std::string(error.message).find("standin0") != std::string::npos);
  CHECK(std::string(error.message).find("max_srq_wr = 8") != std::string::npos);
}

}  // namespace te::engine_test
#endif
