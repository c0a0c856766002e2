// Bad input at every entry point: a typed status, nothing posted, outputs untouched, and the engine usable afterwards.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <limits>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
constexpr size_t kBytes = 10'000;
constexpr uint32_t kUntouched = 0x1234567;

// Nothing bad has happened: the pair still works.
void check_usable(Pair& pair) {
  const te_handle counter = pair.owner.counter();
  require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, 100, pair.writer.remote_counter(pair.owner, counter)));
  CHECK(pair.owner.counted(counter, 1));
  CHECK(pair.writer.idle());
}

// A refusal at the call: no transfer, this status, and a message.
void check_refused(Transfer&& t, int32_t status) {
  CHECK_MESSAGE(t.refused(), "not refused");
  CHECK_MESSAGE(t.wait() == status, name_of(t.result()), " instead of ", name_of(status), ": ", t.message());
  CHECK_FALSE(t.message().empty());
}

te_page_args good_pages(Pair& pair, const std::vector<int64_t>& source, const std::vector<int64_t>& target) {
  te_page_args args{};
  args.region = pair.source.region;
  args.remote = pair.remote;
  args.counter = pair.remote_counter;
  args.source_stride = args.target_stride = args.page_bytes = 100;
  args.count = source.size();
  args.source = source.data();
  args.target = target.data();
  args.source_index_bytes = args.target_index_bytes = 8;
  return args;
}

// What a call with null arguments does, found out in a child, so that a crash is a finding and not the end of all tests.
// Only where no engine of this process is open, and not under TSan, which forbids threads after fork.
std::string in_child(const std::function<int32_t(te_engine*)>& call) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int sig : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTERM}) std::signal(sig, SIG_DFL);
    if (!freopen("/dev/null", "w", stderr)) _exit(97);
    te_settings settings;
    te_settings_defaults(&settings);
    settings.transport = "sim";
    settings.core = TE_CORE_NONE;
    settings.operations = 64;
    settings.max_peers = 4;
    te_engine* engine = nullptr;
    if (te_engine_open(&settings, &engine, nullptr) != TE_OK) _exit(98);
    const int32_t status = call(engine);
    te_stats stats{};
    if (te_engine_stats(engine, &stats, nullptr) != TE_OK || stats.operations_in_use != 0) _exit(99);
    _exit(status <= 0 && status > -90 ? -status : 96);
  }
  int how = 0;
  waitpid(child, &how, 0);
  if (WIFSIGNALED(how)) return "crashed with signal " + std::to_string(WTERMSIG(how));
  const int code = WEXITSTATUS(how);
  if (code == 99) return "left an operation in use";
  return code < 90 ? te_status_name(-code) : "exit " + std::to_string(code);
}

}  // namespace

TEST_CASE("engine: input: ranges outside a region, 64-bit overflow included, are refused with RANGE") {
  Pair pair({"sim", "", 2, {}}, kBytes);
  require_ok(pair.write(0, 0, kBytes));
  for (const auto& [source, target, length] :
       std::vector<std::array<uint64_t, 3>>{{0, 0, kBytes + 1},
                                            {1, 0, kBytes},
                                            {0, 1, kBytes},
                                            {kBytes, 0, 1},
                                            {0, kBytes, 1},
                                            {kBytes + 1, 0, 0},
                                            {0, kBytes + 1, 0},
                                            {kMax, 0, 1},
                                            {0, kMax, 1},
                                            {kMax - 4, 0, 8},
                                            {0, kMax - 4, 8},
                                            {8, 0, kMax - 4},
                                            {0, 8, kMax - 4},
                                            {0, 0, kMax},
                                            {kMax, kMax, kMax},
                                            {uint64_t{1} << 63, 0, uint64_t{1} << 63}}) {
    CAPTURE(source);
    CAPTURE(target);
    CAPTURE(length);
    check_refused(pair.write(source, target, length), TE_ERR_RANGE);
  }
  require_ok(pair.write(kBytes, kBytes, 0));  // the end is inside for no bytes
  CHECK(pair.target.guards_intact());
  check_usable(pair);
}

