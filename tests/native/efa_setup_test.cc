// The libfabric transport: opening it, its NICs and addresses, registration, and what errors mean.
#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdlib>
#include <thread>

#include "efa/classify.h"
#include "efa/process.h"
#include "tests/native/efa_support.h"

#ifdef TE_HAVE_LIBFABRIC
using namespace te;
using namespace te::test;

namespace {

uint16_t port_of(const te_nic_address& address) {
  sockaddr_in ip;
  std::memcpy(&ip, address.bytes, sizeof ip);
  return ntohs(ip.sin_port);
}

Error open_error(const ProviderOptions& options) {
  std::unique_ptr<Provider> provider;
  return efa::open_provider(options, &provider);
}

fi_cq_err_entry error_entry(int err, int prov_errno = 0) {
  fi_cq_err_entry entry{};
  entry.err = err;
  entry.prov_errno = prov_errno;
  return entry;
}

}  // namespace

TEST_SUITE("efa") {
  TEST_CASE("a transport, NIC or device that is not there is named") {
    ProviderOptions options = Side::options("tcp");
    options.nics = {"no-such-nic"};
    Error error = open_error(options);
    CHECK(error.status() == Status::kConfig);
    CHECK(error.message().find("no-such-nic") != std::string::npos);
    options.nics = {"203.0.113.7"};
    error = open_error(options);
    CHECK(error.status() == Status::kConfig);
    CHECK(error.message().find("203.0.113.7") != std::string::npos);
    error = open_error(Side::options("infiniband"));
    CHECK(error.status() == Status::kConfig);
    options = Side::options("efa");
    options.nics.clear();
    error = open_error(options);
    if (error) {
      CHECK(error.status() == Status::kTransportUnavailable);
      CHECK_FALSE(error.message().empty());
    }
  }

  TEST_CASE("a missing library is said to be missing, and tried again later") {
    // In a child: the environment is nobody else's.
    const pid_t child = fork();
    if (child == 0) {
      setenv("TE_LIBFABRIC", "/nonexistent/libfabric.so.1", 1);
      const Error error = open_error(Side::options("tcp"));
      const bool named =
          error.status() == Status::kTransportUnavailable && error.message().find("/nonexistent") != std::string::npos;
      unsetenv("TE_LIBFABRIC");
      _exit(named && open_error(Side::options("tcp")).ok() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }

  TEST_CASE("tcp binds within the range of ports and says so when it is used up") {
    // Below the range from which the kernel gives ports to others; somebody may still have one of a pair.
    ProviderOptions options = Side::options("tcp");
    for (uint16_t port = 20000; port < 20200; port = static_cast<uint16_t>(port + 2)) {
      options.port_low = port;
      options.port_high = static_cast<uint16_t>(port + 1);
      std::unique_ptr<Provider> one, other;
      if (!efa::open_provider(options, &one) && !efa::open_provider(options, &other)) break;
    }
    Side first(options), second(options);
    CHECK(port_of(first.provider->nic(0).address) >= options.port_low);
    CHECK(port_of(second.provider->nic(0).address) <= options.port_high);
    const Error error = open_error(options);
    CHECK(error.status() == Status::kConfig);
    CHECK(error.message().find("no free port") != std::string::npos);
  }

  TEST_CASE("tcp NICs are used in turns, and IPv6 works") {
    ProviderOptions options = Side::options("tcp");
    options.nics = {"127.0.0.1", "127.0.0.2"};
    options.nic_count = 3;
    Side side(options);
    CHECK(side.provider->nic(0).name == "127.0.0.1");
    CHECK(side.provider->nic(1).name == "127.0.0.2");
    CHECK(side.provider->nic(2).name == "127.0.0.1");

    options.nics = {"::1"};
    options.nic_count = 0;
    std::unique_ptr<Provider> six;
    if (efa::open_provider(options, &six)) return;  // no IPv6 here
    six.reset();
    Pair pair(options, options);
    pair.a.fill(5, 0, 10000);
    REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 10000, 1), &pair.b) == 0);
    REQUIRE(pair.run([&] { return pair.b.immediates.size() == 1; }));
    CHECK(pair.b.holds(5, 0, 10000));
    CHECK(pair.a.provider->nic(0).address.length == sizeof(sockaddr_in6));
  }

  TEST_CASE("addresses that are none") {
    FOR_EACH_TRANSPORT
    Side side(transport);
    te_nic_address address{};
    PathId path;
    CHECK(side.provider->open_path(0, address, 1, &path).status() == Status::kPeerUnreachable);
    address.length = 200;
    CHECK(side.provider->open_path(0, address, 1, &path).status() == Status::kPeerUnreachable);
    if (std::string(transport) == "shm") {
      for (const char* text : {"fi_shm://../../etc/passwd", "te-", "fi_shm://12345", "\xff\xff\xff"}) {
        address.length = static_cast<uint32_t>(std::strlen(text) + 1);
        std::memcpy(address.bytes, text, address.length);
        (void)side.provider->open_path(0, address, 1, &path);
      }
      std::memset(address.bytes, 'x', sizeof address.bytes);
      address.length = sizeof address.bytes;
      CHECK(side.provider->open_path(0, address, 1, &path).status() == Status::kPeerUnreachable);
    }
    const WorkRequest nowhere{};
    CHECK(side.provider->post(0, {&nowhere, 1}).provider_status == EINVAL);
  }

  TEST_CASE("memory that cannot be registered gives the reason") {
    FOR_EACH_TRANSPORT
    Side side(transport);
    MemoryKey key;
    auto refuse = [&](void* address, uint64_t length, int32_t kind = TE_DEVICE_HOST) {
      const Error error = side.provider->register_memory(0, {address, length, kind, 0}, &key);
      return error.status() == Status::kRegistration ? error.provider_status() : 0;
    };
    CHECK(refuse(side.bytes, 0) == EINVAL);
    CHECK(refuse(nullptr, 100) == EINVAL);
    CHECK(refuse(side.bytes, ~uint64_t{0}) == ERANGE);
    CHECK(refuse(side.bytes, 100, TE_DEVICE_CUDA) == EOPNOTSUPP);
    void* readonly = mmap(nullptr, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(refuse(readonly, 8192) == EACCES);
    munmap(readonly, 8192);
    CHECK(refuse(readonly, 8192) == EFAULT);
    for (const size_t length : {1, 3, 4097}) {
      CHECK(side.provider->register_memory(0, {side.bytes + 5, length, TE_DEVICE_HOST, 0}, &key).ok());
      CHECK(side.provider->deregister_memory(0, key).ok());
      CHECK(side.provider->deregister_memory(0, key).status() == Status::kRegistration);
    }
  }

  TEST_CASE("registration in another thread while traffic flows") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    std::atomic<bool> stop{false};
    std::atomic<size_t> rounds{0}, failed{0};
    std::thread other([&] {
      while (!stop) {
        MemoryKey keys[8];
        for (size_t i = 0; i < 8; ++i)
          failed +=
              pair.b.provider->register_memory(0, {pair.b.bytes + i * 100, 5000, TE_DEVICE_HOST, 0}, &keys[i]).ok() ? 0
                                                                                                                    : 1;
        for (const MemoryKey& key : keys) failed += pair.b.provider->deregister_memory(0, key).ok() ? 0 : 1;
        ++rounds;
      }
    });
    size_t posted = 0;
    const bool done =
        until([&] { return posted >= 2000 && rounds > 20; },
              [&] {
                if (pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 100 + posted % 9000, 1), &pair.b) == 0)
                  ++posted;
                pair.a.step(), pair.b.step();
              });
    stop = true;
    other.join();
    CHECK(done);
    CHECK(failed == 0);
    REQUIRE(pair.run([&] { return pair.a.sent == posted && pair.b.immediates.size() == posted; }));
  }

  TEST_CASE("an idle NIC's descriptor stays quiet after traffic") {
    FOR_EACH_LOCAL_TRANSPORT
    Pair pair(transport);
    for (int i = 0; i < 10; ++i)
      REQUIRE(pair.a.post(pair.a.request(Opcode::kWriteImmediate, 0, 0, 64, 1), &pair.b) == 0);
    REQUIRE(pair.run([&] { return pair.a.sent == 10 && pair.b.immediates.size() == 10; }));
    for (Side* side : {&pair.a, &pair.b}) {
      REQUIRE(until([&] { return side->provider->arm(0); }, [&] { side->step(); }));
      pollfd entry{side->provider->wait_fd(0), POLLIN, 0};
      CHECK(::poll(&entry, 1, 50) == 0);
    }
  }

  TEST_CASE("immediates and messages share receives, where the provider wants it so") {
    setenv("TE_POOL_RECEIVES", "1", 1);
    Pair pair("tcp");
    unsetenv("TE_POOL_RECEIVES");
    CHECK(pair.a.provider->capabilities().immediate_consumes_receive);
    for (int i = 0; i < 500; ++i) {
      std::memset(pair.a.bytes + 64 * i, 'a' + i % 26, 64);
      REQUIRE(pair.a.post(pair.a.request(i % 2 ? Opcode::kSend : Opcode::kWriteImmediate, 64 * i, 0, 64, i), &pair.b) ==
              0);
    }
    REQUIRE(pair.run(
        [&] { return pair.b.messages.size() == 250 && pair.b.immediates.size() == 250 && pair.a.sent == 500; }));
    for (int i = 0; i < 250; ++i)
      CHECK(pair.b.messages[i] == std::string(64, static_cast<char>('a' + (2 * i + 1) % 26)));
  }

  TEST_CASE("what an error completion means") {
    using efa::classify, efa::Kind;
    CHECK(classify(Kind::kTcp, error_entry(FI_ECANCELED)).status == Status::kTransport);
    CHECK(classify(Kind::kTcp, error_entry(FI_ECANCELED)).landed_unknown);
    CHECK(classify(Kind::kTcp, error_entry(FI_ENOTCONN)).status == Status::kPeerLost);
    CHECK(classify(Kind::kTcp, error_entry(FI_EACCES)).status == Status::kRemoteAccess);
    CHECK(classify(Kind::kShm, error_entry(FI_ECANCELED)).status == Status::kCancelled);
    CHECK(classify(Kind::kShm, error_entry(ESRCH)).status == Status::kPeerLost);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 7)).status == Status::kRemoteAccess);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 7)).landed_unknown);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 13)).status == Status::kPeerLost);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 1)).status == Status::kCancelled);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 4711)).status == Status::kTransport);
    CHECK(classify(Kind::kEfa, error_entry(FI_EIO, 13)).provider_status == TE_STATUS_EFA + 13);
    CHECK(classify(Kind::kEfa, error_entry(FI_ENORX, 10)).status == Status::kTransport);
    CHECK(classify(Kind::kEfa, error_entry(FI_ENORX, 10)).provider_status == TE_STATUS_EFA + 10);
    CHECK(classify(Kind::kEfa, error_entry(FI_EHOSTUNREACH, 0)).status == Status::kPeerLost);
  }

  TEST_CASE("death is believed only with proof") {
    const efa::ProcessIdentity self = efa::this_process();
    CHECK(self.pid == getpid());
    CHECK(self.start_time != 0);
    CHECK_FALSE(efa::has_ended(self));
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) {
      const efa::ProcessIdentity mine = efa::this_process();
      (void)!write(ready[1], &mine, sizeof mine);
      for (;;) pause();
    }
    efa::ProcessIdentity other;
    REQUIRE(read(ready[0], &other, sizeof other) == sizeof other);
    CHECK_FALSE(efa::has_ended(other));
    efa::ProcessIdentity earlier = other;  // the same number, given out again
    --earlier.start_time;
    CHECK(efa::has_ended(earlier));
    kill(child, SIGKILL);
    siginfo_t info;
    waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);  // a zombie now
    CHECK(efa::has_ended(other));
    waitpid(child, nullptr, 0);
    CHECK(efa::has_ended(other));
    efa::ProcessIdentity elsewhere = other;
    ++elsewhere.pid_namespace;
    CHECK_FALSE(efa::has_ended(elsewhere));
    elsewhere = other;
    elsewhere.boot_id[0] ^= 1;
    CHECK_FALSE(efa::has_ended(elsewhere));
    close(ready[0]), close(ready[1]);
  }
}
#endif
