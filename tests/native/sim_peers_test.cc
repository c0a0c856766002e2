// Peers of the simulated transport that die, fall silent, restart or leave; paths that are reset, closed or connected.
#include <algorithm>
#include <cerrno>

#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim::test;

namespace {

void write_many(Player& from, PathId path, const Player& to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    WorkRequest request = from.write(path, to, i, 0, 64 * i, 64);
    request.opcode = Opcode::kWriteImmediate;
    from.post_ok(request);
  }
}

}  // namespace

// --- death ----------------------------------------------------------------------------------------------------------

TEST_CASE("sim kill: peers hear nothing, the dead land nothing, and only then death is proven") {
  Player a("delay=10"), b("delay=10");
  const PathId to_b = a.path_to(b), to_a = b.path_to(a);
  write_many(a, to_b, b, 8);
  write_many(b, to_a, a, 8);
  CHECK(a.provider->death_of(0, to_b) != Death::kProven);
  b.inject("kill");
  CHECK(a.provider->death_of(0, to_b) == Death::kProven);
  CHECK(a.settle().empty());
  CHECK(a.stat("in_flight") == 8);
  CHECK(a.provider->arm(0));  // nothing will happen: sleep
  CHECK(untouched(a, 0, 512));
  CHECK(untouched(b, 0, 512));
  for (const Completion& each : b.settle()) CHECK(each.status == Status::kCancelled);
  CHECK(b.post(b.write(to_a, a, 0, 0, 0, 8)).provider_status == ESHUTDOWN);
  CHECK(b.provider->post_receive(0, b.memory.data(), 8, b.keys[0].local_key, b.context(1)).provider_status ==
        ESHUTDOWN);
  CHECK_FALSE(b.provider->nic(0).up);
  REQUIRE(a.provider->reset_path(0, to_b).ok());
  CHECK(a.gather(8).size() == 8);
}

TEST_CASE("sim kill_loud and reports_dead_peer: operations towards the dead fail with peer lost") {
  for (const bool loud : {false, true}) {
    Player a(loud ? "delay=10" : "delay=10,reports_dead_peer=1"), b("");
    const PathId path = a.path_to(b);
    write_many(a, path, b, 4);
    a.post_ok(a.send(path, 9, 0, 8));
    b.inject(loud ? "kill_loud" : "kill");
    const std::vector<Completion> lost = a.gather(5);
    REQUIRE(lost.size() == 5);
    for (const Completion& each : lost) CHECK(each.status == Status::kPeerLost);
    a.post_ok(a.write(path, b, 0, 0, 0, 8));
    CHECK(a.one().status == Status::kPeerLost);
    CHECK(a.provider->death_of(0, path) == Death::kProven);
  }
}

TEST_CASE("sim kill_loud: what had landed without its completion is reported as unknown") {
  Player a("delay=1000"), b("");
  write_many(a, a.path_to(b), b, 64);
  size_t arrived = 0, done = 0;
  for (int i = 0; i < 600; ++i) {
    done += a.poll().size();
    arrived += b.poll().size();
  }
  REQUIRE(arrived > done);
  b.inject("kill_loud");
  size_t unknown = 0;
  for (const Completion& each : a.gather(64 - done)) unknown += each.landed_unknown;
  CHECK(unknown == arrived - done);
}

TEST_CASE("sim: a closed engine is reported lost, also to sends that wait for it") {
  Player a("delay=5");
  auto b = std::make_unique<Player>("");
  const PathId path = a.path_to(*b);
  a.post_ok(a.send(path, 0, 0, 8));
  CHECK(a.settle().empty());
  write_many(a, path, *b, 3);
  b.reset();
  for (const Completion& each : a.gather(4)) CHECK(each.status == Status::kPeerLost);
  CHECK(a.provider->death_of(0, path) != Death::kProven);
  CHECK(a.provider->death_of(0, kNoPath) != Death::kProven);
}

TEST_CASE("sim: a path to an address where nobody ever was reports a lost peer") {
  Player a("");
  te_nic_address address{};
  address.length = 12;
  std::memcpy(address.bytes, "sim:nobody:0", 12);
  PathId path = kNoPath;
  REQUIRE(a.provider->open_path(0, address, 1, &path).ok());
  a.post_ok(a.write(path, a, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kPeerLost);
  CHECK(a.provider->death_of(0, path) != Death::kProven);
  Player b("address=nobody");
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);
}