TEST_CASE(
    "engine: input: page indices that are negative, too large or overflow are refused with RANGE, and say where") {
  Pair pair({"sim", "", 2, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  pair.target.poison();
  const std::vector<int64_t> good = {0, 5, 99};
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min(), kMax64 = std::numeric_limits<int64_t>::max();
  for (const int64_t bad :
       {int64_t{-1}, int64_t{100}, int64_t{1} << 32, (int64_t{1} << 32) + 5, kMin64, kMax64, int64_t{-100},
        kMax64 / 100, kMax64 / 100 + 1, int64_t{184467440737095517}})  // times 100 wraps to 84
    for (size_t at = 0; at < 3; ++at) {
      CAPTURE(bad);
      CAPTURE(at);
      std::vector<int64_t> wrong = good;
      wrong[at] = bad;
      Transfer source = pair.writer.pages(good_pages(pair, wrong, good)),
               target = pair.writer.pages(good_pages(pair, good, wrong));
      CHECK(source.message().find(std::to_string(bad)) != std::string::npos);
      check_refused(std::move(source), TE_ERR_RANGE);
      check_refused(std::move(target), TE_ERR_RANGE);
    }
  for (const int32_t bad : {-1, 100, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    CAPTURE(bad);
    const std::vector<int32_t> wrong = {0, bad, 1}, fine = {0, 1, 2};
    te_page_args args = good_pages(pair, good, good);
    args.source = wrong.data();
    args.target = fine.data();
    args.source_index_bytes = args.target_index_bytes = 4;
    check_refused(pair.writer.pages(args), TE_ERR_RANGE);
    std::swap(args.source, args.target);
    check_refused(pair.writer.pages(args), TE_ERR_RANGE);
  }
  CHECK(pair.target.poisoned(0, kBytes));
  check_usable(pair);
}

TEST_CASE("engine: input: page geometry that leaves its region or overflows is refused with RANGE") {
  Pair pair({"sim", "", 2, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  pair.target.poison();
  const std::vector<int64_t> zero = {0}, two = {2};
  const auto refused = [&](const std::vector<int64_t>& indices, const std::function<void(te_page_args&)>& change) {
    te_page_args args = good_pages(pair, indices, indices);
    change(args);
    check_refused(pair.writer.pages(args), TE_ERR_RANGE);
  };
  refused(zero, [](te_page_args& a) { a.page_bytes = kBytes + 1; });
  refused(zero, [](te_page_args& a) { a.page_bytes = kMax; });
  refused(zero, [](te_page_args& a) { a.source_offset = kBytes - 99; });
  refused(zero, [](te_page_args& a) { a.target_offset = kBytes - 99; });
  refused(zero, [](te_page_args& a) { a.source_offset = kMax; });
  refused(zero, [](te_page_args& a) { a.target_offset = kMax - 50; });
  refused(two, [](te_page_args& a) { a.source_stride = uint64_t{1} << 63; });  // 2 * 2^63 wraps to 0
  refused(two, [](te_page_args& a) { a.target_stride = uint64_t{1} << 63; });
  refused(two, [](te_page_args& a) { a.target_stride = kMax; });
  refused(two, [](te_page_args& a) { a.source_stride = kBytes; });
  CHECK(pair.target.poisoned(0, kBytes));
  check_usable(pair);
}

TEST_CASE("engine: input: unknown flags, index widths and missing arrays are refused with ARGUMENT") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  for (const uint32_t flags : {2u, 4u, 0x80000000u, 0xFFFFFFFFu})
    check_refused(pair.write(0, 0, 10, true, flags), TE_ERR_ARGUMENT);
  const std::vector<int64_t> good = {0, 1};
  const auto refused = [&](const std::function<void(te_page_args&)>& change) {
    te_page_args args = good_pages(pair, good, good);
    change(args);
    check_refused(pair.writer.pages(args), TE_ERR_ARGUMENT);
  };
  for (const uint32_t width : {0u, 1u, 2u, 3u, 5u, 16u, 0xFFFFFFFFu}) {
    refused([=](te_page_args& a) { a.source_index_bytes = width; });
    refused([=](te_page_args& a) { a.target_index_bytes = width; });
  }
  refused([](te_page_args& a) { a.source = nullptr; });
  refused([](te_page_args& a) { a.target = nullptr; });
  refused([](te_page_args& a) { a.flags = 2; });
  refused([](te_page_args& a) { a.count = kMax; });
  refused([](te_page_args& a) { a.count = uint64_t{1} << 61; });
  check_usable(pair);
}

TEST_CASE("engine: input: handles that were never given are refused, wherever they are used") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  for (const te_handle never :
       {te_handle{TE_NONE} - 1, te_handle{77}, te_handle{1} << 20, te_handle{1} << 31, ~te_handle{0}}) {
    CAPTURE(never);
    te_engine* engine = pair.writer.engine;
    te_error why{};
    te_write_args write{pair.source.region, pair.remote, pair.remote_counter, 0, 0, 0, 10};
    for (te_handle* handle : {&write.region, &write.remote, &write.counter}) {
      const te_handle kept = std::exchange(*handle, never);
      te_transfer* t = te_write(engine, write.region, 0, write.remote, 0, 10, write.counter, 0, -1, &why);
      CHECK(t == nullptr);
      CHECK((why.status == TE_ERR_ARGUMENT || why.status == TE_ERR_REGION_CLOSED || why.status == TE_ERR_STALE));
      *handle = kept;
    }
    te_region_descriptor region;
    CHECK(te_region_describe(engine, never, &region, &why) == TE_ERR_REGION_CLOSED);
    CHECK(te_region_close(engine, never, 0, &why) == TE_OK);  // closing is idempotent
    te_counter_descriptor counter;
    uint64_t value = kUntouched;
    CHECK(te_counter_describe(engine, never, &counter, &why) == TE_ERR_CLOSED);
    CHECK(te_counter_value(engine, never, &value, &why) == TE_ERR_CLOSED);
    CHECK(value == kUntouched);
    CHECK(te_counter_wait(engine, never, 1, 0, nullptr, 0, &why) == TE_ERR_CLOSED);
    check_refused(pair.writer.reached(never, 1, kPatience), TE_ERR_CLOSED);
    CHECK(te_counter_close(engine, never, 0, &why) == TE_OK);
  }
  // TE_NONE is no region.
  te_error why{};
  CHECK(te_write(pair.writer.engine, TE_NONE, 0, pair.remote, 0, 1, TE_NONE, 0, -1, &why) == nullptr);
  CHECK(te_write(pair.writer.engine, pair.source.region, 0, TE_NONE, 0, 1, TE_NONE, 0, -1, &why) == nullptr);
  check_usable(pair);
}

TEST_CASE("engine: input: peer indices that do not exist are refused with ARGUMENT") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  for (const int32_t index :
       {-1, 1, 500, 1 << 20, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    CAPTURE(index);
    te_peer_info info;
    CHECK(te_peer_describe(pair.writer.engine, index, &info, &pair.writer.error) == TE_ERR_ARGUMENT);
    check_refused(pair.writer.connect(index), TE_ERR_ARGUMENT);
    check_refused(pair.writer.disconnect(index), TE_ERR_ARGUMENT);
    check_refused(pair.writer.fence(index), TE_ERR_ARGUMENT);
    check_refused(pair.writer.send(index, "x", 1), TE_ERR_ARGUMENT);
    // A wait for a peer that does not exist cannot be fulfilled by it.
    CHECK(pair.owner.wait(pair.counter, 1, kPatience, {index}) < 0);
  }
  check_usable(pair);
}

TEST_CASE("engine: input: messages above the limit are refused with ARGUMENT") {
  Setup setup{"sim", "", 1, [](te_settings& s) { s.max_message_bytes = 1000; }};
  Pair pair(setup, kBytes);
  std::vector<uint8_t> bytes(1001);
  check_refused(pair.writer.send(pair.peer(), bytes.data(), 1001), TE_ERR_ARGUMENT);
  check_refused(pair.writer.send(pair.peer(), bytes.data(), kMax), TE_ERR_ARGUMENT);
  CHECK(pair.writer.send(pair.peer(), bytes.data(), 1000).wait() == TE_OK);
  check_usable(pair);
}

TEST_CASE("engine: input: one bad entry refuses the whole batch, with its number, and nothing of it lands") {
  Pair pair({"sim", "", 2, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  pair.target.poison();
  const std::vector<int64_t> good = {0, 1}, bad = {0, 100};
  std::vector<te_batch_entry> entries(10);
  for (te_batch_entry& entry : entries)
    entry.write = {pair.source.region, pair.remote, pair.remote_counter, 0, 0, 0, 1000};
  const auto with = [&](size_t at, const te_batch_entry& entry) {
    std::vector<te_batch_entry> changed = entries;
    changed[at] = entry;
    Transfer t = pair.writer.batch(changed);
    CHECK(t.refused());
    CHECK(t.message().find(std::to_string(at)) != std::string::npos);
    return t.result();
  };
  for (const size_t at : {size_t{0}, size_t{4}, size_t{9}}) {
    te_batch_entry entry = entries[0];
    entry.write.length = kBytes + 1;
    CHECK(with(at, entry) == TE_ERR_RANGE);
    entry = entries[0];
    entry.write.flags = 8;
    CHECK(with(at, entry) == TE_ERR_ARGUMENT);
    entry = entries[0];
    entry.write.region = 4242;
    CHECK(with(at, entry) < 0);
    entry.is_pages = 1;
    entry.pages = good_pages(pair, good, bad);
    CHECK(with(at, entry) == TE_ERR_RANGE);
  }
  te_error why{};
  CHECK(te_write_batch(pair.writer.engine, entries.data(), kMax, -1, &why) == nullptr);
  CHECK(why.status == TE_ERR_ARGUMENT);
  CHECK(pair.target.poisoned(0, kBytes));
  CHECK(pair.owner.counted(pair.counter, 1));
  // The refused ones hold no use of the source any more.
  CHECK(pair.writer.close(pair.source) == TE_OK);
  pair.writer.open(pair.source);
  check_usable(pair);
}

TEST_CASE("engine: input: a counter of another engine than the target is refused with ARGUMENT") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  Player other({"sim", "", 1, {}});
  const te_handle foreign = pair.writer.remote_counter(other, other.counter());
  check_refused(pair.writer.write(pair.source, 0, pair.remote, 0, 10, foreign), TE_ERR_ARGUMENT);
  check_usable(pair);
}

TEST_CASE("engine: input: memory that cannot be registered is refused, and registers nothing") {
  Player player({"sim", "", 3, {}});
  Memory memory(100);
  te_handle region = kUntouched;
  te_error why{};
  CHECK(te_region_register(player.engine, nullptr, 10, TE_DEVICE_HOST, 0, &region, &why) == TE_ERR_ARGUMENT);
  CHECK(te_region_register(player.engine, memory.data(), kMax, TE_DEVICE_HOST, 0, &region, &why) == TE_ERR_RANGE);
  CHECK(te_region_register(player.engine, memory.data(), kMax - 1000, TE_DEVICE_HOST, 0, &region, &why) ==
        TE_ERR_RANGE);
  CHECK(te_region_register(player.engine, memory.data(), 100, TE_DEVICE_CUDA, 0, &region, &why) == TE_ERR_REGISTRATION);
  CHECK(te_region_register(player.engine, memory.data(), 100, 7, 0, &region, &why) < 0);
  CHECK(te_region_register(player.engine, memory.data(), 100, -1, 0, &region, &why) < 0);
  CHECK(region == kUntouched);
  CHECK(player.stats().regions == 0);
}

TEST_CASE("engine: input: an address of another transport is refused, a malformed one too") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  te_address address = pair.owner.address;
  int32_t index = -7;
  te_error why{};
  const auto status = [&] { return te_peer(pair.writer.engine, &address, &index, &why); };
  std::strcpy(address.transport, "tcp");
  CHECK(status() == TE_ERR_CONFIG);
  std::memset(address.transport, 'x', sizeof address.transport);
  CHECK(status() == TE_ERR_ARGUMENT);
  address = pair.owner.address;
  for (const uint32_t nics : {0u, 17u, 0xFFFFFFFFu}) {
    address.nic_count = nics;
    CHECK(status() == TE_ERR_ARGUMENT);
  }
  address = pair.owner.address;
  address.nics[0].length = TE_NIC_ADDRESS_BYTES + 1;
  CHECK(status() == TE_ERR_ARGUMENT);
  CHECK(index == -7);
  te_region_descriptor d = pair.owner.describe(pair.target);
  d.address.nic_count = 0;
  te_handle handle = kUntouched;
  CHECK(te_remote_region(pair.writer.engine, &d, &handle, &why) == TE_ERR_ARGUMENT);
  d = pair.owner.describe(pair.target);
  std::strcpy(d.address.transport, "shm");
  CHECK(te_remote_region(pair.writer.engine, &d, &handle, &why) == TE_ERR_CONFIG);
  te_counter_descriptor c = pair.owner.describe_counter(pair.counter);
  std::strcpy(c.address.transport, "efa");
  CHECK(te_remote_counter(pair.writer.engine, &c, &handle, &why) == TE_ERR_CONFIG);
  CHECK(handle == kUntouched);
  // Right in form, but no address of this fabric.
  address = pair.owner.address;
  address.generation += 5;
  std::memset(address.nics[0].bytes, 0xEE, sizeof address.nics[0].bytes);
  REQUIRE(status() == TE_OK);
  CHECK(pair.writer.connect(index, kPatience).wait() == TE_ERR_PEER_UNREACHABLE);
  check_usable(pair);
}

TEST_CASE("engine: input: settings that cannot be honoured are refused with their name") {
  const auto status = [](const std::function<void(te_settings&)>& change, const char* name) {
    te_settings settings;
    te_settings_defaults(&settings);
    settings.transport = "sim";
    settings.core = TE_CORE_NONE;
    change(settings);
    te_engine* engine = nullptr;
    te_error why{};
    const int32_t result = te_engine_open(&settings, &engine, &why);
    CHECK(engine == nullptr);
    CHECK_MESSAGE(std::string(why.message).find(name) != std::string::npos, why.message, " does not name ",
                  std::string(name));
    te_engine_free(engine);
    return result;
  };
  CHECK(status([](te_settings& s) { s.nic_count = 17; }, "nic_count") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.operations = 0; }, "operations") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.operations_per_peer = 0; }, "operations_per_peer") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.immediate_window = 1; }, "immediate_window") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.assembly_slots = 1000; }, "assembly_slots") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.message_window = 0; }, "message_window") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.max_message_bytes = 0; }, "max_message_bytes") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.message_queue_bytes = 1; }, "message_queue_bytes") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.page_immediates = 3; }, "page_immediates") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.polling = 9; }, "polling") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.max_peers = 0; }, "max_peers") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.max_regions = 0; }, "max_regions") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.max_counters = 0xFFFFFFFF; }, "max_counters") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.shard_bytes = 0; }, "shard_bytes") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.bursts = 0; }, "bursts") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.core = 4095; }, "core") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.core = -3; }, "core") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.spin_ns = -1; }, "spin_ns") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.default_timeout_ns = -5; }, "default_timeout_ns") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.peer_timeout_ns = 1; }, "peer_timeout_ns") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.sim = "no_such_option=1"; }, "no_such_option") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.sim = "max_send=100"; }, "512") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.transport = "carrier-pigeon"; }, "carrier-pigeon") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.transport = ""; }, "transport") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.transport = nullptr; }, "transport") == TE_ERR_CONFIG);
  CHECK(status([](te_settings& s) { s.struct_bytes -= 1; }, "version") == TE_ERR_ARGUMENT);
  CHECK(status([](te_settings& s) { s.struct_bytes = 0; }, "version") == TE_ERR_ARGUMENT);
}

