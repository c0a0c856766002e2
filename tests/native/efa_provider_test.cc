// The libfabric transport over tcp, shm and the stand-in's efa, two providers in one process.
#include <algorithm>

#include "tests/native/efa_support.h"

using namespace te;
using namespace te::test;

TEST_SUITE("efa") {
  TEST_CASE("what the providers say of themselves") {
    FOR_EACH_LOCAL_TRANSPORT
    Side side(transport);
    const Capabilities& c = side.provider->capabilities();
    MESSAGE(transport << ": " << side.provider->provider_name() << ", " << side.provider->library_name() << ", depth "
                      << c.nic_depth << ", receives " << c.receive_depth << ", ordered " << c.ordered_writes
                      << ", wait fd " << side.provider->wait_fd(0) << ", address length "
                      << side.provider->nic(0).address.length);
    CHECK(c.max_write_bytes == (std::string(transport) == "efa" ? 1 << 30 : 4 << 20));
    CHECK(c.nic_depth >= 64);
    CHECK(c.reads);
    CHECK(side.provider->wait_fd(0) >= 0);
    std::string provider, library;
    CHECK(efa::probe(transport, &provider, &library).ok());
    CHECK(provider == side.provider->provider_name());
  }

  TEST_CASE("writes of every length arrive whole, and an immediate behind them counts once") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    std::vector<size_t> lengths = {
        0,   1,   2,   3,   7,    8,    63,   64,   65,    127,   128,   129,           191,
        192, 193, 255, 256, 1000, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) + 3, 4 << 20};
    uint32_t seed = 1;
    for (const size_t length : lengths) {
      for (const bool immediate : {false, true}) {
        CAPTURE(length);
        CAPTURE(immediate);
        const size_t offset = 8192 + seed % 64;
        pair.a.fill(++seed, offset, length);
        std::memset(pair.b.bytes, 0xEE, offset + length + 64);
        const size_t sent = pair.a.sent, seen = pair.b.immediates.size();
        REQUIRE(pair.a.post(pair.a.request(immediate ? Opcode::kWriteImmediate : Opcode::kWrite, offset, offset, length,
                                           seed * 0x01010101u),
                            &pair.b) == 0);
        if (immediate) {
          REQUIRE(pair.run([&] { return pair.b.immediates.size() > seen; }));
          CHECK(pair.b.immediates.back() == seed * 0x01010101u);
          CHECK(pair.b.holds(seed, offset, length));
        }
        REQUIRE(pair.run([&] { return pair.a.sent > sent; }));
        if (!immediate && !pair.a.provider->capabilities().delivery_complete) continue;
        CHECK(pair.b.holds(seed, offset, length));
        CHECK(pair.b.bytes[offset - 1] == 0xEE);
        CHECK(pair.b.bytes[offset + length] == 0xEE);
      }
    }
    CHECK(pair.a.failures.empty());
    CHECK(pair.b.failures.empty());
  }

  TEST_CASE("a null address is fine where the length is 0") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    WorkRequest r = pair.a.request(Opcode::kWriteImmediate, 0, 0, 0, 5);
    r.local = nullptr;
    r.local_key = 0;
    REQUIRE(pair.a.post(r, &pair.b) == 0);
    CHECK(pair.run([&] { return pair.b.immediates.size() == 1 && pair.a.sent == 1; }));
  }

  TEST_CASE("reads bring the bytes") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    for (const size_t length : {1, 100, 5000, 1 << 20}) {
      pair.b.fill(9, 4096, length);
      std::memset(pair.a.bytes, 0, length + 4096);
      const size_t sent = pair.a.sent;
      REQUIRE(pair.a.post(pair.a.request(Opcode::kRead, 0, 4096, length), &pair.b) == 0);
      REQUIRE(pair.run([&] { return pair.a.sent > sent; }));
      CHECK(pair.a.holds(9, 0, length));
      CHECK(pair.a.bytes[length] == 0);
    }
  }

  TEST_CASE("messages arrive in order, where the provider says so, both ways at once") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    const size_t count = 500;
    auto text = [](size_t i) {
      return std::string(1 + i * 7 % 4000, static_cast<char>('a' + i % 26)) + std::to_string(i);
    };
    size_t from_a = 0, from_b = 0;
    auto push = [&](Side& side, size_t* next) {
      // 32 in flight: the receiver's receives are credits
      while (*next < count && *next - side.sent < 16) {
        const std::string body = text(*next);
        const size_t slot = *next % 64 * 8192;
        std::memcpy(side.bytes + slot, body.data(), body.size());
        const WorkRequest r = side.request(Opcode::kSend, slot, 0, body.size());
        const PostResult result = side.provider->post(0, {&r, 1});
        REQUIRE(result.provider_status == 0);
        if (result.posted == 0) break;
        ++*next;
      }
    };
    REQUIRE(pair.run([&] {
      push(pair.a, &from_a), push(pair.b, &from_b);
      return pair.b.messages.size() == count && pair.a.messages.size() == count;
    }));
    if (!pair.a.provider->capabilities().ordered_sends) {  // then in any order, each once
      const auto number = [](const std::string& m) { return std::stoul(m.substr(m.find_first_of("0123456789"))); };
      const auto earlier = [&](const std::string& m, const std::string& n) { return number(m) < number(n); };
      for (Side* side : {&pair.a, &pair.b}) std::sort(side->messages.begin(), side->messages.end(), earlier);
    }
    for (size_t i = 0; i < count; ++i) {
      CHECK(pair.a.messages[i] == text(i));
      CHECK(pair.b.messages[i] == text(i));
    }
  }

  TEST_CASE("10000 writes against a full queue: each completes once") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    size_t posted = 0, busy = 0;
    const size_t count = 10000;
    std::vector<WorkRequest> batch;
    while (posted < count) {
      batch.clear();
      for (size_t i = 0; i < 64 && posted + i < count; ++i) {
        batch.push_back(pair.a.request((posted + i) % 2 ? Opcode::kWriteImmediate : Opcode::kWrite, 0, 64 * i, 64,
                                       static_cast<uint32_t>(posted + i)));
        batch.back().context = &pair.a.contexts[(posted + i) % pair.a.contexts.size()];
      }
      const PostResult result = pair.a.provider->post(0, batch);
      REQUIRE(result.provider_status == 0);
      posted += result.posted;
      if (result.busy) {
        ++busy;
        pair.a.step(), pair.b.step();
      }
    }
    REQUIRE(pair.run([&] { return pair.a.sent == count; }));
    REQUIRE(pair.run([&] { return pair.b.immediates.size() >= count / 2; }));
    pair.a.step(), pair.b.step();
    CHECK(pair.a.sent == count);
    CHECK(pair.b.immediates.size() == count / 2);
    MESSAGE(transport << ": busy " << busy << " times, immediates " << pair.b.immediates.size());
    CHECK(pair.a.failures.empty());
  }

  TEST_CASE("64 MiB in chunks") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    const size_t chunk = std::min<size_t>(pair.a.provider->capabilities().max_write_bytes, 4 << 20), total = 64 << 20;
    pair.a.fill(3, 0, total);
    for (size_t offset = 0; offset < total; offset += chunk) {
      REQUIRE(pair.a.post(pair.a.request(offset + chunk == total ? Opcode::kWriteImmediate : Opcode::kWrite, offset,
                                         offset, chunk, 1),
                          &pair.b) == 0);
    }
    REQUIRE(pair.run([&] { return pair.a.sent == total / chunk && pair.b.immediates.size() == 1; }));
    CHECK(pair.b.holds(3, 0, total));
  }

  TEST_CASE("several NICs") {
    FOR_EACH_LOCAL_TRANSPORT
    ProviderOptions x = Side::options(transport), y = Side::options(transport);
    x.nic_count = y.nic_count = 3;
    Pair pair(x, y);
    REQUIRE(pair.a.provider->nic_count() == 3);
    for (uint32_t nic = 0; nic < 3; ++nic) {
      pair.a.fill(nic + 1, nic * 100000, 50000);
      REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, nic * 100000, nic * 100000, 50000, nic, nic), &pair.b,
                          nic) == 0);
    }
    REQUIRE(pair.run([&] { return pair.b.immediates.size() == 3 && pair.a.sent == 3; }));
    for (uint32_t nic = 0; nic < 3; ++nic) CHECK(pair.b.holds(nic + 1, nic * 100000, 50000));
  }

  TEST_CASE("an immediate behind plain writes is seen after their bytes, where the provider says so") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    if (!pair.a.provider->capabilities().ordered_writes) return;
    for (uint32_t round = 1; round < 200; ++round) {
      const size_t large = round % 3 ? 300000 + round * 100 : 100;
      pair.a.fill(round, 0, large);
      pair.a.fill(round, 1 << 20, 64);
      REQUIRE(pair.a.post(pair.a.request(Opcode::kWrite, 0, 0, large), &pair.b) == 0);
      REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 1 << 20, 1 << 20, 64, round), &pair.b) == 0);
      REQUIRE(pair.run([&] { return pair.b.immediates.size() == round; }));
      REQUIRE(pair.b.holds(round, 0, large));
      REQUIRE(pair.b.holds(round, 1 << 20, 64));
    }
  }

  TEST_CASE("a peer of the same process closes with work under way in both directions") {
    FOR_EACH_LOCAL_TRANSPORT
    for (const size_t length : {64, 100000}) {
      auto pair = std::make_unique<Pair>(transport);
      Side& a = pair->a;
      REQUIRE(pair->b.post(pair->b.request(Opcode::kWriteImmediate, 0, 0, 64, 1), &a) == 0);
      REQUIRE(a.post(a.request(Opcode::kWriteImmediate, 0, 0, 64, 1), &pair->b) == 0);
      REQUIRE(pair->run([&] { return a.immediates.size() == 1 && pair->b.immediates.size() == 1; }));
      pair->b.post(pair->b.request(Opcode::kWriteImmediate, 0, 0, length, 2));
      a.post(a.request(Opcode::kWriteImmediate, 0, 0, length, 2));
      pair->b.provider.reset();
      for (int i = 0; i < 1000; ++i) a.step();
      const WorkRequest r = a.request(Opcode::kWrite, 0, 0, 64);
      const PostResult result = a.provider->post(0, {&r, 1});
      if (std::string(transport) == "shm") CHECK(result.provider_status == ENOTCONN);
      for (int i = 0; i < 1000; ++i) a.step();
      a.provider->close_path(0, a.paths[0]);
      for (int i = 0; i < 1000; ++i) a.step();
    }
  }
}
