// The simulated transport without faults: bytes, order, limits, queues.
#include <algorithm>
#include <cerrno>
#include <set>

#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim::test;

TEST_CASE("sim: a write lands, completes once and is silent at the target") {
  Player a(""), b("");
  a.fill(100, 1000, 3);
  const PathId path = a.path_to(b);
  a.post_ok(a.write(path, b, 7, 100, 2000, 1000));
  const Completion done = a.one();
  CHECK(done.kind == CompletionKind::kSent);
  CHECK(done.status == Status::kOk);
  CHECK(a.number(done.context) == 7);
  CHECK(done.length == 1000);
  CHECK(done.path == path);
  CHECK(same(a, 100, b, 2000, 1000));
  CHECK(untouched(b, 0, 2000));
  CHECK(untouched(b, 3000, 1000));
  CHECK(a.settle().empty());
  CHECK(b.settle().empty());
}

TEST_CASE("sim: an immediate arrives once, after all of its bytes") {
  Player a("mtu=64,delay=3"), b("");
  a.fill(0, 4096, 3);
  WorkRequest request = a.write(a.path_to(b), b, 0, 0, 0, 4096);
  request.opcode = Opcode::kWriteImmediate;
  request.immediate = 0xDEADBEEF;
  a.post_ok(request);
  std::vector<Completion> arrived;
  for (int i = 0; i < kManyPolls && arrived.empty(); ++i) {
    a.poll();
    arrived = b.poll();
  }
  REQUIRE(arrived.size() == 1);
  CHECK(arrived[0].kind == CompletionKind::kImmediate);
  CHECK(arrived[0].immediate == 0xDEADBEEF);
  CHECK(arrived[0].context == nullptr);
  CHECK(same(a, 0, b, 0, 4096));
  a.settle();
  CHECK(b.settle().empty());
}

TEST_CASE("sim: a zero-length immediate needs neither memory nor key") {
  Player a(""), b("");
  WorkRequest request;
  request.opcode = Opcode::kWriteImmediate;
  request.immediate = 5;
  request.path = a.path_to(b);
  request.context = a.context(0);
  a.post_ok(request);
  CHECK(a.one().status == Status::kOk);
  CHECK(b.one().immediate == 5);
}

TEST_CASE("sim: a read brings the peer's bytes, and reads=0 refuses it") {
  Player a("mtu=100"), b("");
  b.fill(500, 1000, 9);
  WorkRequest request = a.write(a.path_to(b), b, 0, 0, 500, 1000);
  request.opcode = Opcode::kRead;
  a.post_ok(request);
  CHECK(a.one().status == Status::kOk);
  CHECK(same(a, 0, b, 500, 1000));
  Player c("reads=0");
  WorkRequest refused = c.write(c.path_to(b), b, 0, 0, 0, 8);
  refused.opcode = Opcode::kRead;
  CHECK(c.post(refused).provider_status == EOPNOTSUPP);
}

TEST_CASE("sim mtu: a longer write lands in pieces over several polls, completion after the last") {
  for (const char* sim : {"mtu=256", "mtu=256,reorder=0"}) {
    CAPTURE(sim);
    Player a(sim), b("");
    a.memory.assign(a.memory.size(), std::byte{1});
    a.post_ok(a.write(a.path_to(b), b, 0, 0, 0, 1024));
    std::set<int64_t> seen;
    bool prefix = true;
    for (int polls = 0; polls < 4; ++polls) {
      const bool done = !a.poll().empty();
      seen.insert(std::count(b.memory.begin(), b.memory.end(), std::byte{1}));
      prefix = prefix && std::is_sorted(b.memory.begin(), b.memory.begin() + 1024, std::greater<>());
      CHECK(done == (polls == 3));
    }
    CHECK(seen == std::set<int64_t>{256, 512, 768, 1024});
    if (std::string(sim).find("reorder") != std::string::npos) CHECK(prefix);
  }
}