TEST_CASE("sim address: after a restart the same path reaches the new engine, but old operations and keys are dead") {
  Player a("delay=10");
  auto old = std::make_unique<Player>("address=spot");
  const PathId path = a.path_to(*old);
  const MemoryKey old_key = old->keys[0];
  write_many(a, path, *old, 8);
  old->inject("kill");
  Player young("address=spot");
  CHECK(a.settle().empty());  // they waited for the dead one
  CHECK(untouched(young, 0, 512));
  CHECK(a.provider->death_of(0, path) == Death::kProven);
  CHECK(a.provider->death_of(0, a.path_to(young)) != Death::kProven);
  a.fill(0, 8, 1);
  a.post_ok(a.write(path, young, 20, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);
  CHECK(same(a, 0, young, 0, 8));
  WorkRequest stale = a.write(path, young, 20, 0, 0, 8);
  stale.remote_key = old_key.remote_key;
  a.post_ok(stale);
  CHECK(a.one().status == Status::kRemoteAccess);
  old.reset();
  a.post_ok(a.write(path, young, 20, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);
}

// --- silence --------------------------------------------------------------------------------------------------------

TEST_CASE("sim partition: silence in both directions until heal, and nothing is lost") {
  for (const char* order : {"reorder=0", "reorder=1"}) {
    for (const bool other_side_heals : {false, true}) {
      Player a(std::string("delay=3,") + order, 0xA1), b("delay=3", 0xB2), c("", 0xC3);
      const PathId to_b = a.path_to(b), to_a = b.path_to(a), to_c = a.path_to(c);
      a.inject("partition " + identity_hex(0xB2));
      write_many(a, to_b, b, 8);
      write_many(b, to_a, a, 8);
      CHECK(a.settle().empty());
      CHECK(b.settle().empty());
      CHECK(a.provider->arm(0));
      a.post_ok(a.write(to_c, c, 50, 0, 0, 8));
      CHECK(a.one().status == Status::kOk);  // others are not affected
      CHECK(a.provider->arm(0));
      (other_side_heals ? b : a).inject(other_side_heals ? "heal" : "heal " + identity_hex(0xB2));
      CHECK_FALSE(a.provider->arm(0));
      for (Player* each : {&a, &b}) {
        for (int i = 0; i < 50; ++i) a.poll(), b.poll();
        CHECK(each->stat("in_flight") == 0);
        CHECK(each->stat("writes") == (each == &a ? 9 : 8));
      }
    }
  }
}

TEST_CASE("sim partition: a write that landed just before it completes only after heal") {
  Player a("delay=0", 1), b("", 2);
  WorkRequest request = a.write(a.path_to(b), b, 0, 0, 0, 8);
  request.opcode = Opcode::kWriteImmediate;
  Player slow("delay=40", 3);
  request = slow.write(slow.path_to(b), b, 0, 0, 0, 8);
  request.opcode = Opcode::kWriteImmediate;
  slow.post_ok(request);
  bool arrived = false, done = false;
  for (int i = 0; i < 100 && !arrived; ++i) {
    done = !slow.poll().empty();
    arrived = !b.poll().empty();
  }
  REQUIRE(arrived);
  REQUIRE_FALSE(done);
  slow.inject("partition " + identity_hex(2));
  CHECK(slow.settle().empty());
  slow.inject("heal");
  CHECK(slow.one().status == Status::kOk);
}

TEST_CASE("sim pause: nothing of this engine lands until resume; others go on") {
  Player a(""), b("");
  const PathId to_b = a.path_to(b), to_a = b.path_to(a);
  a.inject("pause");
  write_many(a, to_b, b, 4);
  a.fill(0, 8, 1);
  CHECK(a.settle().empty());
  CHECK(b.settle().empty());
  b.post_ok(b.write(to_a, a, 9, 1000, 1000, 8));
  CHECK(b.one().status == Status::kOk);
  a.inject("resume");
  CHECK(a.gather(4).size() == 4);
  CHECK(b.gather(4).size() == 4);
}

// --- paths ----------------------------------------------------------------------------------------------------------

TEST_CASE("sim reset_path: what is outstanding completes as cancelled, never lands, and the path can be used again") {
  for (const char* sim : {"delay=30,mtu=16,reorder=0", "delay=30,mtu=16", "delay=30,mtu=16,delivery_complete=0"}) {
    CAPTURE(sim);
    Player a(sim), b(""), c("");
    const PathId path = a.path_to(b), other = a.path_to(c);
    a.memory.assign(a.memory.size(), std::byte{1});
    write_many(a, path, b, 32);
    a.post_ok(a.write(other, c, 100, 0, 0, 8));
    std::vector<Completion> done;
    for (int i = 0; i < 12; ++i)
      for (const Completion& each : a.poll()) done.push_back(each);
    const size_t arrived = b.poll().size();
    const std::vector<std::byte> before = b.memory;
    REQUIRE(a.provider->reset_path(0, path).ok());
    const std::vector<Completion> rest = a.gather(33 - done.size());
    REQUIRE(rest.size() == 33 - done.size());
    size_t cancelled = 0, unknown = 0;
    for (const Completion& each : rest) {
      cancelled += each.status == Status::kCancelled;
      unknown += each.landed_unknown;
      if (each.path == other) CHECK(each.status == Status::kOk);
    }
    CHECK(cancelled > 0);
    if (std::string(sim) == "delay=30,mtu=16") CHECK(unknown > 0);
    CHECK(unknown < cancelled);
    CHECK(a.settle().empty());
    CHECK(b.memory == before);
    CHECK(b.settle().empty());
    CHECK(arrived < 32);
    write_many(a, path, b, 4);
    for (const Completion& each : a.gather(4)) CHECK(each.status == Status::kOk);
    a.settle();
    CHECK(b.settle().size() == 4);
    CHECK(a.provider->reset_path(0, kNoPath).status() == Status::kArgument);
  }
}

TEST_CASE("sim reset_path: what was reported as failed but may land late does not land after it") {
  Player a("delay=5"), b("");
  const PathId path = a.path_to(b);
  a.memory.assign(64, std::byte{1});
  a.keys[0] = a.register_span(a.memory.data(), 64);
  a.inject("error_next 1 late");
  a.post_ok(a.write(path, b, 0, 0, 0, 64));
  CHECK(a.one().landed_unknown);
  REQUIRE(a.provider->reset_path(0, path).ok());
  CHECK(a.settle().empty());
  CHECK(untouched(b, 0, 64));
}

TEST_CASE("sim close_path: what is in flight is cancelled and the path is unknown afterwards") {
  Player a("delay=30"), b("");
  const PathId path = a.path_to(b);
  write_many(a, path, b, 8);
  a.provider->close_path(0, path);
  for (const Completion& each : a.gather(8)) CHECK(each.status == Status::kCancelled);
  CHECK(a.settle().empty());
  CHECK(untouched(b, 0, 512));
  CHECK(a.post(a.write(path, b, 0, 0, 0, 8)).provider_status == EINVAL);
  a.provider->close_path(0, path);
  CHECK(a.path_to(b) != path);
}

TEST_CASE("sim connected=1: paths come up by event, break on errors and come back after a reset") {
  Player a("reorder=0,connected=1,delay=5"), b("");
  const PathId path = a.path_to(b);
  CHECK(a.post(a.write(path, b, 0, 0, 0, 8)).provider_status == ENOTCONN);
  Completion event = a.one();
  CHECK(event.kind == CompletionKind::kPathUp);
  CHECK(event.path == path);
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);

  a.inject("error_next 1 clean");
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  a.post_ok(a.write(path, b, 1, 0, 0, 8));
  std::vector<Completion> broken = a.gather(3);
  REQUIRE(broken.size() == 3);
  CHECK(broken[0].kind == CompletionKind::kPathDown);
  CHECK(broken[1].status == Status::kTransport);
  CHECK(broken[2].status == Status::kCancelled);
  a.post_ok(a.write(path, b, 2, 0, 0, 8));
  CHECK(a.one().status == Status::kCancelled);
  REQUIRE(a.provider->reset_path(0, path).ok());
  CHECK(a.one().kind == CompletionKind::kPathUp);
  a.post_ok(a.write(path, b, 0, 0, 0, 8));
  CHECK(a.one().status == Status::kOk);

  b.inject("kill_loud");
  const PathId late = a.path_to(b);
  event = a.one();
  CHECK(event.kind == CompletionKind::kPathDown);
  CHECK(event.status == Status::kPeerLost);
  CHECK(event.path == late);
}

TEST_CASE("sim connected=1: a partitioned peer is connected to after heal") {
  Player a("reorder=0,connected=1", 1), b("", 2);
  a.inject("partition " + identity_hex(2));
  a.path_to(b);
  CHECK(a.settle().empty());
  a.inject("heal");
  CHECK(a.one().kind == CompletionKind::kPathUp);
}

TEST_CASE("sim: engines may be destroyed in any order with traffic in flight") {
  for (int order = 0; order < 6; ++order) {
    std::vector<std::unique_ptr<Player>> players;
    for (uint8_t i = 0; i < 3; ++i)
      players.push_back(std::make_unique<Player>("delay=8,mtu=16,delivery_complete=0", 10 + i));
    for (auto& from : players)
      for (auto& to : players) {
        const PathId path = from->path_to(*to);
        write_many(*from, path, *to, 8);
        from->post_ok(from->send(path, 100, 0, 8));
      }
    std::vector<size_t> indices{0, 1, 2};
    for (int i = 0; i < order; ++i) std::next_permutation(indices.begin(), indices.end());
    for (const size_t index : indices) {
      for (auto& each : players)
        if (each != nullptr) each->settle(0, 4);
      players[index].reset();
    }
  }
}
