// The libfabric transport over tcp and shm: two providers in one process, and two processes.
#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "efa/provider.h"
#include "native/system.h"

namespace {

using namespace te;

constexpr int64_t kSecond = 1'000'000'000;
constexpr size_t kRegionBytes = 96 << 20;
constexpr size_t kReceives = 64, kReceiveBytes = 4096;

bool until(const std::function<bool()>& done, const std::function<void()>& step, double seconds = 20) {
  const int64_t deadline = now_ns() + static_cast<int64_t>(seconds * kSecond);
  while (!done()) {
    if (now_ns() > deadline) return false;
    step();
  }
  return true;
}

uint8_t pattern(uint32_t seed, size_t i) { return static_cast<uint8_t>(seed * 37 + i * 7 + (i >> 12)); }

struct Exported {
  te_nic_address address[4];
  uint64_t base[4], key[4];
  uint32_t nics;
};

// A provider with one registered region, receives posted, and everything that it has completed so far.
struct Side {
  std::unique_ptr<Provider> provider;
  uint8_t* bytes = nullptr;
  MemoryKey keys[4];
  PathId paths[4] = {};
  Exported peer{};
  std::vector<WorkContext> contexts;
  std::vector<WorkContext> receive_contexts;
  size_t sent = 0, next_context = 0;
  std::vector<uint32_t> immediates;
  std::vector<std::string> messages;
  std::vector<Completion> failures;

  static ProviderOptions options(const char* transport) {
    ProviderOptions o;
    o.transport = transport;
    o.nics = {"lo"};
    random_bytes(o.identity, sizeof o.identity);
    return o;
  }

