// Both ends of the libfabric transport for its tests: Side, Pair (one process) and Child (two processes).
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>
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

namespace te::test {

inline constexpr int64_t kSecond = 1'000'000'000;
inline constexpr size_t kRegionBytes = 96 << 20;
inline constexpr size_t kReceives = 64, kReceiveBytes = 4096;

inline bool until(const std::function<bool()>& done, const std::function<void()>& step, double seconds = 20) {
  const int64_t deadline = now_ns() + static_cast<int64_t>(seconds * kSecond);
  while (!done()) {
    if (now_ns() > deadline) return false;
    step();
  }
  return true;
}

inline uint8_t pattern(uint32_t seed, size_t i) { return static_cast<uint8_t>(seed * 37 + i * 7 + (i >> 12)); }

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
    o.nics = {o.transport == "efa" ? next_device() : "lo"};
    random_bytes(o.identity, sizeof o.identity);
    return o;
  }

  // Of the stand-in for libfabric, which main gives 16; no two sides in a row have the same.
  static std::string next_device() {
    static uint32_t next = 0;
    return "efa" + std::to_string(next++ % 16);
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
    REQUIRE(
        provider->post_receive(0, receive_buffer(i), kReceiveBytes, keys[0].local_key, &receive_contexts[i]).posted ==
        1);
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

inline const char* const kTransports[] = {"tcp", "shm"};
inline const char* const kLocalTransports[] = {"tcp", "shm", "efa"};  // efa: over the stand-in, in one process

// Every test runs once per transport.
#define FOR_EACH_OF(transports)                 \
  const char* transport = nullptr;              \
  for (const char* each : transports) {         \
    DOCTEST_SUBCASE(each) { transport = each; } \
  }                                             \
  if (transport == nullptr) return;
#define FOR_EACH_TRANSPORT FOR_EACH_OF(kTransports)
#define FOR_EACH_LOCAL_TRANSPORT FOR_EACH_OF(kLocalTransports)

// --- two processes: the child serves a region and answers questions ---------------------------------------------------------

struct Question {
  char
      what;  // p: poison, h: holds pattern?, i: immediates so far, m: messages so far, s: sleep until woken, d: drop the region, q: quit
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
    const bool got = until([&] { return recv(ends_[0], &value, sizeof value, MSG_DONTWAIT) == sizeof value; },
                           [&] { side->step(); });
    REQUIRE(got);
    return value;
  }
  pid_t pid() const { return pid_; }

 private:
  static void serve(const ProviderOptions& options, int fd) {
    Side side(options);
    const Exported ours = side.exported();
    Exported theirs{};
    if (write(fd, &ours, sizeof ours) != sizeof ours || recv(fd, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
      _exit(1);
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

}  // namespace te::test
