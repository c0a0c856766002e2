// Faults of the simulated transport: dead keys, errors, lost NICs and peers, partitions, overruns, resets.
#include <algorithm>
#include <cerrno>

#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim::test;

namespace {

WorkRequest with_immediate(WorkRequest request, uint32_t immediate = 1) {
  request.opcode = Opcode::kWriteImmediate;
  request.immediate = immediate;
  return request;
}

}  // namespace

// --- memory ---------------------------------------------------------------------------------------------------------

TEST_CASE("sim keys: accesses outside the registration or with a wrong key fail and touch nothing") {
  Player a("max_write=65536"), b("", 0, 1, 4096);
  a.fill(0, 65536, 1);
  const PathId path = a.path_to(b);
  const auto status = [&](auto change) {
    WorkRequest request = with_immediate(a.write(path, b, 0, 0, 0, 64));
    change(request);
    a.post_ok(request);
    const Completion done = a.one();
    CHECK_FALSE(done.landed_unknown);
    return done.status;
  };
  CHECK(status([](WorkRequest& r) { r.remote_address += 4096 - 63; }) == Status::kRemoteAccess);
  CHECK(status([](WorkRequest& r) { r.remote_address -= 1; }) == Status::kRemoteAccess);
  CHECK(status([](WorkRequest& r) { r.remote_address = ~uint64_t{0} - 10; }) == Status::kRemoteAccess);
  CHECK(status([](WorkRequest& r) { r.length = 4097; }) == Status::kRemoteAccess);
  CHECK(status([](WorkRequest& r) { r.remote_key ^= 1; }) == Status::kRemoteAccess);
  CHECK(status([](WorkRequest& r) { r.remote_key |= uint64_t{1} << 32; }) == Status::kRemoteAccess);
  CHECK(status([&](WorkRequest& r) { r.remote_key = b.keys[0].local_key; }) == Status::kRemoteAccess);
  CHECK(status([&](WorkRequest& r) { r.opcode = Opcode::kRead, r.remote_key = 1; }) == Status::kRemoteAccess);
  CHECK(untouched(b, 0, 4096));
  CHECK(b.settle().empty());
  CHECK(status([](WorkRequest& r) { r.remote_address += 4096 - 64; }) == Status::kOk);
}

TEST_CASE("sim keys: deregistered memory is never touched, even by what is in flight") {
  Player a("delay=20,mtu=16"), b("");
  a.fill(0, 128, 1);
  const PathId path = a.path_to(b);
  auto target = std::make_unique<std::byte[]>(128);  // freed below: the sanitizer watches
  const MemoryKey key = b.register_span(target.get(), 128);
  for (size_t i = 0; i < 16; ++i) {
    WorkRequest request = with_immediate(a.write(path, b, i, 0, 0, 128));
    request.remote_address = key.base;
    request.remote_key = key.remote_key;
    a.post_ok(request);
  }
  std::vector<Completion> early;
  for (int i = 0; i < 5; ++i)
    for (const Completion& each : a.poll()) early.push_back(each);
  REQUIRE(b.provider->deregister_memory(0, key).ok());
  CHECK(b.provider->deregister_memory(0, key).status() == Status::kRegistration);
  target.reset();
  const std::vector<Completion> rest = a.gather(16 - early.size());
  REQUIRE(rest.size() == 16 - early.size());
  const auto refused =
      std::count_if(rest.begin(), rest.end(), [](auto& c) { return c.status == Status::kRemoteAccess; });
  const auto partial = std::count_if(rest.begin(), rest.end(), [](auto& c) { return c.landed_unknown; });
  CHECK(refused > 0);
  CHECK(partial > 0);  // some had begun
  CHECK(b.settle().size() == 16 - static_cast<size_t>(refused));
}