TEST_CASE("sim mtu: pieces of one write land in any order when reorder=1") {
  bool out_of_order = false;
  for (int seed = 1; seed <= 8; ++seed) {
    Player a("mtu=256,seed=" + std::to_string(seed)), b("");
    a.memory.assign(a.memory.size(), std::byte{1});
    a.post_ok(a.write(a.path_to(b), b, 0, 0, 0, 1024));
    a.poll();
    out_of_order = out_of_order || b.memory[0] == std::byte{0};
  }
  CHECK(out_of_order);
}

TEST_CASE("sim reorder=1: completions and immediates of one NIC come out of order") {
  Player a("delay=4"), b("");
  const PathId path = a.path_to(b);
  for (uint32_t i = 0; i < 64; ++i) {
    WorkRequest request = a.write(path, b, i, 0, 0, 0);
    request.opcode = Opcode::kWriteImmediate;
    request.immediate = i;
    a.post_ok(request);
  }
  std::vector<size_t> sent;
  for (const Completion& each : a.gather(64)) sent.push_back(a.number(each.context));
  std::vector<uint32_t> arrived;
  for (const Completion& each : b.gather(64)) arrived.push_back(each.immediate);
  REQUIRE(sent.size() == 64);
  REQUIRE(arrived.size() == 64);
  CHECK_FALSE(std::is_sorted(sent.begin(), sent.end()));
  CHECK_FALSE(std::is_sorted(arrived.begin(), arrived.end()));
  CHECK(std::set<size_t>(sent.begin(), sent.end()).size() == 64);
  CHECK(std::set<uint32_t>(arrived.begin(), arrived.end()).size() == 64);
}

TEST_CASE("sim reorder=0: writes, immediates, sends and completions keep the order posted, whatever the delay") {
  Player a("reorder=0,delay=5,mtu=16"), b("");
  const PathId path = a.path_to(b);
  for (size_t i = 0; i < 40; ++i) b.receive_ok(i, 32768 + 64 * i, 64);
  for (uint32_t i = 0; i < 120; ++i) {
    a.memory[i * 64] = static_cast<std::byte>(i + 1);
    WorkRequest request = i % 3 == 0 ? a.send(path, i, i * 64, 64) : a.write(path, b, i, i * 64, 0, 64);
    if (i % 3 == 1) request.opcode = Opcode::kWriteImmediate;
    request.immediate = i;
    a.post_ok(request);
  }
  std::vector<size_t> sent;
  uint32_t expected = 0;  // the next of 0, 1, 3, 4, 6, 7, ...
  for (int i = 0; i < kManyPolls && sent.size() < 120; ++i) {
    for (const Completion& each : a.poll()) sent.push_back(a.number(each.context));
    for (const Completion& each : b.poll()) {
      if (each.kind == CompletionKind::kImmediate) {
        CHECK(each.immediate == expected);
        expected += 2;
      } else {
        CHECK(b.memory[32768 + 64 * b.number(each.context)] == static_cast<std::byte>(expected + 1));
        CHECK(b.number(each.context) == expected / 3);
        ++expected;
      }
    }
  }
  CHECK(sent.size() == 120);
  CHECK(std::is_sorted(sent.begin(), sent.end()));
  CHECK(expected == 120);
  CHECK(b.memory[0] == std::byte{120});  // all writes went to one place: the last one wins
}

TEST_CASE("sim delay: operations wait up to so many polls, and land at the first one without") {
  Player quick(""), slow("delay=50"), b("");
  quick.post_ok(quick.write(quick.path_to(b), b, 0, 0, 0, 8));
  CHECK(quick.poll().size() == 1);
  const PathId path = slow.path_to(b);
  for (size_t i = 0; i < 32; ++i) slow.post_ok(slow.write(path, b, i, 0, 0, 8));
  std::set<int> polls_needed;
  size_t done = 0;
  for (int polls = 1; polls <= 101; ++polls) {
    const size_t now = slow.poll().size();
    done += now;
    if (now > 0) polls_needed.insert(polls);
  }
  CHECK(done == 32);
  CHECK(polls_needed.size() > 5);
  CHECK(*polls_needed.rbegin() > 25);
}