TEST_CASE("engine: input: NIC numbers and unknown injections are refused") {
  Player player({"sim", "", 2, {}});
  te_nic_info info{};
  for (const uint32_t nic : {2u, 16u, 0xFFFFFFFFu})
    CHECK(te_nic_describe(player.engine, nic, &info, &player.error) == TE_ERR_ARGUMENT);
  CHECK(te_nic_describe(player.engine, 1, &info, &player.error) == TE_OK);
  CHECK(te_engine_inject(player.engine, "explode", &player.error) == TE_ERR_ARGUMENT);
  CHECK(te_engine_inject(player.engine, nullptr, &player.error) == TE_ERR_ARGUMENT);
  CHECK(te_struct_bytes("te_settings") == sizeof(te_settings));
  CHECK(te_struct_bytes("te_batch_entry") == sizeof(te_batch_entry));
  CHECK(te_struct_bytes("nonsense") == 0);
  CHECK(te_struct_bytes(nullptr) == 0);
  CHECK(te_abi_version() == TE_ABI_VERSION);
  for (int32_t status = -17; status <= 1; ++status) CHECK(std::string(te_status_name(status)).size() > 1);
  CHECK(te_status_name(12345) != nullptr);
  CHECK(te_status_name(std::numeric_limits<int32_t>::min()) != nullptr);
}