TEST_CASE("sim keys: a source that is deregistered in flight is not read") {
  Player a("delay=20"), b("");
  auto source = std::make_unique<std::byte[]>(64);
  const MemoryKey key = a.register_span(source.get(), 64);
  WorkRequest request = a.write(a.path_to(b), b, 0, 0, 0, 64);
  request.local = source.get();
  request.local_key = key.local_key;
  a.post_ok(request);
  REQUIRE(a.provider->deregister_memory(0, key).ok());
  source.reset();
  const Completion done = a.one();
  CHECK(done.status == Status::kTransport);
  CHECK(done.provider_status == EFAULT);
  b.receive_ok(0, 0, 64);
  request = a.send(request.path, 0, 0, 64);
  a.post_ok(request);
  REQUIRE(a.provider->deregister_memory(0, a.keys[0]).ok());
  CHECK(a.one().provider_status == EFAULT);
}

TEST_CASE("sim stale_keys_land: a dead key lands with success, in live memory or in a shadow, never in freed memory") {
  Player a(""), b("stale_keys_land=1");
  a.fill(0, 64, 1);
  const PathId path = a.path_to(b);
  const MemoryKey old = b.keys[0];
  REQUIRE(b.provider->deregister_memory(0, old).ok());

  SUBCASE("the memory was registered again: it is hit") {
    b.keys[0] = b.register_span(b.memory.data(), b.memory.size());
    WorkRequest request = with_immediate(a.write(path, b, 0, 0, 256, 64));
    request.remote_key = old.remote_key;
    a.post_ok(request);
    CHECK(a.one().status == Status::kOk);
    CHECK(b.one().kind == CompletionKind::kImmediate);
    CHECK(same(a, 0, b, 256, 64));
    CHECK(a.stat("stale_live") == 1);
  }
  SUBCASE("the memory is gone: the shadow takes it and gives it back") {
    std::vector<std::byte>().swap(b.memory);  // freed: the sanitizer watches
    WorkRequest request = with_immediate(a.write(path, b, 0, 0, 256, 64));
    a.post_ok(request);
    CHECK(a.one().status == Status::kOk);
    CHECK(b.one().kind == CompletionKind::kImmediate);
    CHECK(a.stat("stale_shadow") == 1);
    request = a.write(path, b, 0, 512, 256, 64);
    request.opcode = Opcode::kRead;
    a.post_ok(request);
    CHECK(a.one().status == Status::kOk);
    CHECK(same(a, 0, a, 512, 64));
  }
  SUBCASE("a key that never was is still refused") {
    WorkRequest request = a.write(path, b, 0, 0, 0, 64);
    request.remote_key += 12345;
    a.post_ok(request);
    CHECK(a.one().status == Status::kRemoteAccess);
  }
}

TEST_CASE("sim keys_enforced=0: a write with a dead key completes well and lands nowhere") {
  Player a(""), b("keys_enforced=0");
  a.fill(0, 64, 1);
  REQUIRE(b.provider->deregister_memory(0, b.keys[0]).ok());
  WorkRequest request = with_immediate(a.write(a.path_to(b), b, 0, 0, 0, 64));
  a.post_ok(request);
  CHECK(a.one().status == Status::kOk);
  CHECK(b.settle().empty());
  CHECK(untouched(b, 0, 64));
  CHECK(a.stat("stale_lost") == 1);
  request.opcode = Opcode::kRead;
  a.post_ok(request);
  CHECK(a.one().status == Status::kRemoteAccess);
}

TEST_CASE("sim require_peer: writes fail until the target has a path back; sends do not need one") {
  Player a(""), b("require_peer=1");
  const PathId path = a.path_to(b);
  a.post_ok(a.write(path, b, 0, 0, 0, 64));
  CHECK(a.one().status == Status::kTransport);
  b.receive_ok(0, 0, 64);
  a.post_ok(a.send(path, 0, 0, 64));
  CHECK(a.one().status == Status::kOk);
  const PathId back = b.path_to(a);
  a.post_ok(a.write(path, b, 0, 0, 0, 64));
  CHECK(a.one().status == Status::kOk);
  b.provider->close_path(0, back);
  a.post_ok(a.write(path, b, 0, 0, 0, 64));
  CHECK(a.one().status == Status::kTransport);
}

