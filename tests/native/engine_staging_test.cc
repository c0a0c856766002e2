// GPU memory on transports that do not reach it: every byte, on the device itself, no byte beyond, and counters exactly as for host memory.
#include "tests/native/cuda_support.h"
#include "tests/native/engine_support.h"
#include "tests/native/verbs_support.h"

namespace te::engine_test {
namespace {

using test::CudaContext;
using test::CudaStandin;
using test::Variable;

constexpr uint32_t kSlot = 4096;

std::vector<Setup> setups() {
  std::vector<Setup> all;
  for (Setup setup : all_setups())
    if (setup.transport == "sim" || setup.transport == "tcp" || setup.transport == "shm") all.push_back(setup);
  for (Setup& setup : all)
    setup.tune = [tune = setup.tune](te_settings& s) {
      if (tune) tune(s);
      s.staging_slot_bytes = kSlot;
      s.staging_slots = 8;
    };
  return all;
}

// The driver that engines find, and a device whose memory is the test's.
struct Gpu {
  explicit Gpu(const std::string& options = "") : standin(options), library("TE_LIBCUDA", CudaStandin::new_path()) {
    const Error error = gpu::load_cuda(&cuda);
    REQUIRE_MESSAGE(error.ok(), error.message());
    context = std::make_unique<CudaContext>(*cuda);
  }
  CudaStandin standin;
  const Variable library;
  const gpu::Cuda* cuda = nullptr;
  std::unique_ptr<CudaContext> context;
};

// Poisoned device memory. `mirror` is what should be there.
struct DeviceMemory {
  DeviceMemory(Gpu& gpu, size_t bytes) : gpu(gpu), mirror(bytes, kPoison) {
    REQUIRE(gpu.cuda->allocate(&at, bytes) == gpu::result::kSuccess);
    REQUIRE(gpu.standin.write(at, mirror.data(), bytes));
  }
  ~DeviceMemory() { free(); }
  void free() {
    if (at != 0) CHECK(gpu.cuda->free(at) == gpu::result::kSuccess);
    at = 0;
  }
  void fill(Random& random) {
    for (uint8_t& byte : mirror) byte = static_cast<uint8_t>(random.next() >> 32);
    REQUIRE(gpu.standin.write(at, mirror.data(), mirror.size()));
  }
  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> all(mirror.size());
    REQUIRE(gpu.standin.read(at, all.data(), all.size()));
    return all;
  }
  bool right() const { return bytes() == mirror; }
  te_handle stage(Player& player) {
    const int32_t status =
        te_region_register_staged(player.engine, reinterpret_cast<void*>(at), mirror.size(), 0, &region, &player.error);
    REQUIRE_MESSAGE(status == TE_OK, player.error.message);
    return region;
  }
  Gpu& gpu;
  std::vector<uint8_t> mirror;
  gpu::CuPointer at = 0;
  te_handle region = TE_NONE;
};

te_region_descriptor descriptor_of(Player& owner, te_handle region) {
  te_region_descriptor d;
  REQUIRE_MESSAGE(te_region_describe(owner.engine, region, &d, &owner.error) == TE_OK, owner.error.message);
  return d;
}

Transfer write_from(Player& player, te_handle region, uint64_t from, te_handle remote, uint64_t to, uint64_t length,
                    te_handle counter, uint32_t flags = 0, int64_t timeout_ns = -1) {
  return player.submit(timeout_ns, [&](int64_t timeout, te_error* why) {
    return te_write(player.engine, region, from, remote, to, length, counter, flags, timeout, why);
  });
}

// Two engines, device memory at both.
struct DevicePair {
  DevicePair(Gpu& gpu, const Setup& setup, size_t bytes)
      : source(gpu, bytes), target(gpu, bytes), writer(setup), owner(setup) {
    Random random(bytes);
    source.fill(random);
    source.stage(writer);
    target.stage(owner);
    remote = writer.remote(descriptor_of(owner, target.region));
    counter = owner.counter();
    notify = writer.remote_counter(owner, counter);
  }
  Transfer write(uint64_t from, uint64_t to, uint64_t length, int64_t timeout_ns = -1, uint32_t flags = 0) {
    return write_from(writer, source.region, from, remote, to, length, notify, flags, timeout_ns);
  }
  void expect(uint64_t from, uint64_t to, uint64_t length) {
    std::copy_n(source.mirror.begin() + static_cast<ptrdiff_t>(from), length,
                target.mirror.begin() + static_cast<ptrdiff_t>(to));
  }
  DeviceMemory source, target;
  Player writer, owner;
  te_handle remote = TE_NONE, counter = TE_NONE, notify = TE_NONE;
};

std::vector<uint64_t> lengths() { return {0, 1, 63, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 7, 20 * 4096 + 1}; }

Setup plain(uint32_t nics = 1) {
  Setup setup{"sim", "", nics, {}};
  setup.tune = [](te_settings& s) {
    s.staging_slot_bytes = kSlot;
    s.staging_slots = 8;
  };
  return setup;
}

}  // namespace

