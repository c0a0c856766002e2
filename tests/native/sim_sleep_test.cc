// Sleeping on the simulated transport: wait_fd and arm.
#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim::test;

namespace {

bool readable(int fd) { return wait_readable(fd, 0); }

}  // namespace

TEST_CASE("sim wait_fd: readable when there is something to poll, and arm never sleeps over work") {
  Player a("delay=3"), b("");
  const int fd_a = a.provider->wait_fd(0), fd_b = b.provider->wait_fd(0);
  REQUIRE(fd_a >= 0);
  REQUIRE(fd_b >= 0);
  CHECK(a.provider->arm(0));
  CHECK(b.provider->arm(0));
  CHECK_FALSE(readable(fd_a));
  WorkRequest request = a.write(a.path_to(b), b, 0, 0, 0, 8);
  request.opcode = Opcode::kWriteImmediate;
  a.post_ok(request);
  CHECK_FALSE(a.provider->arm(0));  // it takes polls until the write moves
  CHECK(readable(fd_a));
  a.one();
  CHECK(a.provider->arm(0));
  CHECK_FALSE(readable(fd_a));
  CHECK(readable(fd_b));
  CHECK_FALSE(b.provider->arm(0));
  b.one();
  CHECK(b.provider->arm(0));
  CHECK_FALSE(readable(fd_b));
}

TEST_CASE("sim wait_fd: a stalled send lets its engine sleep, and the receive wakes it") {
  Player a(""), b("");
  a.post_ok(a.send(a.path_to(b), 0, 0, 8));
  CHECK(a.settle().empty());
  CHECK(a.provider->arm(0));
  b.receive_ok(0, 0, 8);
  CHECK(readable(a.provider->wait_fd(0)));
  CHECK_FALSE(a.provider->arm(0));
  CHECK(a.one().status == Status::kOk);
}

TEST_CASE("sim wait_fd=0: there is none, and arm refuses") {
  Player a("wait_fd=0");
  CHECK(a.provider->wait_fd(0) == -1);
  CHECK_FALSE(a.provider->arm(0));
  ProviderOptions busy = settings("");
  busy.want_wait_fd = false;
  CHECK(open_ok(busy)->wait_fd(0) == -1);
}