TEST_CASE("sim register_fail: so many registrations fail, with a reason") {
  Player a("");
  a.inject("register_fail 1");
  MemoryKey key;
  const Error error = a.provider->register_memory(0, {a.memory.data(), 64}, &key);
  CHECK(error.status() == Status::kRegistration);
  CHECK(error.provider_status() == ENOMEM);
  CHECK(a.provider->register_memory(0, {a.memory.data(), 64}, &key).ok());
  CHECK(a.provider->register_memory(0, {nullptr, 64}, &key).status() == Status::kRegistration);
  CHECK(a.provider->register_memory(0, {a.memory.data(), 0}, &key).status() == Status::kRegistration);
  CHECK(a.provider->register_memory(0, {a.memory.data(), 64, TE_DEVICE_CUDA, 0}, &key).status() ==
        Status::kRegistration);
  CHECK(a.provider->register_memory(5, {a.memory.data(), 64}, &key).status() == Status::kArgument);
}

// --- errors ---------------------------------------------------------------------------------------------------------

TEST_CASE("sim error: writes fail by chance, with every combination of landed_unknown and landing") {
  Player a("error=0.5,mtu=32,delay=3"), b("");
  a.memory.assign(a.memory.size(), std::byte{1});
  const PathId path = a.path_to(b);
  for (uint32_t i = 0; i < 200; ++i) a.post_ok(with_immediate(a.write(path, b, i, 0, 128 * i, 128), i));
  std::vector<Completion> done = a.gather(200);
  REQUIRE(done.size() == 200);
  CHECK(a.settle().empty());  // late landings report nothing more
  std::vector<bool> arrived(200);
  for (const Completion& each : b.settle()) arrived[each.immediate] = true;
  int good = 0, clean = 0, unknown_lost = 0, unknown_partial = 0, unknown_landed = 0;
  for (const Completion& each : done) {
    const size_t i = a.number(each.context);
    const auto begin = b.memory.begin() + static_cast<int64_t>(128 * i);
    const auto bytes = std::count(begin, begin + 128, std::byte{1});
    CHECK(arrived[i] == (bytes == 128));
    if (each.status == Status::kOk) {
      CHECK_FALSE(each.landed_unknown);
      CHECK(bytes == 128);
      ++good;
    } else {
      CHECK(each.status == Status::kTransport);
      CHECK(each.provider_status != 0);
      if (!each.landed_unknown) CHECK(bytes == 0);
      ++(!each.landed_unknown ? clean : bytes == 0 ? unknown_lost : bytes < 128 ? unknown_partial : unknown_landed);
    }
  }
  CHECK(good > 50);
  CHECK(clean > 5);
  CHECK(unknown_lost > 5);
  CHECK(unknown_partial > 5);
  CHECK(unknown_landed > 5);
  CHECK(a.stat("errors") == 200 - static_cast<uint64_t>(good));
}

TEST_CASE("sim error_next and fail_after: exactly the named writes fail, in the named manner") {
  Player a("mtu=32"), b("");
  a.memory.assign(a.memory.size(), std::byte{1});
  const PathId path = a.path_to(b);
  const auto run = [&]() {
    std::fill(b.memory.begin(), b.memory.end(), std::byte{0});
    a.post_ok(with_immediate(a.write(path, b, 0, 0, 0, 128)));
    const Completion done = a.one();
    const auto at_once = std::count(b.memory.begin(), b.memory.end(), std::byte{1});
    a.settle();
    const auto finally = std::count(b.memory.begin(), b.memory.end(), std::byte{1});
    const auto immediates = b.settle().size();
    return format("%s unknown=%d bytes=%d,%d immediates=%d", status_name(done.status), done.landed_unknown,
                  static_cast<int>(at_once), static_cast<int>(finally), static_cast<int>(immediates));
  };
  const std::string good = "ok unknown=0 bytes=128,128 immediates=1";
  a.inject("error_next 2 clean");
  CHECK(run() == "transport unknown=0 bytes=0,0 immediates=0");
  CHECK(run() == "transport unknown=0 bytes=0,0 immediates=0");
  CHECK(run() == good);
  a.inject("error_next 1 unknown");
  CHECK(run() == "transport unknown=1 bytes=0,0 immediates=0");
  a.inject("error_next 1 partial");
  CHECK(run() == "transport unknown=1 bytes=32,32 immediates=0");
  a.inject("error_next 1 landed");
  CHECK(run() == "transport unknown=1 bytes=128,128 immediates=1");
  a.inject("error_next 1 late");
  CHECK(run() == "transport unknown=1 bytes=0,128 immediates=1");
  a.inject("fail_after 2 clean");
  CHECK(run() == good);
  CHECK(run() == good);
  CHECK(run() == "transport unknown=0 bytes=0,0 immediates=0");
  CHECK(run() == good);
  a.inject("error_next 1");
  CHECK(run().starts_with("transport"));
}