TEST_CASE("sim seed: the same seed gives the same schedule, another seed another one") {
  const auto trace = [](const std::string& seed) {
    Player a("delay=6,mtu=128,busy=0.2,error=0.2,seed=" + seed), b("delay=2,seed=" + seed);
    const PathId there = a.path_to(b), back = b.path_to(a);
    std::vector<uint64_t> events;
    size_t next = 0;
    for (int step = 0; step < 400; ++step) {
      Player& from = step % 2 == 0 ? a : b;
      Player& to = step % 2 == 0 ? b : a;
      const PostResult posted = from.post(from.write(step % 2 == 0 ? there : back, to, next++ % 2048, 0, 1024, 512));
      events.push_back(posted.posted * 2 + posted.busy);
      for (Player* each : {&a, &b})
        for (const Completion& c : each->poll())
          events.push_back(uint64_t{each->number(c.context)} << 8 | static_cast<uint8_t>(c.status) << 1 |
                           c.landed_unknown);
    }
    return events;
  };
  CHECK(trace("11") == trace("11"));
  CHECK(trace("11") != trace("12"));
}

TEST_CASE("sim delivery_complete=0: the completion comes first, and the source may be reused at once") {
  for (const char* order : {"0", "1"}) {
    Player a(std::string("delivery_complete=0,delay=5,reorder=") + order), b("");
    a.fill(0, 64, 1);
    const std::vector<std::byte> original(a.memory.begin(), a.memory.begin() + 64);
    a.post_ok(a.write(a.path_to(b), b, 0, 0, 0, 64));
    CHECK(a.one().status == Status::kOk);
    CHECK(untouched(b, 0, 64));
    a.memory.assign(a.memory.size(), std::byte{0xFF});
    CHECK(a.settle().empty());
    CHECK(std::equal(original.begin(), original.end(), b.memory.begin()));
  }
}

TEST_CASE("sim delivery_complete=1: the completion proves that the bytes are there") {
  Player a("delay=5"), b("");
  a.fill(0, 64, 1);
  a.post_ok(a.write(a.path_to(b), b, 0, 0, 0, 64));
  a.one();
  CHECK(same(a, 0, b, 0, 64));
}

TEST_CASE("sim sends: they fill receives in order, wait without one, and lose nothing") {
  Player a("reorder=0"), b("");
  const PathId path = a.path_to(b);
  for (size_t i = 0; i < 4; ++i) {
    a.fill(i * 100, 100, static_cast<uint8_t>(i));
    a.post_ok(a.send(path, i, i * 100, 100));
  }
  b.receive_ok(20, 1000, 100);
  CHECK(a.settle().size() == 1);
  CHECK(a.stat("not_ready") > 0);
  Completion got = b.one();
  CHECK(got.kind == CompletionKind::kReceived);
  CHECK(b.number(got.context) == 20);
  CHECK(got.length == 100);
  CHECK(same(a, 0, b, 1000, 100));
  for (size_t i = 1; i < 4; ++i) b.receive_ok(20 + i, 1000 + i * 100, 100);
  CHECK(a.settle().size() == 3);
  CHECK(b.gather(3).size() == 3);
  CHECK(same(a, 0, b, 1000, 400));
}

TEST_CASE("sim sends: a receive that is too short ends with an error at the receiver") {
  Player a(""), b("");
  a.fill(0, 100, 1);
  b.receive_ok(0, 0, 50);
  a.post_ok(a.send(a.path_to(b), 0, 0, 100));
  CHECK(a.one().status == Status::kOk);
  const Completion got = b.one();
  CHECK(got.status == Status::kTransport);
  CHECK(got.provider_status == EMSGSIZE);
  CHECK(untouched(b, 0, 200));
}

