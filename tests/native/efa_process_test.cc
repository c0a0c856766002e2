// The libfabric transport over tcp and shm, between processes that sleep, die and come again.
#include "tests/native/efa_support.h"

using namespace te;
using namespace te::test;

TEST_SUITE("efa") {
  TEST_CASE("two processes: writes, messages") {
    FOR_EACH_TRANSPORT
    Child child(Side::options(transport));
    Side side(transport);
    child.connect(&side);
    uint32_t seed = 100;
    for (const size_t length : {1, 64, 4096, 70000, 4 << 20}) {
      CAPTURE(length);
      side.fill(++seed, 0, length);
      child.ask(&side, {'p', 0, 0, length + 1});
      const size_t sent = side.sent;
      REQUIRE(side.post(side.request(Opcode::kWriteImmediate, 0, 0, length, seed)) == 0);
      REQUIRE(until([&] { return side.sent > sent; }, [&] { side.step(); }));
      // The completion proves delivery only where the provider says so; the immediate always does.
      if (!side.provider->capabilities().delivery_complete) {
        const int64_t seen = seed - 100;
        REQUIRE(until([&] { return child.ask(&side, {'i', 0, 0, 0}) == seen; }, [] {}));
      }
      CHECK(child.ask(&side, {'h', seed, 0, length}) == 1);
    }
    CHECK(child.ask(&side, {'i', 0, 0, 0}) == 5);
    REQUIRE(side.post(side.request(Opcode::kSend, 0, 0, 100)) == 0);
    REQUIRE(until([&] { return side.sent == 6; }, [&] { side.step(); }));
    CHECK(until([&] { return child.ask(&side, {'m', 0, 0, 0}) == 1; }, [] {}));
  }

  TEST_CASE("two processes: a sleeper is woken by an immediate and by a message") {
    FOR_EACH_TRANSPORT
    Child child(Side::options(transport));
    Side side(transport);
    child.connect(&side);
    for (int round = 0; round < 50; ++round) {
      child.tell({'s', 0, 0, 0});
      REQUIRE(child.answer(&side) == 77);
      REQUIRE(side.post(side.request(round % 2 ? Opcode::kSend : Opcode::kWriteImmediate, 0, 0, 64, 1)) == 0);
      REQUIRE(child.answer(&side) == 1);
    }
  }

  TEST_CASE("two processes: a key that was never given, or is no longer valid, writes nothing") {
    FOR_EACH_TRANSPORT
    for (const bool stale : {false, true}) {
      CAPTURE(stale);
      Child child(Side::options(transport));
      Side side(transport);
      child.connect(&side);
      side.fill(1, 0, 4096);
      REQUIRE(side.post(side.request(Opcode::kWriteImmediate, 0, 0, 64)) == 0);
      REQUIRE(until([&] { return child.ask(&side, {'i', 0, 0, 0}) == 1 && side.sent == 1; }, [] {}));
      child.ask(&side, {'p', 0, 0, 4096});
      WorkRequest r = side.request(Opcode::kWrite, 0, 0, 64);
      if (stale) child.ask(&side, {'d', 0, 0, 0});
      else r.remote_key ^= 0x5a5a;
      REQUIRE(side.post(r) == 0);
      REQUIRE(until([&] { return side.sent == 2; }, [&] { side.step(); }));
      if (side.provider->capabilities().keys_enforced) {
        REQUIRE(side.failures.size() == 1);
        CHECK(side.failures[0].status == Status::kTransport);  // tcp cannot tell it from a broken connection
        CHECK(side.failures[0].landed_unknown);
      }
      // A message behind it arrives; over tcp the connection comes back by itself.
      REQUIRE(side.post(side.request(Opcode::kSend, 0, 0, 64)) == 0);
      REQUIRE(until([&] { return child.ask(&side, {'m', 0, 0, 0}) == 1; }, [] {}));
      CHECK(child.ask(&side, {'h', 1, 0, 64}) == 0);
    }
  }

  TEST_CASE("two processes: a killed peer") {
    FOR_EACH_TRANSPORT
    Child child(Side::options(transport));
    Side side(transport);
    child.connect(&side);
    REQUIRE(side.post(side.request(Opcode::kWrite, 0, 0, 64)) == 0);
    REQUIRE(until([&] { return side.sent == 1; }, [&] { side.step(); }));
    CHECK(side.provider->death_of(0, side.paths[0]) != Death::kProven);
    kill(child.pid(), SIGSTOP);
    REQUIRE(side.post(side.request(Opcode::kWriteImmediate, 0, 0, 100000, 0)) == 0);
    child.kill_now();
    const bool shm = std::string(transport) == "shm";
    CHECK((side.provider->death_of(0, side.paths[0]) == Death::kProven) == shm);
    if (!shm) {  // shm never tells
      REQUIRE(until([&] { return side.sent == 2; }, [&] { side.step(); }));
      REQUIRE(side.failures.size() == 1);
      CHECK(side.failures[0].status == Status::kTransport);
    }
    side.provider->close_path(0, side.paths[0]);
    // An unanswered request does not keep us awake for ever.
    CHECK(until([&] { return side.provider->arm(0); }, [&] { side.step(); }, 5));
  }

  TEST_CASE("two processes: a peer that comes back at the same address is reached by a new path") {
    ProviderOptions options = Side::options("tcp");
    Side side("tcp");
    auto child = std::make_unique<Child>(options);
    child->connect(&side);
    sockaddr_in ip;
    std::memcpy(&ip, side.peer.address[0].bytes, sizeof ip);
    REQUIRE(side.post(side.request(Opcode::kSend, 0, 0, 64)) == 0);
    REQUIRE(until([&] { return side.sent == 1; }, [&] { side.step(); }));
    child->kill_now();
    REQUIRE(side.post(side.request(Opcode::kWrite, 0, 0, 64), nullptr, 0, 2) <= 0);  // fails, or is never taken
    until([&] { return side.sent == 2; }, [&] { side.step(); }, 1);
    side.provider->close_path(0, side.paths[0]);

    options.port_low = options.port_high = ntohs(ip.sin_port);
    child = std::make_unique<Child>(options);
    child->connect(&side);
    CHECK(std::memcmp(&ip, side.peer.address[0].bytes, sizeof ip) == 0);
    const size_t sent = side.sent;
    side.fill(8, 0, 5000);
    REQUIRE(side.post(side.request(Opcode::kWriteImmediate, 0, 0, 5000, 1)) == 0);
    REQUIRE(until([&] { return side.sent > sent; }, [&] { side.step(); }));
    CHECK(side.failures.size() <= 1);
    CHECK(child->ask(&side, {'h', 8, 0, 5000}) == 1);
  }

  TEST_CASE("two processes: a path is closed while the peer still writes through it") {
    FOR_EACH_TRANSPORT
    Child child(Side::options(transport));
    Side side(transport);
    child.connect(&side);
    REQUIRE(side.post(side.request(Opcode::kWriteImmediate, 0, 0, 64, 1)) == 0);
    REQUIRE(until([&] { return side.sent == 1; }, [&] { side.step(); }));
    CHECK(child.ask(&side, {'w', 0, 0, 64}) == 0);
    child.tell({'w', 0, 0, 100000});
    side.provider->close_path(0, side.paths[0]);
    CHECK(child.answer(&side) == 0);
    CHECK(until([&] { return side.immediates.size() == 2; }, [&] { side.step(); }));
  }

  TEST_CASE("what a killed process leaves in /dev/shm is swept by the next to open") {
    Side first("shm");
    std::string left;
    {
      Child child(Side::options("shm"));
      child.connect(&first);
      left = reinterpret_cast<const char*>(first.peer.address[0].bytes);
      child.kill_now();
    }
    left = "/dev/shm/" + left.substr(left.find("te-"));
    CHECK(access(left.c_str(), F_OK) == 0);
    Side next("shm");
    CHECK(access(left.c_str(), F_OK) != 0);
    left = left.substr(0, left.find(':'));
    CHECK(access((left + ".bell").c_str(), F_OK) != 0);
    CHECK(access((left + ".ring").c_str(), F_OK) != 0);
  }

  TEST_CASE("the process keeps its own signal handlers") {
    struct sigaction before{}, after{};
    sigaction(SIGTERM, nullptr, &before);
    Side side("shm");
    sigaction(SIGTERM, nullptr, &after);
    CHECK((before.sa_handler == after.sa_handler));
  }
}