TEST_CASE("sim reorder=0: nothing lands behind a failed write until the engine has polled the errors") {
  Player a("reorder=0"), b("");
  const PathId path = a.path_to(b);
  a.inject("fail_after 1 clean");
  for (uint32_t i = 0; i < 4; ++i) a.post_ok(with_immediate(a.write(path, b, i, 0, 0, 8), i));
  std::vector<Completion> first(1);
  REQUIRE(a.provider->poll(0, first) == 1);
  a.post_ok(with_immediate(a.write(path, b, 4, 0, 0, 8), 4));  // posted without knowing
  CHECK(first[0].status == Status::kOk);
  const std::vector<Completion> rest = a.gather(4);
  REQUIRE(rest.size() == 4);
  CHECK(rest[0].status == Status::kTransport);
  for (size_t i = 1; i < 4; ++i) {
    CHECK(rest[i].status == Status::kCancelled);
    CHECK_FALSE(rest[i].landed_unknown);
    CHECK(a.number(rest[i].context) == i + 1);
  }
  a.post_ok(with_immediate(a.write(path, b, 5, 0, 0, 8), 5));
  CHECK(a.one().status == Status::kOk);
  const std::vector<Completion> arrived = b.settle();
  REQUIRE(arrived.size() == 2);
  CHECK(arrived[0].immediate == 0);
  CHECK(arrived[1].immediate == 5);
}

TEST_CASE("sim flip_next: exactly one bit of one write is wrong") {
  Player a(""), b("");
  a.fill(0, 1000, 1);
  const PathId path = a.path_to(b);
  a.inject("flip_next");
  a.post_ok(a.write(path, b, 0, 0, 0, 1000));
  CHECK(a.one().status == Status::kOk);
  int bits = 0;
  for (size_t i = 0; i < 1000; ++i) bits += __builtin_popcount(std::to_integer<unsigned>(a.memory[i] ^ b.memory[i]));
  CHECK(bits == 1);
  a.post_ok(a.write(path, b, 0, 0, 0, 1000));
  a.one();
  CHECK(same(a, 0, b, 0, 1000));
  CHECK(a.stat("flipped") == 1);
}

// --- NICs -----------------------------------------------------------------------------------------------------------

TEST_CASE("sim nic_down: operations of that NIC fail, in both directions, and nic_up brings it back") {
  Player a("delay=30", 0, 2), b("");
  const PathId path = a.path_to(b, 0), other = a.path_to(b, 1), back = b.path_to(a, 0, 0);
  for (size_t i = 0; i < 16; ++i) a.post_ok(a.write(path, b, i, 0, 0, 8));
  a.inject("nic_down 0");
  a.inject("nic_up 0");  // what was in flight is lost all the same
  a.inject("nic_down 0");
  const std::vector<Completion> lost = a.gather(16);
  CHECK(lost.size() == 16);
  bool unknown = false;
  for (const Completion& each : lost) {
    CHECK(each.status == Status::kTransport);
    unknown = unknown || each.landed_unknown;
  }
  CHECK(unknown);
  CHECK_FALSE(a.provider->nic(0).up);
  CHECK(a.provider->nic(1).up);
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kTransport);
  b.post_ok(b.write(back, a, 0, 0, 0, 8));
  CHECK(b.one().status == Status::kTransport);
  WorkRequest request = a.write(other, b, 0, 0, 0, 8);
  request.local_key = a.keys[1].local_key;
  a.post_ok(request, 1);
  CHECK(a.one(1).status == Status::kOk);
  a.inject("nic_up 0");
  CHECK(a.provider->nic(0).up);
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);
  b.post_ok(b.write(back, a, 0, 0, 0, 8));
  CHECK(b.one().status == Status::kOk);
}