TEST_CASE("engine: staged writes of every length land on the device wholly, touch nothing else and count exactly one") {
  for (const Setup& setup : setups()) {
    CAPTURE(setup.text());
    Gpu gpu;
    DevicePair pair(gpu, setup, 128 << 10);
    Memory& host_source = pair.writer.memory(128 << 10);
    Memory& host_target = pair.owner.memory(128 << 10);
    Random random(1);
    host_source.fill(random);
    const te_handle remote_host = pair.writer.remote(pair.owner, host_target);
    uint64_t counted = 0;
    for (const uint64_t length : lengths()) {
      CAPTURE(length);
      const uint64_t from = random.below((64 << 10)), to = random.below((40 << 10));
      for (const uint32_t flags : {0u, uint32_t{TE_FLAG_FLUSH}}) {
        require_ok(pair.write(from, to, length, -1, flags));
        REQUIRE(pair.owner.counted(pair.counter, ++counted));
        pair.expect(from, to, length);
        REQUIRE(pair.target.right());
      }
      require_ok(write_from(pair.writer, host_source.region, from, pair.remote, to, length, pair.notify, 0, -1));
      REQUIRE(pair.owner.counted(pair.counter, ++counted));
      std::copy_n(host_source.data() + from, length, pair.target.mirror.begin() + static_cast<ptrdiff_t>(to));
      REQUIRE(pair.target.right());
      require_ok(write_from(pair.writer, pair.source.region, from, remote_host, to, length, pair.notify, 0, -1));
      REQUIRE(pair.owner.counted(pair.counter, ++counted));
      REQUIRE(host_target.holds(to, pair.source.mirror.data() + from, length));
      host_target.poison(to, length);
      require_ok(write_from(pair.writer, pair.source.region, from, pair.remote, to, length, TE_NONE, 0, -1));
      pair.expect(from, to, length);
      REQUIRE(pair.target.right());
    }
    CHECK(pair.owner.value(pair.counter) == counted);
    CHECK(host_target.guards_intact());
    CHECK(pair.source.right());
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: staged pages count one each, and many writes at once share the slots") {
  for (const Setup& setup : setups()) {
    CAPTURE(setup.text());
    Gpu gpu;
    DevicePair pair(gpu, setup, 256 << 10);
    constexpr uint64_t kPage = 5000, kPages = 40;
    std::vector<int64_t> from(kPages), to(kPages);
    for (uint64_t i = 0; i < kPages; ++i) {
      from[i] = static_cast<int64_t>((i * 7) % kPages);
      to[i] = static_cast<int64_t>((i * 11 + 3) % kPages);
    }
    te_page_args args{};
    args.region = pair.source.region;
    args.remote = pair.remote;
    args.counter = pair.notify;
    args.source_stride = args.target_stride = args.page_bytes = kPage;
    args.count = kPages;
    args.source = from.data();
    args.target = to.data();
    args.source_index_bytes = args.target_index_bytes = 8;
    require_ok(pair.writer.pages(args));
    REQUIRE(pair.owner.counted(pair.counter, kPages));
    for (uint64_t i = 0; i < kPages; ++i)
      pair.expect(static_cast<uint64_t>(from[i]) * kPage, static_cast<uint64_t>(to[i]) * kPage, kPage);
    CHECK(pair.target.right());

    std::vector<Transfer> all;
    for (uint64_t i = 0; i < 16; ++i) {
      all.push_back(pair.write(i * 16384 / 2, i * 16384, 16384));
      pair.expect(i * 16384 / 2, i * 16384, 16384);
    }
    for (Transfer& t : all) require_ok(std::move(t));
    CHECK(pair.owner.counted(pair.counter, kPages + 16));
    CHECK(pair.target.right());
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: scatters, batches and prepared writes take staged memory at either end") {
  for (const Setup& setup : setups()) {
    CAPTURE(setup.text());
    Gpu gpu;
    DevicePair pair(gpu, setup, 64 << 10);
    Memory& host = pair.owner.memory(64 << 10);
    const te_handle remote_host = pair.writer.remote(pair.owner, host);
    const int32_t peer = pair.writer.peer(pair.owner);
    const te_handle target = pair.writer.target(
        {{peer, pair.remote, pair.notify}, {peer, remote_host, pair.notify}, {peer, TE_NONE, pair.notify}});
    const int64_t source_offsets[] = {100, 20'000, 0}, lengths[] = {9000, 9001, 0}, target_offsets[] = {5, 7, 0};
    const te_scatter_args scatter{target, pair.source.region, 0, 0, source_offsets, lengths, target_offsets};
    require_ok(pair.writer.scatter(scatter));
    CHECK(pair.owner.counted(pair.counter, 3));
    pair.expect(100, 5, 9000);
    CHECK(pair.target.right());
    CHECK(host.holds(7, pair.source.mirror.data() + 20'000, 9001));

    const te_write_args write{pair.source.region, pair.remote, pair.notify, 0, 1, 30'000, 10'000};
    te_handle prepared = TE_NONE;
    REQUIRE(te_prepare_write(pair.writer.engine, &write, &prepared, &pair.writer.error) == TE_OK);
    for (int i = 0; i < 3; ++i) require_ok(pair.writer.post(prepared));
    CHECK(pair.owner.counted(pair.counter, 6));
    te_batch_entry entry{};
    entry.write = write;
    entry.write.source_offset = 40'000;
    entry.write.target_offset = 45'000;
    te_batch_entry first{};
    first.write = write;
    require_ok(pair.writer.batch({first, entry}));
    CHECK(pair.owner.counted(pair.counter, 8));
    pair.expect(1, 30'000, 10'000);
    pair.expect(40'000, 45'000, 10'000);
    CHECK(pair.target.right());
  }
}

TEST_CASE("engine: a staged write counts when its bytes are on the device, and not before") {
  Gpu gpu;
  DevicePair pair(gpu, plain(), 64 << 10);
  require_ok(pair.write(0, 0, 1));  // everything is attached
  Memory& host = pair.writer.memory(64 << 10);
  gpu.standin.configure("hold=1");
  Transfer t = write_from(pair.writer, host.region, 0, pair.remote, 0, 30'000, pair.notify, 0, -1);
  CHECK(t.wait(100 * kMs) == TE_AGAIN);
  CHECK(pair.owner.value(pair.counter) == 1);
  gpu.standin.configure("hold=0");
  require_ok(std::move(t));
  CHECK(pair.owner.counted(pair.counter, 2));
  std::copy_n(host.data(), 30'000, pair.target.mirror.begin());
  CHECK(pair.target.right());
}

TEST_CASE("engine: a staged transfer that ends early is quiesced when the last copy of it has ended") {
  for (const bool cancel : {false, true}) {
    Gpu gpu;
    DevicePair pair(gpu, plain(), 64 << 10);
    require_ok(pair.write(0, 0, 1));
    gpu.standin.configure("hold=1");
    Transfer t = pair.write(0, 0, 50'000, cancel ? -1 : 300 * kMs * kSlowness);
    CHECK(t.wait(50 * kMs) == TE_AGAIN);  // by then pieces are under way
    if (cancel) t.cancel();
    CHECK(t.wait() == (cancel ? TE_ERR_CANCELLED : TE_ERR_TIMEOUT));
    CHECK_FALSE(t.quiesced());
    gpu.standin.configure("hold=0");
    CHECK(t.wait_quiesced());
    const std::vector<uint8_t> then = pair.target.bytes();
    CHECK(pair.owner.value(pair.counter) == 1);
    require_ok(pair.write(0, 60'000, 1));  // the slots are all there again
    CHECK(pair.owner.counted(pair.counter, 2));
    pair.target.mirror = then;
    pair.expect(0, 60'000, 1);
    CHECK(pair.target.right());
    require_ok(pair.write(0, 0, 60'000));
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: after a staged region was closed nothing is copied to it, and writers are told") {
  for (const Setup& setup : setups()) {
    CAPTURE(setup.text());
    Gpu gpu;
    DevicePair pair(gpu, setup, 256 << 10);
    require_ok(pair.write(0, 0, 1));
    std::vector<Transfer> all;
    for (int i = 0; i < 8; ++i) all.push_back(pair.write(0, 0, 200'000));
    REQUIRE(te_region_close(pair.owner.engine, pair.target.region, kPatience, &pair.owner.error) == TE_OK);
    const std::vector<uint8_t> then = pair.target.bytes();
    uint64_t done = 1;
    for (Transfer& t : all) {
      const int32_t status = t.wait();
      CHECK((status == TE_OK || status == TE_ERR_REGION_CLOSED));
      done += status == TE_OK;
      CHECK(t.wait_quiesced());
    }
    CHECK(pair.write(0, 0, 10).wait() == TE_ERR_REGION_CLOSED);
    CHECK(pair.target.bytes() == then);
    CHECK(pair.owner.value(pair.counter) == done);
  }
}

TEST_CASE("engine: a copy that fails fails its transfer, with the driver's word, and counts nothing") {
  for (const int fails_at : {1, 2, 5, 8}) {  // copies alternate between both ends, more or less
    CAPTURE(fails_at);
    Gpu gpu;
    DevicePair pair(gpu, plain(), 64 << 10);
    Memory& host = pair.writer.memory(64 << 10);
    require_ok(write_from(pair.writer, host.region, 0, pair.remote, 0, 0, pair.notify, 0, -1));
    gpu.standin.configure("copy_fail_after=" + std::to_string(fails_at));
    Transfer t = pair.write(0, 0, 5 * kSlot);
    const int32_t status = t.wait();
    CHECK((status == TE_ERR_TRANSPORT || status == TE_ERR_REMOTE_ACCESS));
    if (status == TE_ERR_TRANSPORT) CHECK(t.error().provider_status == gpu::result::kIllegalAddress);
    CHECK(t.wait_quiesced());
    CHECK(pair.owner.value(pair.counter) == 1);
    gpu.standin.clear_errors();
    gpu.standin.configure("");
    require_ok(pair.write(0, 0, 5 * kSlot));
    CHECK(pair.owner.counted(pair.counter, 2));
  }
}

TEST_CASE("engine: GPU memory that was freed since it was registered is noticed at the call") {
  Gpu gpu;
  DevicePair pair(gpu, plain(), 64 << 10);
  require_ok(pair.write(0, 0, 100));
  pair.source.free();
  DeviceMemory another(gpu, 64 << 10);  // most likely at the same address
  Transfer t = pair.write(0, 0, 100);
  CHECK(t.refused());
  CHECK(t.wait() == TE_ERR_REGISTRATION);
  CHECK(t.message().find("was freed after it was registered") != std::string::npos);
  pair.target.free();
  te_region_descriptor d;
  CHECK(te_region_describe(pair.owner.engine, pair.target.region, &d, &pair.owner.error) == TE_ERR_REGISTRATION);
  Memory& host = pair.writer.memory(100);
  CHECK(write_from(pair.writer, host.region, 0, pair.remote, 0, 100, pair.notify, 0, -1).wait() ==
        TE_ERR_REMOTE_ACCESS);
  CHECK(pair.owner.value(pair.counter) == 1);
  CHECK(te_region_close(pair.owner.engine, pair.target.region, kPatience, &pair.owner.error) == TE_OK);
}

TEST_CASE("engine: few slots serve many writers in turn") {
  Gpu gpu;
  Setup setup = plain(2);
  setup.tune = [](te_settings& s) {
    s.staging_slot_bytes = kSlot;
    s.staging_slots = 2;
  };
  Player owner(setup);
  DeviceMemory target(gpu, 512 << 10);
  target.stage(owner);
  const te_region_descriptor d = descriptor_of(owner, target.region);
  const te_handle counter = owner.counter();
  std::vector<std::unique_ptr<Player>> writers;
  std::vector<Transfer> all;
  for (uint64_t i = 0; i < 8; ++i) {
    writers.push_back(std::make_unique<Player>(setup));
    Player& writer = *writers.back();
    Memory& m = writer.memory(60'000);
    Random random(i);
    m.fill(random);
    all.push_back(write_from(writer, m.region, 0, writer.remote(d), i << 16, 60'000,
                             writer.remote_counter(owner, counter), 0, -1));
    std::copy_n(m.data(), 60'000, target.mirror.begin() + static_cast<ptrdiff_t>(i << 16));
  }
  for (Transfer& t : all) require_ok(std::move(t));
  CHECK(owner.counted(counter, 8));
  CHECK(target.right());
}

TEST_CASE("engine: the loss of a writer half-way keeps its slots from others, and hurts nobody else") {
  Gpu gpu;
  Setup setup = plain();
  setup.tune = [](te_settings& s) {
    s.staging_slot_bytes = kSlot;
    s.staging_slots = 16;
    s.peer_timeout_ns = kShortLife;
  };
  DevicePair pair(gpu, setup, 256 << 10);
  require_ok(pair.write(0, 0, 1));
  Player other(setup);
  Memory& host = other.memory(100'000);
  Random random(3);
  host.fill(random);
  const te_handle remote = other.remote(descriptor_of(pair.owner, pair.target.region));
  const te_handle notify = other.remote_counter(pair.owner, pair.counter);
  require_ok(write_from(other, host.region, 0, remote, 0, 10, notify, 0, -1));
  const te_region_descriptor d = descriptor_of(pair.owner, pair.target.region);
  Transfer t = pair.write(0, 0, 250'000);
  pair.writer.inject("kill");
  REQUIRE(eventually([&] { return pair.owner.state(pair.owner.peer(pair.writer)) == TE_PEER_LOST; }));
  CHECK(t.wait() != TE_OK);
  require_ok(write_from(other, host.region, 0, other.remote(d), 0, 100'000, notify, 0, -1));
  std::vector<uint8_t> all = pair.target.bytes();
  CHECK(std::equal(all.begin(), all.begin() + 100'000, host.data()));
  CHECK(pair.owner.value(pair.counter) == 3);
  CHECK(te_region_close(pair.owner.engine, pair.target.region, kPatience, &pair.owner.error) == TE_OK);
}

TEST_CASE(
    "engine: peers that are lost while copies for them are held leave nothing behind: sources close, others are "
    "served") {
  Gpu gpu;
  Setup setup = plain();
  setup.tune = [](te_settings& s) {
    s.staging_slot_bytes = kSlot;
    s.staging_slots = 4;
    s.peer_timeout_ns = kShortLife;
  };
  Player writer(setup);
  for (int round = 0; round < 4; ++round) {  // more pieces in all than there are slots
    CAPTURE(round);
    DeviceMemory source(gpu, 64 << 10), target(gpu, 64 << 10);
    Player owner(setup);
    source.stage(writer);
    target.stage(owner);
    const te_handle remote = writer.remote(descriptor_of(owner, target.region));
    Memory& host = writer.memory(64 << 10);
    require_ok(write_from(writer, host.region, 0, remote, 0, 10, TE_NONE));
    gpu.standin.configure("hold=1");
    Transfer from_host = write_from(writer, host.region, 0, remote, 0, 60'000, TE_NONE);
    Transfer from_device = write_from(writer, source.region, 0, remote, 0, 60'000, TE_NONE);
    CHECK(from_host.wait(50 * kMs) == TE_AGAIN);
    owner.inject("kill");
    CHECK(from_host.wait() == TE_ERR_PEER_LOST);
    CHECK(from_device.wait() == TE_ERR_PEER_LOST);
    gpu.standin.configure("hold=0");
    CHECK(te_region_close(writer.engine, source.region, kPatience, &writer.error) == TE_OK);
    CHECK(writer.close(host) == TE_OK);
    te_engine_free(std::exchange(owner.engine, nullptr));
  }
  Player last(setup);
  DeviceMemory source(gpu, 64 << 10), target(gpu, 64 << 10);
  Random random(9);
  source.fill(random);
  source.stage(writer);
  target.stage(last);
  require_ok(
      write_from(writer, source.region, 0, writer.remote(descriptor_of(last, target.region)), 0, 64 << 10, TE_NONE));
  target.mirror = source.mirror;
  CHECK(target.right());
}

TEST_CASE("engine: staged writes that wait for slots hold up no other writes to their peer") {
  Gpu gpu;
  DevicePair pair(gpu, plain(), 64 << 10);
  Memory& host = pair.writer.memory(64 << 10);
  Memory& plain_target = pair.owner.memory(64 << 10);
  const te_handle remote_plain = pair.writer.remote(pair.owner, plain_target);
  require_ok(pair.write(0, 0, 1));
  gpu.standin.configure("hold=1");
  std::vector<Transfer> staged;
  for (int i = 0; i < 20; ++i)
    staged.push_back(write_from(pair.writer, host.region, 0, pair.remote, 0, 60'000, TE_NONE));
  require_ok(write_from(pair.writer, host.region, 0, remote_plain, 0, 60'000, pair.notify));
  CHECK(pair.owner.counted(pair.counter, 2));
  gpu.standin.configure("hold=0");
  for (Transfer& t : staged) require_ok(std::move(t));
}

TEST_CASE("engine: GPU memory that cannot be registered is refused with the reason and the remedy") {
  Gpu gpu("devices=2");
  Player player(plain());
  DeviceMemory memory(gpu, 1 << 16);
  te_handle region = TE_NONE;
  const auto refused = [&](uint64_t at, uint64_t length, int32_t device, bool staged, const char* part) {
    const int32_t status = staged ? te_region_register_staged(player.engine, reinterpret_cast<void*>(at), length,
                                                              device, &region, &player.error)
                                  : te_region_register(player.engine, reinterpret_cast<void*>(at), length,
                                                       TE_DEVICE_CUDA, device, &region, &player.error);
    CHECK(status == TE_ERR_REGISTRATION);
    CHECK_MESSAGE(std::string(player.error.message).find(part) != std::string::npos, player.error.message);
  };
  refused(memory.at, 1 << 16, 0, false, "staging=True");
  for (const bool staged : {false, true}) {
    refused(memory.at, 1 << 16, 1, staged, "it is memory of cuda:0, not of cuda:1");
    refused(memory.at, 2 << 16, 0, staged, "the allocation ends after 65536 bytes");
    refused(4096, 4096, 0, staged, "it was freed, or belongs to the host");
    const uint64_t managed = gpu.standin.allocate_managed(4096);
    refused(managed, 4096, 0, staged, "managed memory");
    CHECK(gpu.cuda->free(managed) == gpu::result::kSuccess);
  }
  gpu.standin.configure("devices=2,host_alloc_fail=1");
  refused(memory.at, 1 << 16, 0, true, "lower staging_slots");
  gpu.standin.configure("devices=2");
  void* pinned = nullptr;
  REQUIRE(gpu.cuda->host_allocate(&pinned, 4096, gpu::kHostPortable | gpu::kHostDeviceMap) == gpu::result::kSuccess);
  CHECK(te_region_register(player.engine, pinned, 4096, TE_DEVICE_CUDA, 0, &region, &player.error) == TE_OK);
  te_region_info info{};
  CHECK(te_region_info_get(player.engine, region, &info, &player.error) == TE_OK);
  CHECK(info.reach == TE_REACH_HOST);
  CHECK(te_region_close(player.engine, region, kPatience, &player.error) == TE_OK);
  CHECK(gpu.cuda->host_free(pinned) == gpu::result::kSuccess);
  {
    const Variable none("TE_LIBCUDA", "/nowhere/libcuda.so");
    refused(memory.at, 1 << 16, 0, true, "TE_LIBCUDA is set to /nowhere/libcuda.so");
  }
}

TEST_CASE("engine: a NIC that takes dma-bufs writes to the device itself; where writes need a flush they get one") {
  if (!usable("cx7")) return;
  test::Fabric fabric("dmabuf=1");
  for (const char* options : {"", "ordering=none"}) {
    Gpu gpu(options);
    const Setup setup{"cx7", "", 2, {}};
    Player writer(setup), owner(setup);
    DeviceMemory source(gpu, 256 << 10), target(gpu, 256 << 10);
    Random random(4);
    source.fill(random);
    const auto open = [](Player& player, DeviceMemory& m) {
      const int32_t status = te_region_register(player.engine, reinterpret_cast<void*>(m.at), m.mirror.size(),
                                                TE_DEVICE_CUDA, 0, &m.region, &player.error);
      REQUIRE_MESSAGE(status == TE_OK, player.error.message);
      te_region_info info{};
      REQUIRE(te_region_info_get(player.engine, m.region, &info, &player.error) == TE_OK);
      CHECK(info.reach == TE_REACH_DMABUF);
    };
    open(writer, source);
    open(owner, target);
    const uint64_t flushed = gpu.standin.statistic("flushes");
    const te_handle counter = owner.counter();
    require_ok(write_from(writer, source.region, 33, writer.remote(descriptor_of(owner, target.region)), 4095, 200'001,
                          writer.remote_counter(owner, counter), 0, -1));
    CHECK(owner.counted(counter, 1));
    std::copy_n(source.mirror.begin() + 33, 200'001, target.mirror.begin() + 4095);
    CHECK(target.right());
    CHECK((gpu.standin.statistic("flushes") > flushed) == (*options != '\0'));
  }
  Gpu gpu("ordering=none,flush=0");
  Player player({"cx7", "", 1, {}});
  DeviceMemory memory(gpu, 4096);
  te_handle region = TE_NONE;
  CHECK(te_region_register(player.engine, reinterpret_cast<void*>(memory.at), 4096, TE_DEVICE_CUDA, 0, &region,
                           &player.error) == TE_ERR_REGISTRATION);
  CHECK(std::string(player.error.message).find("neither orders nor flushes") != std::string::npos);
}

}  // namespace te::engine_test