  explicit Side(const char* transport) : Side(options(transport)) {}
  explicit Side(const ProviderOptions& o) : contexts(4096), receive_contexts(kReceives) {
    const Error error = efa::open_provider(o, &provider);
    INFO(error.message());
    REQUIRE(error.ok());
    bytes = static_cast<uint8_t*>(
        mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (uint32_t nic = 0; nic < provider->nic_count(); ++nic) {
      REQUIRE(provider->register_memory(nic, {bytes, kRegionBytes, TE_DEVICE_HOST, 0}, &keys[nic]).ok());
    }
    for (size_t i = 0; i < kReceives; ++i) receive(i);
  }
  ~Side() {
    provider.reset();
    munmap(bytes, kRegionBytes);
  }

  uint8_t* receive_buffer(size_t i) { return bytes + kRegionBytes - (i + 1) * kReceiveBytes; }
  void receive(size_t i) {
    REQUIRE(provider->post_receive(0, receive_buffer(i), kReceiveBytes, keys[0].local_key, &receive_contexts[i]).posted == 1);
  }
  Exported exported() const {
    Exported e{};
    e.nics = provider->nic_count();
    for (uint32_t nic = 0; nic < e.nics; ++nic) {
      e.address[nic] = provider->nic(nic).address;
      e.base[nic] = keys[nic].base;
      e.key[nic] = keys[nic].remote_key;
    }
    return e;
  }
  void connect(const Exported& to) {
    peer = to;
    for (uint32_t nic = 0; nic < provider->nic_count(); ++nic) {
      const Error error = provider->open_path(nic, to.address[nic], 1, &paths[nic]);
      INFO(error.message());
      REQUIRE(error.ok());
    }
  }
  WorkRequest request(Opcode opcode, size_t from, size_t to, size_t length, uint32_t immediate = 0, uint32_t nic = 0) {
    WorkRequest r;
    r.opcode = opcode;
    r.immediate = immediate;
    r.path = paths[nic];
    r.local = bytes + from;
    r.local_key = keys[nic].local_key;
    r.length = length;
    r.remote_address = peer.base[nic] + to;
    r.remote_key = peer.key[nic];
    r.context = &contexts[next_context++ % contexts.size()];
    return r;
  }
  void take(const Completion& c) {
    if (c.status != Status::kOk) failures.push_back(c);
    if (c.kind == CompletionKind::kSent) ++sent;
    if (c.kind == CompletionKind::kImmediate) immediates.push_back(c.immediate);
    if (c.kind == CompletionKind::kReceived) {
      const size_t i = static_cast<size_t>(c.context - receive_contexts.data());
      messages.emplace_back(reinterpret_cast<char*>(receive_buffer(i)), c.length);
      receive(i);
    }
  }
  uint32_t step() {
    uint32_t total = 0;
    Completion out[16];
    for (uint32_t nic = 0; nic < provider->nic_count(); ++nic) {
      const uint32_t n = provider->poll(nic, out);
      for (uint32_t i = 0; i < n; ++i) take(out[i]);
      total += n;
    }
    provider->ring_doorbells();
    return total;
  }
  // Posts, polling this side and `other` while the queue is full.
  int post(const WorkRequest& r, Side* other = nullptr, uint32_t nic = 0, double seconds = 20) {
    int status = -1;
    until([&] { return status >= 0; },
          [&] {
            const PostResult result = provider->post(nic, {&r, 1});
            provider->ring_doorbells();
            if (result.posted == 1) status = 0;
            else if (!result.busy) status = result.provider_status;
            else {
              step();
              if (other != nullptr) other->step();
            }
          },
          seconds);
    return status;
  }
  void fill(uint32_t seed, size_t offset, size_t length) {
    for (size_t i = 0; i < length; ++i) bytes[offset + i] = pattern(seed, i);
  }
  bool holds(uint32_t seed, size_t offset, size_t length) const {
    for (size_t i = 0; i < length; ++i) {
      if (bytes[offset + i] != pattern(seed, i)) return false;
    }
    return true;
  }
};

struct Pair {
  Side a, b;
  explicit Pair(const char* transport) : Pair(Side::options(transport), Side::options(transport)) {}
  Pair(const ProviderOptions& x, const ProviderOptions& y) : a(x), b(y) {
    a.connect(b.exported());
    b.connect(a.exported());
  }
  bool run(const std::function<bool()>& done, double seconds = 20) {
    return until(done, [&] { a.step(), b.step(); }, seconds);
  }
};

const char* const kTransports[] = {"tcp", "shm"};

// Every test runs once per transport.
#define FOR_EACH_TRANSPORT \
  const char* transport = nullptr; \
  for (const char* each : kTransports) { \
    DOCTEST_SUBCASE(each) { transport = each; } \
  } \
  if (transport == nullptr) return;

// --- two processes: the child serves a region and answers questions ---------------------------------------------------------

struct Question {
  char what;  // p: poison, h: holds pattern?, i: immediates so far, m: messages so far, s: sleep until woken, d: drop the region, q: quit
  uint32_t seed;
  uint64_t offset, length;
};

class Child {
 public:
  explicit Child(const ProviderOptions& options) {
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends_[0]);
      serve(options, ends_[1]);
      _exit(0);
    }
    close(ends_[1]);
  }
  ~Child() {
    if (pid_ > 0) stop();
    close(ends_[0]);
  }
  void kill_now() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void stop() {
    const Question q{'q', 0, 0, 0};
    (void)!write(ends_[0], &q, sizeof q);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  // Meets `side`: both know each other afterwards.
  void connect(Side* side) {
    Exported theirs{};
    REQUIRE(recv(ends_[0], &theirs, sizeof theirs, MSG_WAITALL) == static_cast<ssize_t>(sizeof theirs));
    const Exported ours = side->exported();
    REQUIRE(write(ends_[0], &ours, sizeof ours) == static_cast<ssize_t>(sizeof ours));
    side->connect(theirs);
    char ready;
    REQUIRE(recv(ends_[0], &ready, 1, MSG_WAITALL) == 1);
  }
  // Asks while `side` keeps polling.
  int64_t ask(Side* side, Question q) {
    REQUIRE(write(ends_[0], &q, sizeof q) == static_cast<ssize_t>(sizeof q));
    return answer(side);
  }
  void tell(Question q) { REQUIRE(write(ends_[0], &q, sizeof q) == static_cast<ssize_t>(sizeof q)); }
  int64_t answer(Side* side) {
    int64_t value = -1;
    const bool got = until([&] { return recv(ends_[0], &value, sizeof value, MSG_DONTWAIT) == sizeof value; }, [&] { side->step(); });
    REQUIRE(got);
    return value;
  }
  pid_t pid() const { return pid_; }

 private:
  static void serve(const ProviderOptions& options, int fd) {
    Side side(options);
    const Exported ours = side.exported();
    Exported theirs{};
    if (write(fd, &ours, sizeof ours) != sizeof ours || recv(fd, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs) _exit(1);
    side.connect(theirs);
    const char ready = 1;
    if (write(fd, &ready, 1) != 1) _exit(1);
    for (;;) {
      Question q;
      const ssize_t got = recv(fd, &q, sizeof q, MSG_DONTWAIT);
      if (got == 0) _exit(0);
      if (got != sizeof q) {
        side.step();
        continue;
      }
      int64_t value = 0;
      if (q.what == 'p') std::memset(side.bytes + q.offset, 0xEE, q.length);
      if (q.what == 'h') value = side.holds(q.seed, q.offset, q.length);
      if (q.what == 'i') value = static_cast<int64_t>(side.immediates.size());
      if (q.what == 'm') value = static_cast<int64_t>(side.messages.size());
      if (q.what == 's') value = sleep_until_woken(&side, fd);
      if (q.what == 'd') value = side.provider->deregister_memory(0, side.keys[0]).ok();
      if (q.what == 'w') value = side.post(side.request(Opcode::kWriteImmediate, 0, 0, q.length, 1));
      if (q.what == 'q') return;
      if (write(fd, &value, sizeof value) != sizeof value) _exit(1);
    }
  }
  // 1: woken by the transport's descriptor, and the work was there.
  static int64_t sleep_until_woken(Side* side, int fd) {
    const size_t before = side->immediates.size() + side->messages.size();
    const bool armed = until([&] { return side->provider->arm(0); }, [&] { side->step(); });
    if (!armed) return -1;
    const int64_t ready = 77;
    if (write(fd, &ready, sizeof ready) != sizeof ready) return -1;
    pollfd entry{side->provider->wait_fd(0), POLLIN, 0};
    for (;;) {
      if (::poll(&entry, 1, 5000) != 1) return -2;
      side->step();
      if (side->immediates.size() + side->messages.size() > before) return 1;
      if (!until([&] { return side->provider->arm(0); }, [&] { side->step(); })) return -3;
      if (side->immediates.size() + side->messages.size() > before) return 1;
    }
  }
  int ends_[2];
  pid_t pid_ = 0;
};

}  // namespace

TEST_SUITE("efa") {
  TEST_CASE("what the providers say of themselves") {
    FOR_EACH_TRANSPORT
    Side side(transport);
    const Capabilities& c = side.provider->capabilities();
    MESSAGE(transport << ": " << side.provider->provider_name() << ", " << side.provider->library_name() << ", depth " << c.nic_depth
                      << ", receives " << c.receive_depth << ", ordered " << c.ordered_writes << ", wait fd " << side.provider->wait_fd(0)
                      << ", address length " << side.provider->nic(0).address.length);
    CHECK(c.max_write_bytes == 4 << 20);
    CHECK(c.nic_depth >= 64);
    CHECK(c.reads);
    CHECK(side.provider->wait_fd(0) >= 0);
    std::string provider, library;
    CHECK(efa::probe(transport, &provider, &library).ok());
    CHECK(provider == side.provider->provider_name());
  }

  TEST_CASE("writes of every length arrive whole, and an immediate behind them counts once") {
    FOR_EACH_TRANSPORT
    Pair pair(transport);
    std::vector<size_t> lengths = {0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 1000, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) + 3, 4 << 20};
    uint32_t seed = 1;
    for (const size_t length : lengths) {
      for (const bool immediate : {false, true}) {
        CAPTURE(length);
        CAPTURE(immediate);
        const size_t offset = 8192 + seed % 64;
        pair.a.fill(++seed, offset, length);
        std::memset(pair.b.bytes, 0xEE, offset + length + 64);
        const size_t sent = pair.a.sent, seen = pair.b.immediates.size();
        REQUIRE(pair.a.post(pair.a.request(immediate ? Opcode::kWriteImmediate : Opcode::kWrite, offset, offset, length, seed * 0x01010101u), &pair.b) == 0);
        if (immediate) {
          REQUIRE(pair.run([&] { return pair.b.immediates.size() > seen; }));
          CHECK(pair.b.immediates.back() == seed * 0x01010101u);
          CHECK(pair.b.holds(seed, offset, length));
        }
        REQUIRE(pair.run([&] { return pair.a.sent > sent; }));
        CHECK(pair.b.holds(seed, offset, length));
        CHECK(pair.b.bytes[offset - 1] == 0xEE);
        CHECK(pair.b.bytes[offset + length] == 0xEE);
      }
    }
    CHECK(pair.a.failures.empty());
    CHECK(pair.b.failures.empty());
  }