TEST_CASE("engine: input: a closed engine refuses everything with CLOSED") {
  Pair pair({"sim", "", 1, {}}, kBytes);
  require_ok(pair.write(0, 0, 1));
  const int32_t peer = pair.peer();
  Player& p = pair.writer;
  REQUIRE(p.close() == TE_OK);
  CHECK(p.close() == TE_OK);  // idempotent
  te_engine* engine = p.engine;
  te_error why{};
  te_handle handle = kUntouched;
  const te_region_descriptor region = pair.owner.describe(pair.target);
  const te_counter_descriptor counter = pair.owner.describe_counter(pair.counter);
  te_engine_info info;
  te_address address;
  te_stats stats;
  te_nic_info nic;
  te_message message;
  te_region_descriptor own;
  int32_t index = -7;
  CHECK(te_engine_describe(engine, &info, &why) == TE_ERR_CLOSED);
  CHECK(te_engine_address(engine, &address, &why) == TE_ERR_CLOSED);
  CHECK(te_engine_stats(engine, &stats, &why) == TE_ERR_CLOSED);
  CHECK(te_nic_describe(engine, 0, &nic, &why) == TE_ERR_CLOSED);
  CHECK(te_engine_inject(engine, "stats", &why) == TE_ERR_CLOSED);
  CHECK(te_region_register(engine, pair.source.data(), 10, TE_DEVICE_HOST, 0, &handle, &why) == TE_ERR_CLOSED);
  CHECK(te_region_describe(engine, pair.source.region, &own, &why) == TE_ERR_CLOSED);
  CHECK(te_remote_region(engine, &region, &handle, &why) == TE_ERR_CLOSED);
  CHECK(te_counter_open(engine, &handle, &why) == TE_ERR_CLOSED);
  CHECK(te_remote_counter(engine, &counter, &handle, &why) == TE_ERR_CLOSED);
  CHECK(handle == kUntouched);
  CHECK(te_peer(engine, &pair.owner.address, &index, &why) == TE_ERR_CLOSED);
  CHECK(te_message_receive(engine, kPatience, &message, &why) == TE_ERR_CLOSED);
  check_refused(p.connect(peer), TE_ERR_CLOSED);
  check_refused(p.disconnect(peer), TE_ERR_CLOSED);
  check_refused(p.fence(peer), TE_ERR_CLOSED);
  check_refused(p.send(peer, "x", 1), TE_ERR_CLOSED);
  check_refused(pair.write(0, 0, 1), TE_ERR_CLOSED);
  check_refused(p.batch({}), TE_ERR_CLOSED);
  te_event events[8];
  uint32_t count = 0;
  int32_t fetched = TE_OK;
  for (int i = 0; i < 10 && fetched != TE_ERR_CLOSED; ++i)
    fetched = te_events_fetch(engine, kPatience, events, 8, &count, &why);
  CHECK(fetched == TE_ERR_CLOSED);
}