TEST_CASE("sim limits: what is too long, unregistered or malformed is refused and the rest of the batch not taken") {
  Player a("max_write=1000,max_send=100", 0, 2), b("");
  const PathId path = a.path_to(b);
  const WorkRequest good = a.write(path, b, 0, 0, 0, 1000);
  const auto refused = [&](auto change) {
    WorkRequest bad = good;
    bad.context = a.context(1);
    change(bad);
    WorkRequest batch[] = {good, bad, good};
    batch[2].context = a.context(2);
    const PostResult result = a.provider->post(0, batch);
    CHECK_FALSE(result.busy);
    CHECK(result.posted == 1);
    CHECK(a.gather(1).size() == 1);
    return result.provider_status;
  };
  CHECK(refused([](WorkRequest& r) { r.length = 1001; }) == EINVAL);
  CHECK(refused([](WorkRequest& r) { r.opcode = Opcode::kSend, r.length = 101; }) == EINVAL);
  CHECK(refused([](WorkRequest& r) { r.context = nullptr; }) == EINVAL);
  CHECK(refused([](WorkRequest& r) { r.path = kNoPath; }) == EINVAL);
  CHECK(refused([](WorkRequest& r) { r.path += 1; }) == EINVAL);
  CHECK(refused([&](WorkRequest& r) { r.path = a.path_to(b, 1); }) == EINVAL);  // of the other NIC
  CHECK(refused([](WorkRequest& r) { r.local_key = 0; }) == EINVAL);
  CHECK(refused([](WorkRequest& r) { r.local_key = r.remote_key; }) == EINVAL);
  CHECK(refused([&](WorkRequest& r) { r.local = a.memory.data() + a.memory.size() - 999; }) == EINVAL);
  CHECK(refused([&](WorkRequest& r) { r.local = a.memory.data() - 1; }) == EINVAL);
  WorkRequest dangling = good;
  dangling.more = true;
  CHECK(a.post(dangling).provider_status == EINVAL);
  const WorkRequest chained[] = {dangling, a.write(path, b, 1, 0, 0, 8)};
  CHECK(a.provider->post(0, chained).posted == 2);
  CHECK(a.provider->post(2, chained).provider_status == EINVAL);
}

TEST_CASE("sim depth: a full NIC takes part of a batch, says busy, and takes the rest after completions") {
  Player a("depth=3"), b("");
  const PathId path = a.path_to(b);
  std::vector<WorkRequest> batch;
  for (size_t i = 0; i < 5; ++i) batch.push_back(a.write(path, b, i, 0, 0, 8));
  const PostResult first = a.provider->post(0, batch);
  CHECK(first.posted == 3);
  CHECK(first.busy);
  CHECK(first.provider_status == 0);
  CHECK(a.gather(3).size() == 3);
  const PostResult second = a.provider->post(0, std::span(batch).subspan(3));
  CHECK(second.posted == 2);
  CHECK_FALSE(second.busy);
  CHECK(a.gather(2).size() == 2);
}

TEST_CASE("sim receive_depth: one receive too many is busy") {
  Player a("receive_depth=2");
  a.receive_ok(0, 0, 8);
  a.receive_ok(1, 8, 8);
  CHECK(a.provider->post_receive(0, a.memory.data(), 8, a.keys[0].local_key, a.context(2)).busy);
  CHECK(a.provider->post_receive(0, a.memory.data(), 8, 0, a.context(2)).provider_status == EINVAL);
}

TEST_CASE("sim busy: posts are refused for now, also in the middle of a batch, and none is lost") {
  Player a("busy=0.5"), b("");
  const PathId path = a.path_to(b);
  std::vector<WorkRequest> batch;
  for (size_t i = 0; i < 64; ++i) batch.push_back(a.write(path, b, i, 0, 0, 8));
  size_t posted = 0, refusals = 0, partial = 0;
  for (int i = 0; i < 10'000 && posted < batch.size(); ++i) {
    const PostResult result = a.provider->post(0, std::span(batch).subspan(posted));
    posted += result.posted;
    refusals += result.busy;
    partial += result.busy && result.posted > 0;
  }
  CHECK(posted == 64);
  CHECK(refusals > 10);
  CHECK(partial > 5);
  CHECK(a.stat("busy") == refusals);
  CHECK(a.gather(64).size() == 64);
  Player never("busy=1");
  CHECK(never.post(never.write(never.path_to(b), b, 0, 0, 0, 8)).busy);
}