  TEST_CASE("a null address is fine where the length is 0") {
    FOR_EACH_TRANSPORT
    Pair pair(transport);
    WorkRequest r = pair.a.request(Opcode::kWriteImmediate, 0, 0, 0, 5);
    r.local = nullptr;
    r.local_key = 0;
    REQUIRE(pair.a.post(r, &pair.b) == 0);
    CHECK(pair.run([&] { return pair.b.immediates.size() == 1 && pair.a.sent == 1; }));
  }

  TEST_CASE("reads bring the bytes") {
    FOR_EACH_TRANSPORT
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

  TEST_CASE("messages arrive in order, both ways at once") {
    FOR_EACH_TRANSPORT
    Pair pair(transport);
    const size_t count = 500;
    auto text = [](size_t i) { return std::string(1 + i * 7 % 4000, static_cast<char>('a' + i % 26)) + std::to_string(i); };
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
    for (size_t i = 0; i < count; ++i) {
      CHECK(pair.a.messages[i] == text(i));
      CHECK(pair.b.messages[i] == text(i));
    }
  }

  TEST_CASE("10000 writes against a full queue: each completes once") {
    FOR_EACH_TRANSPORT
    Pair pair(transport);
    size_t posted = 0, busy = 0;
    const size_t count = 10000;
    std::vector<WorkRequest> batch;
    while (posted < count) {
      batch.clear();
      for (size_t i = 0; i < 64 && posted + i < count; ++i) {
        batch.push_back(pair.a.request(i % 2 ? Opcode::kWriteImmediate : Opcode::kWrite, 0, 64 * i, 64, static_cast<uint32_t>(posted + i)));
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
    MESSAGE(transport << ": busy " << busy << " times, immediates " << pair.b.immediates.size());
    CHECK(pair.a.failures.empty());
  }

  TEST_CASE("64 MiB in chunks") {
    FOR_EACH_TRANSPORT
    Pair pair(transport);
    const size_t chunk = pair.a.provider->capabilities().max_write_bytes, total = 64 << 20;
    pair.a.fill(3, 0, total);
    for (size_t offset = 0; offset < total; offset += chunk) {
      REQUIRE(pair.a.post(pair.a.request(offset + chunk == total ? Opcode::kWriteImmediate : Opcode::kWrite, offset, offset, chunk, 1), &pair.b) == 0);
    }
    REQUIRE(pair.run([&] { return pair.a.sent == total / chunk && pair.b.immediates.size() == 1; }));
    CHECK(pair.b.holds(3, 0, total));
  }

  TEST_CASE("several NICs") {
    FOR_EACH_TRANSPORT
    ProviderOptions x = Side::options(transport), y = Side::options(transport);
    x.nic_count = y.nic_count = 3;
    Pair pair(x, y);
    REQUIRE(pair.a.provider->nic_count() == 3);
    for (uint32_t nic = 0; nic < 3; ++nic) {
      pair.a.fill(nic + 1, nic * 100000, 50000);
      REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, nic * 100000, nic * 100000, 50000, nic, nic), &pair.b, nic) == 0);
    }
    REQUIRE(pair.run([&] { return pair.b.immediates.size() == 3 && pair.a.sent == 3; }));
    for (uint32_t nic = 0; nic < 3; ++nic) CHECK(pair.b.holds(nic + 1, nic * 100000, 50000));
  }

