// The cx7 provider without an engine, over the stand-in for libibverbs.
#include <doctest/doctest.h>

#if __has_include(<infiniband/verbs.h>)
#include <algorithm>
#include <memory>

#include "cx7/provider.h"
#include "native/provider.h"
#include "native/system.h"
#include "tests/native/verbs_support.h"

namespace te::cx7 {
namespace {

using test::Fabric;

struct Side {
  explicit Side(const char* device) {
    te_settings settings{};
    te_settings_defaults(&settings);
    ProviderOptions options;
    options.transport = "cx7";
    options.nics = {device};
    options.rdma = settings.rdma;
    options.generation = 1;
    const Error error = open_provider(options, &provider);
    REQUIRE_MESSAGE(error.ok(), error.message());
    REQUIRE(provider->register_memory(0, {memory.data(), memory.size(), TE_DEVICE_HOST, 0}, &key).ok());
  }
  ~Side() { CHECK(provider->deregister_memory(0, key).ok()); }

  void poll() {
    Completion out[16];
    for (uint32_t i = 0, count = provider->poll(0, out); i < count; ++i) seen.push_back(out[i]);
  }
  size_t count(CompletionKind kind) const {
    return static_cast<size_t>(
        std::count_if(seen.begin(), seen.end(), [kind](const Completion& c) { return c.kind == kind; }));
  }
  WorkRequest write(Side& target, uint64_t length, WorkContext* context) {
    WorkRequest request;
    request.path = path;
    request.local = memory.data();
    request.local_key = key.local_key;
    request.length = length;
    request.remote_address = target.key.base;
    request.remote_key = target.key.remote_key;
    request.context = context;
    return request;
  }

  std::unique_ptr<Provider> provider;
  std::vector<uint8_t> memory = std::vector<uint8_t>(1 << 16);
  MemoryKey key;
  PathId path = kNoPath;
  std::vector<Completion> seen;
  WorkContext contexts[64];
};

template <typename Condition>
bool until(Side& a, Side& b, const Condition& condition) {
  const int64_t deadline = now_ns() + 20'000'000'000;
  while (!condition() && now_ns() < deadline) {
    a.poll();
    b.poll();
  }
  return condition();
}

void join(Side& a, Side& b) {
  REQUIRE(a.provider->open_path(0, b.provider->nic(0).address, 1, &a.path).ok());
  REQUIRE(b.provider->open_path(0, a.provider->nic(0).address, 1, &b.path).ok());
  REQUIRE(until(a, b, [&] { return a.count(CompletionKind::kPathUp) == 1 && b.count(CompletionKind::kPathUp) == 1; }));
}

}  // namespace

TEST_CASE("cx7 provider: an immediate whose write has completed is not lost when the receiver closes the path") {
  Fabric fabric;
  Side a("standin0"), b("standin1");
  join(a, b);
  WorkRequest requests[3];
  for (uint32_t i = 0; i < 3; ++i) {
    requests[i] = a.write(b, 100, &a.contexts[i]);
    requests[i].opcode = Opcode::kWriteImmediate;
    requests[i].immediate = 7 + i;
    requests[i].more = i < 2;
  }
  REQUIRE(a.provider->post(0, requests).posted == 3);
  for (int i = 0; i < 10'000 && a.count(CompletionKind::kSent) < 3; ++i) a.poll();
  REQUIRE(a.count(CompletionKind::kSent) == 3);
  b.provider->close_path(0, b.path);
  REQUIRE(until(a, b, [&] { return b.count(CompletionKind::kImmediate) == 3; }));
  CHECK(fabric.v.statistic("discarded") == 0);
}

TEST_CASE("cx7 provider: the buffer of a message comes back when the path is closed") {
  Fabric fabric;
  Side a("standin0"), b("standin1");
  join(a, b);
  REQUIRE(b.provider->post_receive(0, b.memory.data() + 4096, 4096, b.key.local_key, &b.contexts[5]).posted == 1);
  WorkRequest request = a.write(b, 100, &a.contexts[0]);
  request.opcode = Opcode::kSend;
  REQUIRE(a.provider->post(0, std::span(&request, 1)).posted == 1);
  for (int i = 0; i < 10'000 && a.count(CompletionKind::kSent) < 1; ++i) a.poll();
  REQUIRE(a.count(CompletionKind::kSent) == 1);
  b.provider->close_path(0, b.path);
  REQUIRE(until(a, b, [&] { return b.count(CompletionKind::kReceived) == 1; }));
  CHECK(fabric.v.statistic("discarded") == 0);
}

TEST_CASE("cx7 provider: without its datagram queue pair a NIC says so, keeps its connections and does not spin") {
  Fabric fabric;
  Side a("standin0"), b("standin1");
  join(a, b);
  fabric.command("kill_ud 0");
  REQUIRE(until(a, b, [&] { return !a.provider->nic(0).up; }));
  CHECK(std::string(a.provider->nic(0).state).find("datagram") != std::string::npos);
  WorkRequest request = a.write(b, 100, &a.contexts[0]);
  REQUIRE(a.provider->post(0, std::span(&request, 1)).posted == 1);
  REQUIRE(until(a, b, [&] { return a.count(CompletionKind::kSent) == 1; }));
  CHECK(a.seen.back().status == Status::kOk);
  // Each of its 128 receives, and of the datagrams that it was sending (64 at most), is flushed once, and none is posted again.
  for (int i = 0; i < 10'000; ++i) a.poll();
  CHECK(fabric.v.statistic("error_completions") <= 128 + 64);
}

TEST_CASE("cx7 provider: a path that is reset ends what it carried, and the other side hears of it") {
  Fabric fabric;
  Side a("standin0"), b("standin1");
  join(a, b);
  for (uint32_t i = 0; i < 8; ++i) {
    WorkRequest request = a.write(b, 1000, &a.contexts[i]);
    REQUIRE(a.provider->post(0, std::span(&request, 1)).posted == 1);
  }
  REQUIRE(a.provider->reset_path(0, a.path).ok());
  REQUIRE(until(a, b, [&] { return a.count(CompletionKind::kSent) == 8 && a.count(CompletionKind::kPathDown) == 1; }));
  REQUIRE(until(a, b, [&] { return b.count(CompletionKind::kPathDown) == 1; }));
  WorkRequest request = a.write(b, 10, &a.contexts[0]);
  CHECK(a.provider->post(0, std::span(&request, 1)).provider_status == ENOTCONN);
  a.provider->close_path(0, a.path);
  b.provider->close_path(0, b.path);
  a.seen.clear();
  b.seen.clear();
  join(a, b);
}

}  // namespace te::cx7
#endif