TEST_CASE("engine: input: null engines and null errors are refused, not followed") {
  te_error why{};
  te_stats stats;
  te_handle handle = 0;
  uint64_t value = 0;
  int32_t index = 0;
  CHECK(te_engine_open(nullptr, nullptr, &why) == TE_ERR_ARGUMENT);
  CHECK(te_engine_close(nullptr, 0, &why) == TE_OK);
  te_engine_free(nullptr);
  CHECK(te_engine_stats(nullptr, &stats, nullptr) == TE_ERR_ARGUMENT);
  CHECK(te_engine_inject(nullptr, "stats", &why) == TE_ERR_ARGUMENT);
  CHECK(te_region_register(nullptr, &why, 1, 0, 0, &handle, &why) == TE_ERR_ARGUMENT);
  CHECK(te_region_close(nullptr, 0, 0, &why) == TE_ERR_ARGUMENT);
  CHECK(te_counter_open(nullptr, &handle, &why) == TE_ERR_ARGUMENT);
  CHECK(te_counter_value(nullptr, 0, &value, &why) == TE_ERR_ARGUMENT);
  CHECK(te_counter_close(nullptr, 0, 0, &why) == TE_ERR_ARGUMENT);
  te_address address{};
  CHECK(te_peer(nullptr, &address, &index, &why) == TE_ERR_ARGUMENT);
  CHECK(te_peer_connect(nullptr, 0, 0, &why) == nullptr);
  CHECK(te_write(nullptr, 0, 0, 0, 0, 0, 0, 0, 0, &why) == nullptr);
  CHECK(te_write_batch(nullptr, nullptr, 0, 0, nullptr) == nullptr);
  CHECK(te_send(nullptr, 0, nullptr, 0, 0, &why) == nullptr);
  uint32_t count = 0;
  te_event event;
  CHECK(te_events_fetch(nullptr, 0, &event, 1, &count, &why) == TE_ERR_ARGUMENT);
  CHECK(te_events_wake(nullptr) == TE_ERR_ARGUMENT);
  te_transfer_release(nullptr);
  Player player({"sim", "", 1, {}});
  CHECK(te_region_register(player.engine, nullptr, 10, TE_DEVICE_HOST, 0, &handle, nullptr) == TE_ERR_ARGUMENT);
  CHECK(te_write(player.engine, 5, 0, 5, 0, 1, TE_NONE, 0, -1, nullptr) == nullptr);
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("engine: input: null structures, arrays and outputs are refused with ARGUMENT, not followed") {
  using Call = std::function<int32_t(te_engine*)>;
  te_error refusal{};
  const auto status_of = [&](te_transfer* t) { return t == nullptr ? refusal.status : int32_t{96}; };
  uint8_t bytes[64] = {};
  uint64_t length = 0;
  const std::vector<std::pair<const char*, Call>> calls = {
      {"te_write_pages", [&](te_engine* e) { return status_of(te_write_pages(e, nullptr, -1, &refusal)); }},
      {"te_write_batch", [&](te_engine* e) { return status_of(te_write_batch(e, nullptr, 3, -1, &refusal)); }},
      {"te_remote_region",
       [](te_engine* e) {
         te_handle h;
         return te_remote_region(e, nullptr, &h, nullptr);
       }},
      {"te_remote_counter",
       [](te_engine* e) {
         te_handle h;
         return te_remote_counter(e, nullptr, &h, nullptr);
       }},
      {"te_peer",
       [](te_engine* e) {
         int32_t i;
         return te_peer(e, nullptr, &i, nullptr);
       }},
      {"te_counter_wait",
       [](te_engine* e) {
         te_handle c;
         te_counter_open(e, &c, nullptr);
         return te_counter_wait(e, c, 1, kMs, nullptr, 3, nullptr);
       }},
      {"te_counter_reached",
       [&](te_engine* e) {
         te_handle c;
         te_counter_open(e, &c, nullptr);
         return status_of(te_counter_reached(e, c, 1, kMs, nullptr, 3, &refusal));
       }},
      {"te_send",
       [&](te_engine* e) {
         te_address a;
         int32_t i;
         te_engine_address(e, &a, nullptr);
         te_peer(e, &a, &i, nullptr);
         return status_of(te_send(e, i, nullptr, 10, -1, &refusal));
       }},
      {"te_engine_open, output",
       [](te_engine*) {
         te_settings s;
         te_settings_defaults(&s);
         s.transport = "sim";
         return te_engine_open(&s, nullptr, nullptr);
       }},
      {"te_engine_stats, output", [](te_engine* e) { return te_engine_stats(e, nullptr, nullptr); }},
      {"te_engine_address, output", [](te_engine* e) { return te_engine_address(e, nullptr, nullptr); }},
      {"te_region_register, output",
       [&](te_engine* e) { return te_region_register(e, bytes, 64, 0, 0, nullptr, nullptr); }},
      {"te_counter_open, output", [](te_engine* e) { return te_counter_open(e, nullptr, nullptr); }},
      {"te_message_receive, output", [](te_engine* e) { return te_message_receive(e, 0, nullptr, nullptr); }},
      {"te_address_encode", [&](te_engine*) { return te_address_encode(nullptr, bytes, 64, &length, nullptr); }},
      {"te_address_decode, bytes",
       [](te_engine*) {
         te_address a;
         return te_address_decode(nullptr, 20, &a, nullptr);
       }},
      {"te_address_decode, output",
       [&](te_engine* e) {
         te_address a;
         te_engine_address(e, &a, nullptr);
         uint8_t good[TE_ADDRESS_BYTES];
         te_address_encode(&a, good, sizeof good, &length, nullptr);
         return te_address_decode(good, length, nullptr, nullptr);
       }},
  };
  for (const auto& [name, call] : calls) {
    const std::string outcome = in_child(call);
    const bool good = outcome == te_status_name(TE_ERR_ARGUMENT) ||
                      (std::string(name) == "te_address_decode, bytes" && outcome == te_status_name(TE_ERR_DESCRIPTOR));
    CHECK_MESSAGE(good, std::string(name), ": ", outcome);
  }
}
#endif

TEST_CASE("engine: input: random arguments never crash, land outside or leave anything in use") {
  Pair pair({"sim", "reorder=1", 3, {}}, kBytes);
  Random random(1);
  const auto odd = [&](uint64_t usual) -> uint64_t {
    switch (random.below(6)) {
      case 0:
        return random.next();
      case 1:
        return random.next() >> random.below(64);
      case 2:
        return kMax - random.below(1000);
      default:
        return random.below(usual + 2);
    }
  };
  const auto handle = [&](te_handle right) { return random.chance(0.8) ? right : static_cast<te_handle>(odd(10)); };
  std::vector<int64_t> indices(64);
  int good = 0;
  for (int i = 0; i < scaled(5000); ++i) {
    te_error why{};
    const uint32_t flags = random.chance(0.9) ? static_cast<uint32_t>(random.below(2)) : static_cast<uint32_t>(odd(4));
    Transfer t;
    if (random.chance(0.5)) {
      t = Transfer(
          te_write(pair.writer.engine, handle(pair.source.region), odd(kBytes), handle(pair.remote), odd(kBytes),
                   odd(2000), handle(random.chance(0.5) ? pair.remote_counter : te_handle{TE_NONE}), flags, -1, &why),
          why);
    } else {
      for (int64_t& index : indices)
        index = random.chance(0.995) ? static_cast<int64_t>(random.below(50)) : static_cast<int64_t>(odd(100));
      te_page_args args{};
      args.region = handle(pair.source.region);
      args.remote = handle(pair.remote);
      args.counter = handle(random.chance(0.5) ? pair.remote_counter : te_handle{TE_NONE});
      args.flags = flags;
      args.source_offset = odd(100);
      args.target_offset = odd(100);
      args.source_stride = odd(190);
      args.target_stride = odd(190);
      args.page_bytes = odd(200);
      args.count = random.below(33);
      args.source = indices.data();
      args.target = indices.data() + 10;
      args.source_index_bytes = random.chance(0.9) ? 4 << random.below(2) : static_cast<uint32_t>(odd(9));
      args.target_index_bytes = random.chance(0.9) ? 4 << random.below(2) : static_cast<uint32_t>(odd(9));
      t = pair.writer.pages(args);
    }
    const int32_t status = t.wait();
    if (status == TE_OK) ++good;
    else if (status != TE_ERR_RANGE && status != TE_ERR_ARGUMENT && status != TE_ERR_REGION_CLOSED)
      FAIL(name_of(status), ": ", t.message());
  }
  CHECK(good > 0);
  CHECK(pair.target.guards_intact());
  CHECK(pair.source.guards_intact());
  check_usable(pair);
}

}  // namespace te::engine_test
