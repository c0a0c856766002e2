// The provider of transport efa over the stand-in for libfabric: what only EFA demands.
#if __has_include(<rdma/fabric.h>)
#include <memory>

#include "efa/provider.h"
#include "native/system.h"
#include "tests/native/efa_support.h"
#include "tests/native/fabric_support.h"

namespace te::test {
namespace {

Error open_error(const ProviderOptions& options) {
  std::unique_ptr<Provider> provider;
  return efa::open_provider(options, &provider);
}

TEST_CASE("efa over the stand-in: the provider is efa-direct where there is one, and knows what it promises") {
  EfaFabric fabric("tx_size=77,rx_size=300,max_rma=123456,max_msg=5000");
  Side side("efa");
  const Capabilities& c = side.provider->capabilities();
  CHECK(c.max_write_bytes == 123456);
  CHECK(c.max_send_bytes == 5000);
  CHECK(c.nic_depth == 77);
  CHECK(c.receive_depth == 300);
  CHECK(c.completion_depth >= 77 + 300);
  CHECK_FALSE(c.ordered_writes);
  CHECK_FALSE(c.ordered_sends);
  CHECK(c.delivery_complete);
  CHECK(c.completion_orders);
  CHECK(c.keys_enforced);
  CHECK(c.immediate_consumes_receive);
  CHECK_FALSE(c.device_memory);
  fabric.set("unsolicited=1,hmem=1,wait_fd=0");
  Side other("efa");
  CHECK_FALSE(other.provider->capabilities().immediate_consumes_receive);
  CHECK(other.provider->capabilities().device_memory);
  CHECK(other.provider->wait_fd(0) == -1);
  MemoryKey key;
  CHECK(other.provider->register_memory(0, {other.bytes, 100, TE_DEVICE_CUDA, 0}, &key).ok());
  CHECK(other.provider->deregister_memory(0, key).ok());
}

TEST_CASE("efa over the stand-in: without efa-direct the fabric efa serves, unless it emulates writes") {
  EfaFabric fabric("direct=0");
  {
    Pair pair("efa");
    CHECK(pair.a.provider->capabilities().ordered_sends);
    CHECK_FALSE(pair.a.provider->capabilities().immediate_consumes_receive);
    pair.a.fill(1, 0, 100'000);
    REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 100'000, 9), &pair.b) == 0);
    REQUIRE(pair.run([&] { return pair.b.immediates.size() == 1 && pair.a.sent == 1; }));
    CHECK(pair.b.holds(1, 0, 100'000));
  }
  fabric.set("emulated=1");
  const Error error = open_error(Side::options("efa"));
  CHECK(error.status() == Status::kTransportUnavailable);
  CHECK(error.message().find("emulate") != std::string::npos);
}

TEST_CASE("efa over the stand-in: devices are chosen by name, and one that is not there is named") {
  EfaFabric fabric;
  ProviderOptions options = Side::options("efa");
  options.nics = {"efa3", "efa11-rdm"};
  std::unique_ptr<Provider> provider;
  REQUIRE(efa::open_provider(options, &provider).ok());
  CHECK(provider->nic(0).name == "efa3-rdm");
  CHECK(provider->nic(1).name == "efa11-rdm");
  options.nics = {"efa1", "efa99"};
  const Error error = open_error(options);
  CHECK(error.status() == Status::kConfig);
  CHECK(error.message().find("efa99") != std::string::npos);
  options.nics.clear();
  REQUIRE(efa::open_provider(options, &provider).ok());
  CHECK(provider->nic_count() == 16);
}

TEST_CASE("efa over the stand-in: paths to one address are independent of each other") {
  EfaFabric fabric;
  Pair pair("efa");
  PathId second = kNoPath;
  REQUIRE(pair.a.provider->open_path(0, pair.b.provider->nic(0).address, 1, &second).ok());
  CHECK(second != pair.a.paths[0]);
  pair.a.provider->close_path(0, second);
  REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 64, 1), &pair.b) == 0);
  REQUIRE(pair.run([&] { return pair.b.immediates.size() == 1; }));
  REQUIRE(pair.a.provider->open_path(0, pair.b.provider->nic(0).address, 1, &second).ok());
  pair.a.provider->close_path(0, pair.a.paths[0]);
  pair.a.paths[0] = second;
  REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 64, 2), &pair.b) == 0);
  REQUIRE(pair.run([&] { return pair.b.immediates.size() == 2; }));
}