TEST_CASE("sim virtual_addresses: offsets count from the address or from zero") {
  Player a(""), virtual_b(""), offset_b("virtual_addresses=0");
  CHECK(virtual_b.keys[0].base == reinterpret_cast<uint64_t>(virtual_b.memory.data()));
  CHECK(offset_b.keys[0].base == 0);
  a.fill(0, 64, 1);
  a.post_ok(a.write(a.path_to(offset_b), offset_b, 0, 0, 100, 64));
  CHECK(a.one().status == Status::kOk);
  CHECK(same(a, 0, offset_b, 100, 64));
}

TEST_CASE("sim: an engine can write and send to itself, over several NICs") {
  Player a("", 0, 2);
  a.fill(0, 1000, 5);
  const PathId path = a.path_to(a, 0, 1);
  WorkRequest request = a.write(path, a, 0, 0, 500, 1000);  // overlaps its source
  request.remote_address = a.keys[1].base + 500;
  request.remote_key = a.keys[1].remote_key;
  const std::vector<std::byte> source(a.memory.begin(), a.memory.begin() + 1000);
  a.post_ok(request);
  CHECK(a.one().status == Status::kOk);
  CHECK(std::equal(source.begin(), source.end(), a.memory.begin() + 500));
  request.remote_key = a.keys[0].remote_key;  // keys belong to one NIC
  a.post_ok(request);
  CHECK(a.one().status == Status::kRemoteAccess);
}

TEST_CASE("sim open_path: foreign bytes are refused") {
  Player a("");
  te_nic_address foreign{};
  foreign.length = 400;  // more than there is room for
  PathId path = 77;
  CHECK(a.provider->open_path(0, foreign, 1, &path).status() == Status::kPeerUnreachable);
  CHECK(a.provider->open_path(9, a.provider->nic(0).address, 1, &path).status() == Status::kArgument);
  CHECK(path == 77);
}

TEST_CASE("sim reorder=1: even without delay, what lands in one poll lands in random order") {
  Player a(""), b("");
  const PathId path = a.path_to(b);
  for (size_t i = 0; i < 32; ++i) a.post_ok(a.write(path, b, i, 0, 0, 8));
  std::vector<size_t> sent;
  for (const Completion& each : a.poll()) sent.push_back(a.number(each.context));
  REQUIRE(sent.size() == 32);
  CHECK_FALSE(std::is_sorted(sent.begin(), sent.end()));
}

TEST_CASE("sim: many engines, every one writing to every other") {
  constexpr size_t kEngines = 64;
  std::vector<std::unique_ptr<Player>> players;
  for (size_t i = 0; i < kEngines; ++i)
    players.push_back(std::make_unique<Player>("delay=2", static_cast<uint8_t>(i), 1, 8192));
  for (size_t from = 0; from < kEngines; ++from) {
    players[from]->fill(4096, 64, static_cast<uint8_t>(from));
    for (size_t to = 0; to < kEngines; ++to) {
      const PathId path = players[from]->path_to(*players[to]);
      WorkRequest request = players[from]->write(path, *players[to], to, 4096, 64 * from, 64);
      request.opcode = Opcode::kWriteImmediate;
      players[from]->post_ok(request);
    }
  }
  std::vector<size_t> seen(kEngines);
  for (int round = 0; round < 20; ++round)
    for (size_t i = 0; i < kEngines; ++i) seen[i] += players[i]->poll().size();
  for (size_t i = 0; i < kEngines; ++i) {
    CHECK(seen[i] == 2 * kEngines);
    for (size_t from = 0; from < kEngines; ++from) CHECK(same(*players[from], 4096, *players[i], 64 * from, 64));
  }
}