  TEST_CASE("an immediate behind plain writes is seen after their bytes, where the provider says so") {
    FOR_EACH_TRANSPORT
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
      CHECK(child.ask(&side, {'h', seed, 0, length}) == 1);
    }
    CHECK(child.ask(&side, {'i', 0, 0, 0}) == 5);
    REQUIRE(side.post(side.request(Opcode::kSend, 0, 0, 100)) == 0);
    REQUIRE(until([&] { return side.sent == 6; }, [&] { side.step(); }));
    CHECK(child.ask(&side, {'m', 0, 0, 0}) == 1);
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
      REQUIRE(side.post(side.request(Opcode::kWrite, 0, 0, 64)) == 0);
      REQUIRE(until([&] { return side.sent == 1; }, [&] { side.step(); }));
      child.ask(&side, {'p', 0, 0, 4096});
      WorkRequest r = side.request(Opcode::kWrite, 0, 0, 64);
      if (stale) child.ask(&side, {'d', 0, 0, 0});
      else r.remote_key ^= 0x5a5a;
      REQUIRE(side.post(r) == 0);
      const bool completed = until([&] { return side.sent == 2; }, [&] { side.step(); }, 2);
      MESSAGE(transport << (stale ? " stale" : " bad") << " key: completed " << completed << ", failures " << side.failures.size()
                        << (side.failures.empty() ? "" : status_name(side.failures[0].status)));
      CHECK(child.ask(&side, {'h', 1, 0, 64}) == 0);
      if (side.provider->capabilities().keys_enforced) CHECK(side.failures.size() == 1);
    }
  }

  TEST_CASE("two processes: a killed peer") {
    FOR_EACH_TRANSPORT
    Child child(Side::options(transport));
    Side side(transport);
    child.connect(&side);
    REQUIRE(side.post(side.request(Opcode::kWrite, 0, 0, 64)) == 0);
    REQUIRE(until([&] { return side.sent == 1; }, [&] { side.step(); }));
    CHECK_FALSE(side.provider->proven_dead(0, side.paths[0]));
    child.kill_now();
    CHECK(side.provider->proven_dead(0, side.paths[0]) == (std::string(transport) == "shm"));
    const int posted = side.post(side.request(Opcode::kWriteImmediate, 0, 0, 64), nullptr, 0, 1);
    const bool completed = until([&] { return side.sent == 2; }, [&] { side.step(); }, 1);
    MESSAGE(transport << ": post " << posted << ", completed " << completed << ", failures " << side.failures.size());
    side.provider->close_path(0, side.paths[0]);
  }
}