TEST_CASE("efa over the stand-in: every kind of empty request goes without memory") {
  EfaFabric fabric;
  Pair pair("efa");
  for (const Opcode opcode : {Opcode::kWrite, Opcode::kWriteImmediate, Opcode::kRead, Opcode::kSend}) {
    WorkRequest r = pair.a.request(opcode, 0, 0, 0, 5);
    r.local = nullptr;
    r.local_key = 0;
    REQUIRE(pair.a.post(r, &pair.b) == 0);
  }
  CHECK(pair.run([&] { return pair.a.sent == 4 && pair.b.immediates.size() == 1 && pair.b.messages.size() == 1; }));
  CHECK(pair.a.failures.empty());
}

TEST_CASE("efa over the stand-in: chains with one doorbell, against queues of every length") {
  for (const char* options : {"tx_size=1", "tx_size=2", "tx_size=3", "tx_size=33", "tx_size=64,eagain=0.3"}) {
    EfaFabric fabric(options);
    Pair pair("efa");
    std::vector<WorkRequest> chain;
    size_t posted = 0;
    const size_t count = 2000;
    while (posted < count) {
      chain.clear();
      for (size_t i = 0; i < 32 && posted + i < count; ++i) {
        chain.push_back(pair.a.request(Opcode::kWriteImmediate, 0, 64 * i, 64, static_cast<uint32_t>(posted + i)));
        chain.back().context = &pair.a.contexts[(posted + i) % pair.a.contexts.size()];
        chain.back().more = true;
      }
      chain.back().more = false;
      const PostResult result = pair.a.provider->post(0, chain);
      REQUIRE(result.provider_status == 0);
      posted += result.posted;
      pair.a.step(), pair.b.step();
    }
    REQUIRE(pair.run([&] { return pair.a.sent == count && pair.b.immediates.size() == count; }));
    CHECK(pair.a.failures.empty());
  }
}

TEST_CASE("efa over the stand-in: keys die with their registration, also in the middle of a write") {
  EfaFabric fabric("steps=1,pieces=31");
  size_t refused = 0, half = 0;
  for (int round = 0; round < 40; ++round) {
    Pair pair("efa");
    constexpr size_t kLength = 31 * 64;
    std::memset(pair.b.bytes, 0xEE, kLength);
    pair.a.fill(7, 0, kLength);
    REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, kLength, 1), &pair.b) == 0);
    for (int i = 0; i < round; ++i) pair.a.step();
    REQUIRE(pair.b.provider->deregister_memory(0, pair.b.keys[0]).ok());
    const std::vector<uint8_t> then(pair.b.bytes, pair.b.bytes + kLength);
    REQUIRE(pair.run([&] { return pair.a.sent == 1; }));
    CHECK(std::memcmp(then.data(), pair.b.bytes, kLength) == 0);
    if (pair.a.failures.empty()) {
      CHECK(pair.b.holds(7, 0, kLength));
      continue;
    }
    ++refused;
    CHECK(pair.a.failures[0].status == Status::kRemoteAccess);
    CHECK(pair.a.failures[0].landed_unknown);
    CHECK(pair.b.immediates.empty());
    for (size_t i = 0; i < kLength; i += 64)
      if (pair.b.bytes[i] != 0xEE) {
        ++half;
        break;
      }
  }
  CHECK(refused > 0);
  CHECK(half > 0);
}

TEST_CASE("efa over the stand-in: a NIC whose device is lost says that it is down, and refuses") {
  EfaFabric fabric;
  Pair pair("efa");
  const std::string device = pair.a.provider->nic(0).name;
  REQUIRE(fabric.command("lose " + device.substr(3, device.find('-') - 3)) == 0);
  pair.a.step();
  CHECK_FALSE(pair.a.provider->nic(0).up);
  const WorkRequest r = pair.a.request(Opcode::kWrite, 0, 0, 64);
  CHECK(pair.a.provider->post(0, {&r, 1}).provider_status == EIO);
}

}  // namespace
}  // namespace te::test
#endif
