// Players for the tests of the engine, all through the C ABI of native/te.h: an engine with guarded memory of its own, transfers that
// release themselves, and waits on conditions with deadlines.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "native/sim/random.h"
#include "native/te.h"

namespace te::engine_test {

using sim::Random;

inline constexpr int64_t kMs = 1'000'000;
inline constexpr int64_t kSecond = 1'000 * kMs;

#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowness = 3;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowness = 2;
#else
inline constexpr int kSlowness = 1;
#endif

// Bound of waits that must not end early. Generous: only a hang reaches it.
inline constexpr int64_t kPatience = 20 * kSecond * kSlowness;
// What tests of dead peers set as peer_timeout_ns.
inline constexpr int64_t kShortLife = 500 * kMs * kSlowness;

// Counts grow with the environment variable TE_TEST_SCALE and are smaller under the sanitizers.
inline int scaled(int count) {
  static const double scale = [] {
    const char* text = std::getenv("TE_TEST_SCALE");
    return text == nullptr ? 1.0 : std::max(0.01, std::atof(text));
  }();
  return std::max(1, static_cast<int>(count * scale / kSlowness));
}

inline int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Looks again and again until `condition` holds; false when it does not within the time.
template <typename F>
bool eventually(F&& condition, int64_t timeout_ns = kPatience) {
  const int64_t deadline = monotonic_ns() + timeout_ns;
  for (int i = 0; !condition(); ++i) {
    if (monotonic_ns() > deadline) return condition();
    if (i < 100) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

inline std::string name_of(int32_t status) { return te_status_name(status); }

// `status` is what was expected; else says what came and why.
#define TE_CHECK_STATUS(expression, expected, why)                                                               \
  do {                                                                                                           \
    const int32_t te_got_ = (expression);                                                                        \
    CHECK_MESSAGE(te_got_ == (expected), #expression " gave ", te_status_name(te_got_), ", not " #expected ": ", \
                  (why).message);                                                                                \
  } while (false)

// What main gives each of the stand-ins for libibverbs and libfabric.
inline constexpr uint32_t kStandinDevices = 16;

// --- transfers ---------------------------------------------------------------------------------------------------------

class Transfer {
 public:
  Transfer() = default;
  Transfer(te_transfer* transfer, const te_error& refusal) : transfer_(transfer), error_(refusal) {}
  Transfer(Transfer&& other) noexcept : transfer_(std::exchange(other.transfer_, nullptr)), error_(other.error_) {}
  Transfer& operator=(Transfer&& other) noexcept {
    std::swap(transfer_, other.transfer_);
    error_ = other.error_;
    return *this;
  }
  ~Transfer() { te_transfer_release(transfer_); }

  te_transfer* get() const { return transfer_; }
  bool refused() const { return transfer_ == nullptr; }
  bool ended() { return result() != TE_AGAIN; }
  // The final status, or that of the refusal; TE_AGAIN when it has not ended in time.
  int32_t wait(int64_t timeout_ns = kPatience) {
    if (transfer_ != nullptr) te_transfer_wait(transfer_, timeout_ns);
    return result();
  }
  int32_t result() {
    if (transfer_ == nullptr) return error_.status;
    te_error why{};
    const int32_t status = te_transfer_result(transfer_, &why);
    if (status != TE_AGAIN) error_ = why;
    return status;
  }
  bool quiesced() const { return te_transfer_quiesced(transfer_) == 1; }
  bool wait_quiesced(int64_t timeout_ns = kPatience) {
    return te_transfer_wait_quiesced(transfer_, timeout_ns) == TE_OK;
  }
  void cancel() { te_transfer_cancel(transfer_); }
  void release() { te_transfer_release(std::exchange(transfer_, nullptr)); }
  const te_error& error() const { return error_; }
  // By member.
  std::map<uint32_t, te_error> failed_members() {
    uint32_t members[64], count = 0;
    te_error errors[64];
    REQUIRE(te_transfer_failed_members(transfer_, members, errors, 64, &count) == TE_OK);
    REQUIRE(count <= 64);
    std::map<uint32_t, te_error> failed;
    for (uint32_t i = 0; i < count; ++i) CHECK(failed.emplace(members[i], errors[i]).second);
    return failed;
  }
  te_times times() const {
    te_times times{};
    CHECK(te_transfer_times(transfer_, &times) == TE_OK);
    return times;
  }
  std::string message() const { return error_.message; }

 private:
  te_transfer* transfer_ = nullptr;
  te_error error_{};
};

inline void require_ok(Transfer&& transfer) {
  const int32_t status = transfer.wait();
  REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", transfer.message());
}

// --- memory ------------------------------------------------------------------------------------------------------------

inline constexpr uint8_t kPoison = 0xA5;
inline constexpr uint8_t kGuardByte = 0x5A;
inline constexpr size_t kGuard = 128;

// Registered bytes between guards. Only the body is registered.
struct Memory {
  explicit Memory(size_t size) : size(size), all(size + 2 * kGuard, kGuardByte) { poison(); }

  uint8_t* data() { return all.data() + kGuard; }
  const uint8_t* data() const { return all.data() + kGuard; }
  void poison() { std::fill_n(data(), size, kPoison); }
  void poison(uint64_t offset, uint64_t length) { std::fill_n(data() + offset, length, kPoison); }
  void fill(Random& random) {
    for (size_t i = 0; i < size; ++i) data()[i] = static_cast<uint8_t>(random.next() >> 32);
  }
  bool guards_intact() const {
    const auto intact = [](const uint8_t* from) {
      return std::all_of(from, from + kGuard, [](uint8_t b) { return b == kGuardByte; });
    };
    return intact(all.data()) && intact(all.data() + kGuard + size);
  }
  bool poisoned(uint64_t offset, uint64_t length) const {
    return std::all_of(data() + offset, data() + offset + length, [](uint8_t b) { return b == kPoison; });
  }
  // [offset, offset + length) equals `expected`, and `border` bytes on both sides are still poisoned.
  bool holds(uint64_t offset, const uint8_t* expected, uint64_t length, uint64_t border = 64) const {
    const uint64_t before = std::min(border, offset), after = std::min<uint64_t>(border, size - offset - length);
    return (length == 0 || std::memcmp(data() + offset, expected, length) == 0) && poisoned(offset - before, before) &&
           poisoned(offset + length, after);
  }

  const size_t size;
  std::vector<uint8_t> all;
  te_handle region = TE_NONE;
};

// --- players -----------------------------------------------------------------------------------------------------------

struct Setup {
  std::string transport = "sim";
  std::string sim;  // options of the simulated fabric
  uint32_t nics = 1;
  std::function<void(te_settings&)> tune;
  int first_device = -1;  // cx7, efa; -1: any

  std::string text() const { return transport + " nics=" + std::to_string(nics) + " " + sim; }
};

inline bool usable(const std::string& transport) {
  te_engine_info info;
  te_error why{};
  const bool ok = te_transport_probe(transport.c_str(), &info, &why) == TE_OK;
  if (!ok) MESSAGE("skipped: ", transport, ": ", why.message);
  return ok;
}

class Player {
 public:
  explicit Player(const Setup& setup) {
    te_settings settings;
    te_settings_defaults(&settings);
    settings.transport = setup.transport.c_str();
    settings.sim = setup.sim.c_str();
    if (setup.transport == "tcp") settings.nics = "lo";
    if (setup.transport == "sim") settings.nic_count = setup.nics;
    std::string devices;
    if (setup.transport == "cx7" || setup.transport == "efa") {  // no two engines in a row have the same devices
      static std::atomic<uint32_t> next{0};
      const uint32_t first = setup.first_device >= 0 ? static_cast<uint32_t>(setup.first_device)
                                                     : next.fetch_add(setup.nics, std::memory_order_relaxed);
      const std::string prefix = setup.transport == "cx7" ? "standin" : "efa";
      for (uint32_t i = 0; i < setup.nics; ++i)
        devices += (i == 0 ? "" : ",") + prefix + std::to_string((first + i) % kStandinDevices);
      settings.nics = devices.c_str();
    }
    settings.core = TE_CORE_NONE;
    settings.operations = 512;
    settings.max_regions = settings.max_counters = 1024;
    settings.max_peers = 64;
    settings.peer_timeout_ns = kPatience;
    settings.default_timeout_ns = kPatience;
    settings.connect_timeout_ns = kPatience;
    settings.close_timeout_ns = 300 * kMs * kSlowness;  // of destructors; tests of close name theirs
    settings.shard_bytes = 1024;
    if (setup.tune) setup.tune(settings);
    const int32_t status = te_engine_open(&settings, &engine, &error);
    REQUIRE_MESSAGE(status == TE_OK, "te_engine_open: ", name_of(status), ": ", error.message);
    REQUIRE(te_engine_address(engine, &address, &error) == TE_OK);
  }
  ~Player() { free(); }
  Player(const Player&) = delete;

  void free() { te_engine_free(std::exchange(engine, nullptr)); }
  int32_t close(int64_t timeout_ns = kPatience) { return te_engine_close(engine, timeout_ns, &error); }

  // --- memory and counters ---
  Memory& memory(size_t size) {
    memories.push_back(std::make_unique<Memory>(size));
    open(*memories.back());
    return *memories.back();
  }
  void open(Memory& m) {
    const int32_t status = te_region_register(engine, m.data(), m.size, TE_DEVICE_HOST, 0, &m.region, &error);
    REQUIRE_MESSAGE(status == TE_OK, error.message);
  }
  int32_t close(Memory& m, int64_t timeout_ns = kPatience) {
    return te_region_close(engine, m.region, timeout_ns, &error);
  }
  te_region_descriptor describe(const Memory& m) {
    te_region_descriptor d;
    REQUIRE_MESSAGE(te_region_describe(engine, m.region, &d, &error) == TE_OK, error.message);
    return d;
  }
  te_handle remote(Player& owner, const Memory& m) { return remote(owner.describe(m)); }
  te_handle remote(const te_region_descriptor& d) {
    te_handle handle = TE_NONE;
    REQUIRE_MESSAGE(te_remote_region(engine, &d, &handle, &error) == TE_OK, error.message);
    return handle;
  }
  te_handle counter() {
    te_handle handle = TE_NONE;
    REQUIRE_MESSAGE(te_counter_open(engine, &handle, &error) == TE_OK, error.message);
    return handle;
  }
  te_counter_descriptor describe_counter(te_handle counter) {
    te_counter_descriptor d;
    REQUIRE_MESSAGE(te_counter_describe(engine, counter, &d, &error) == TE_OK, error.message);
    return d;
  }
  te_handle remote_counter(Player& owner, te_handle counter) { return remote_counter(owner.describe_counter(counter)); }
  te_handle remote_counter(const te_counter_descriptor& d) {
    te_handle handle = TE_NONE;
    REQUIRE_MESSAGE(te_remote_counter(engine, &d, &handle, &error) == TE_OK, error.message);
    return handle;
  }
  uint64_t value(te_handle counter) {
    uint64_t v = ~uint64_t{0};
    REQUIRE_MESSAGE(te_counter_value(engine, counter, &v, &error) == TE_OK, error.message);
    return v;
  }
  int32_t wait(te_handle counter, uint64_t at_least, int64_t timeout_ns = kPatience, std::vector<int32_t> peers = {}) {
    return te_counter_wait(engine, counter, at_least, timeout_ns, peers.empty() ? nullptr : peers.data(),
                           static_cast<uint32_t>(peers.size()), &error);
  }
  // Reached, and not passed.
  bool counted(te_handle counter, uint64_t exactly) {
    return wait(counter, exactly) == TE_OK && value(counter) == exactly;
  }
  Transfer reached(te_handle counter, uint64_t at_least, int64_t timeout_ns, std::vector<int32_t> peers = {}) {
    return submit(timeout_ns, [&](int64_t timeout, te_error* why) {
      return te_counter_reached(engine, counter, at_least, timeout, peers.empty() ? nullptr : peers.data(),
                                static_cast<uint32_t>(peers.size()), why);
    });
  }

  // Calls again while no slot is free (TE_AGAIN), until the time is over.
  template <typename F>
  Transfer submit(int64_t timeout_ns, F&& call) {
    const int64_t deadline = monotonic_ns() + (timeout_ns < 0 ? kPatience : timeout_ns);
    for (;;) {
      te_error why{};
      te_transfer* t = call(timeout_ns, &why);
      if (t != nullptr || why.status != TE_AGAIN) return {t, why};
      if (monotonic_ns() < deadline) continue;
      why.status = TE_ERR_TIMEOUT;
      return {t, why};
    }
  }

  // --- peers ---
  int32_t peer(const te_address& of) {
    int32_t index = -1;
    REQUIRE_MESSAGE(te_peer(engine, &of, &index, &error) == TE_OK, error.message);
    return index;
  }
  int32_t peer(const Player& other) { return peer(other.address); }
  uint32_t state(int32_t peer) {
    te_peer_info info{};
    REQUIRE(te_peer_describe(engine, peer, &info, &error) == TE_OK);
    return info.state;
  }
  te_peer_info peer_info(int32_t peer) {
    te_peer_info info{};
    REQUIRE(te_peer_describe(engine, peer, &info, &error) == TE_OK);
    return info;
  }
  Transfer connect(int32_t peer, int64_t timeout_ns = -1) {
    return submit(timeout_ns,
                  [&](int64_t timeout, te_error* why) { return te_peer_connect(engine, peer, timeout, why); });
  }
  Transfer disconnect(int32_t peer, int64_t timeout_ns = -1) {
    return submit(timeout_ns,
                  [&](int64_t timeout, te_error* why) { return te_peer_disconnect(engine, peer, timeout, why); });
  }
  Transfer fence(int32_t peer, int64_t timeout_ns = -1) {
    return submit(timeout_ns,
                  [&](int64_t timeout, te_error* why) { return te_peer_fence(engine, peer, timeout, why); });
  }

  te_nic_info nic_info(uint32_t nic) {
    te_nic_info info{};
    REQUIRE(te_nic_describe(engine, nic, &info, &error) == TE_OK);
    return info;
  }

  // --- transfers ---
  Transfer write(const Memory& from, uint64_t source, te_handle remote, uint64_t target, uint64_t length,
                 te_handle counter = TE_NONE, uint32_t flags = 0, int64_t timeout_ns = -1) {
    return submit(timeout_ns, [&](int64_t timeout, te_error* why) {
      return te_write(engine, from.region, source, remote, target, length, counter, flags, timeout, why);
    });
  }
  Transfer pages(const te_page_args& args, int64_t timeout_ns = -1) {
    return submit(timeout_ns,
                  [&](int64_t timeout, te_error* why) { return te_write_pages(engine, &args, timeout, why); });
  }
  Transfer batch(const std::vector<te_batch_entry>& entries, int64_t timeout_ns = -1) {
    return submit(timeout_ns, [&](int64_t timeout, te_error* why) {
      return te_write_batch(engine, entries.data(), entries.size(), timeout, why);
    });
  }
  Transfer send(int32_t peer, const void* data, uint64_t length, int64_t timeout_ns = -1) {
    return submit(timeout_ns,
                  [&](int64_t timeout, te_error* why) { return te_send(engine, peer, data, length, timeout, why); });
  }

  // --- peer groups ---
  te_handle target(const std::vector<te_target_member>& members, int32_t place = -1) {
    te_handle handle = TE_NONE;
    const int32_t status =
        te_target_open(engine, members.data(), static_cast<uint32_t>(members.size()), place, &handle, &error);
    REQUIRE_MESSAGE(status == TE_OK, error.message);
    return handle;
  }
  Transfer scatter(const te_scatter_args& args, int64_t timeout_ns = -1) {
    return submit(timeout_ns, [&](int64_t timeout, te_error* why) { return te_scatter(engine, &args, timeout, why); });
  }
  Transfer post(te_handle prepared, int64_t timeout_ns = -1) {
    return submit(timeout_ns, [&](int64_t timeout, te_error* why) { return te_post(engine, prepared, timeout, why); });
  }

  // --- the rest ---
  void inject(const std::string& command) {
    const int32_t status = te_engine_inject(engine, command.c_str(), &error);
    REQUIRE_MESSAGE(status == TE_OK, command, ": ", error.message);
  }
  te_stats stats() {
    te_stats s{};
    REQUIRE(te_engine_stats(engine, &s, &error) == TE_OK);
    return s;
  }
  // Every operation has gone back to the slab.
  bool idle() {
    return eventually([&] { return stats().operations_in_use == 0; });
  }

  std::vector<std::unique_ptr<Memory>> memories;  // outlive the engine: see the destructor
  te_engine* engine = nullptr;
  te_address address{};
  te_error error{};
};

// Address space whose bytes repeat every `period`: far larger than the memory behind it.
struct Mirrored {
  Mirrored(uint64_t period, uint64_t length)
      : period(period), length(length), fd(memfd_create("te-test", MFD_CLOEXEC)) {
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, static_cast<off_t>(period)) == 0);
    data = static_cast<uint8_t*>(mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    REQUIRE(data != MAP_FAILED);
    for (uint64_t at = 0; at < length; at += period)
      REQUIRE(mmap(data + at, std::min(period, length - at), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) !=
              MAP_FAILED);
  }
  ~Mirrored() {
    munmap(data, length);
    close(fd);
  }
  Mirrored(const Mirrored&) = delete;
  const uint64_t period, length;
  const int fd;
  uint8_t* data = nullptr;
};

inline te_handle register_span(Player& player, uint8_t* data, uint64_t length) {
  te_handle region = TE_NONE;
  const int32_t status = te_region_register(player.engine, data, length, TE_DEVICE_HOST, 0, &region, &player.error);
  REQUIRE_MESSAGE(status == TE_OK, player.error.message);
  return region;
}

// A writer with a source, a target with a counter, and the writer's handles for both.
struct Pair {
  Pair(const Setup& writer_setup, const Setup& owner_setup, size_t bytes = 1 << 16)
      : writer(writer_setup), owner(owner_setup), source(writer.memory(bytes)), target(owner.memory(bytes)) {
    Random random(bytes);
    source.fill(random);
    counter = owner.counter();
    remote = writer.remote(owner, target);
    remote_counter = writer.remote_counter(owner, counter);
  }
  explicit Pair(const Setup& setup, size_t bytes = 1 << 16) : Pair(setup, setup, bytes) {}

  Transfer write(uint64_t from, uint64_t to, uint64_t length, bool counted = true, uint32_t flags = 0,
                 int64_t timeout_ns = -1) {
    return writer.write(source, from, remote, to, length, counted ? remote_counter : te_handle{TE_NONE}, flags,
                        timeout_ns);
  }
  bool landed(uint64_t from, uint64_t to, uint64_t length) const {
    return std::memcmp(source.data() + from, target.data() + to, length) == 0;
  }
  int32_t peer() { return writer.peer(owner); }

  Player writer, owner;
  Memory& source;
  Memory& target;
  te_handle counter = TE_NONE;         // owner's
  te_handle remote = TE_NONE;          // writer's
  te_handle remote_counter = TE_NONE;  // writer's
};

// Many writes of all kinds, and what has arrived of them.
inline void exchange(Pair& pair, int rounds) {
  uint64_t expected = pair.owner.value(pair.counter);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Transfer> transfers;
    pair.target.poison();
    for (uint64_t i = 0; i < 60; ++i) transfers.push_back(pair.write(i * 64, i * 64, i));
    transfers.push_back(pair.write(8192, 8192, 40'000));
    for (Transfer& transfer : transfers) require_ok(std::move(transfer));
    expected += 61;
    REQUIRE(pair.owner.counted(pair.counter, expected));
    for (uint64_t i = 0; i < 60; ++i) CHECK(pair.target.holds(i * 64, pair.source.data() + i * 64, i, 0));
    CHECK(pair.landed(8192, 8192, 40'000));
  }
}

// The transports that work here: the simulated one in several characters, then the software fabrics.
inline std::vector<Setup> all_setups() {
  std::vector<Setup> setups = {
      {"sim", "reorder=0", 1, {}},
      {"sim", "reorder=1,delay=3,mtu=64,max_write=1000,depth=16,busy=0.1", 2, {}},
      {"sim", "reorder=0,max_write=777,depth=9", 3, {}},
      {"sim", "reorder=1,delay=2,virtual_addresses=0,keys_enforced=0", 8, {}},
  };
  for (const char* transport : {"tcp", "shm"})
    if (usable(transport)) setups.push_back({transport, "", 1, {}});
  for (const char* transport : {"cx7", "efa"})
    if (usable(transport))
      for (const uint32_t nics : {1u, 3u}) setups.push_back({transport, "", nics, {}});
  return setups;
}

}  // namespace te::engine_test