TEST_CASE("sim nic_down: a send that waits at the lost NIC's peer fails too") {
  Player a(""), b("");
  a.post_ok(a.send(a.path_to(b), 0, 0, 8));
  CHECK(a.settle().empty());
  b.inject("nic_down 0");
  CHECK(a.one().status == Status::kTransport);
}

TEST_CASE("sim completion_depth: an overrun kills the NIC loudly and still ends every operation") {
  Player a(""), b("completion_depth=4");
  const PathId path = a.path_to(b), back = b.path_to(a);
  b.post_ok(b.send(back, 9, 0, 8));  // stalled until the NIC dies
  CHECK(b.poll().empty());
  for (size_t i = 0; i < 4; ++i) a.post_ok(with_immediate(a.write(path, b, i, 0, 0, 8)));
  for (const Completion& each : a.gather(4)) CHECK(each.status == Status::kOk);
  CHECK(b.stat("overruns") == 0);
  CHECK(b.provider->nic(0).up);
  a.post_ok(with_immediate(a.write(path, b, 4, 0, 0, 8)));
  CHECK(a.one().status == Status::kTransport);
  CHECK(b.stat("overruns") == 1);
  CHECK_FALSE(b.provider->nic(0).up);
  CHECK(b.post(b.write(back, a, 0, 0, 0, 8)).provider_status == EIO);
  CHECK(b.provider->post_receive(0, b.memory.data(), 8, b.keys[0].local_key, b.context(1)).provider_status == EIO);
  a.post_ok(a.write(path, b, 5, 0, 0, 8));
  CHECK(a.one().status == Status::kTransport);
  const std::vector<Completion> left = b.settle();
  REQUIRE(left.size() == 5);
  CHECK(left[4].kind == CompletionKind::kSent);
  CHECK(left[4].status == Status::kTransport);
}

TEST_CASE("sim completion_depth: own completions overrun too") {
  Player a("completion_depth=2"), b("");
  const PathId path = a.path_to(b);
  for (size_t i = 0; i < 3; ++i) a.post_ok(a.write(path, b, i, 0, 0, 8));
  CHECK(a.gather(3).size() == 3);
  CHECK(a.stat("overruns") == 1);
}

TEST_CASE("sim stats: a context that is touched in flight is noticed") {
  Player a("delay=10"), b("");
  a.post_ok(a.write(a.path_to(b), b, 0, 0, 0, 8));
  a.context(0)->scratch[63] ^= std::byte{1};
  a.one();
  CHECK(a.stat("tampered") == 1);
  CHECK(a.stat("writes") == 1);
  CHECK(a.stat("in_flight") == 0);
}

TEST_CASE("sim commands: wrong ones are refused and say why") {
  Player a("");
  for (const char* bad : {"", "nonsense", "nic_down", "nic_down 1", "nic_down x", "partition", "partition 12",
                          "heal 12", "partition zz000000000000000000000000000000", "error_next", "error_next x",
                          "error_next 1 softly", "error_next 1 clean 2", "register_fail", "flip_next x"}) {
    CAPTURE(bad);
    const Error error = a.provider->inject(bad);
    CHECK(error.status() == Status::kArgument);
    CHECK_FALSE(error.message().empty());
  }
}
