// Contiguous writes: every length, every byte, no byte beyond, and the counter exactly one up per write.
#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr size_t kBytes = 1 << 18;

std::vector<uint64_t> lengths_around(std::initializer_list<uint64_t> edges) {
  std::vector<uint64_t> lengths;
  for (uint64_t i = 0; i <= 130; ++i) lengths.push_back(i);
  for (uint64_t power = 256; power <= (1 << 16); power *= 2)
    for (const uint64_t length : {power - 1, power, power + 1}) lengths.push_back(length);
  for (const uint64_t edge : edges)
    for (uint64_t k = 1; k <= 9 && edge * k < kBytes / 2; ++k)
      for (const uint64_t length : {edge * k - 1, edge * k, edge * k + 1}) lengths.push_back(length);
  return lengths;
}

// Writes one after the other, each checked alone.
void check_lengths(Pair& pair, const std::vector<uint64_t>& lengths, uint32_t flags = 0) {
  Random random(lengths.size());
  uint64_t written = pair.owner.value(pair.counter);
  for (const uint64_t length : lengths) {
    const uint64_t from = random.below(kBytes - length + 1), to = random.below(kBytes - length + 1);
    Transfer t = pair.write(from, to, length, true, flags);
    const int32_t status = t.wait();
    REQUIRE_MESSAGE(status == TE_OK, "length ", length, ": ", name_of(status), ": ", t.message());
    if (!pair.owner.counted(pair.counter, ++written))
      FAIL("length ", length, ": the counter is at ", pair.owner.value(pair.counter), ", not at ", written);
    if (!pair.target.holds(to, pair.source.data() + from, length)) FAIL("length ", length, " from ", from, " to ", to);
    pair.target.poison(to, length);
  }
  CHECK(pair.target.poisoned(0, kBytes));
  CHECK(pair.target.guards_intact());
  CHECK(pair.owner.value(pair.counter) == written);
}

}  // namespace

TEST_CASE("engine: writes of every length land wholly, touch nothing else and count exactly one") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup, kBytes);
    // 1024 is the fixture's share of a NIC, 1000 and 777 are longest work requests of some fabrics.
    check_lengths(pair, lengths_around({1024, 1000, 777, 64}));
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: any pairing of NIC counts carries every length") {
  for (const auto& [ours, theirs] :
       std::vector<std::pair<uint32_t, uint32_t>>{{1, 8}, {8, 1}, {3, 8}, {8, 3}, {2, 5}, {16, 16}}) {
    CAPTURE(ours);
    CAPTURE(theirs);
    const std::string sim = "reorder=1,delay=1,max_write=500";
    Pair pair({"sim", sim, ours, {}}, {"sim", sim, theirs, {}}, kBytes);
    check_lengths(pair,
                  {0, 1, 63, 64, 65, 500, 501, 1023, 1024, 2047, 2048, 2049, 4096, 8191, 8192, 16385, 40'000, 65'537});
    // Every NIC takes part in a long write.
    for (uint32_t nic = 0; nic < ours; ++nic) {
      te_nic_info info{};
      REQUIRE(te_nic_describe(pair.writer.engine, nic, &info, &pair.writer.error) == TE_OK);
      CHECK(info.writes > 0);
    }
  }
}

// As on EFA: a target takes writes only from NICs that it has in its address vector.
TEST_CASE("engine: whoever is connected is known to the peer on every NIC, for any pairing of NIC counts") {
  for (const auto& [ours, theirs] :
       std::vector<std::pair<uint32_t, uint32_t>>{{1, 1}, {4, 4}, {1, 8}, {8, 1}, {5, 2}, {2, 5}}) {
    CAPTURE(ours);
    CAPTURE(theirs);
    const std::string sim = "reorder=1,require_peer=1";
    Pair pair({"sim", sim, ours, {}}, {"sim", sim, theirs, {}}, kBytes);
    for (int i = 0; i < 20; ++i) {
      Transfer t = pair.write(0, 0, 40'000);
      const int32_t status = t.wait();
      CHECK_MESSAGE(status == TE_OK, "NIC ", t.error().nic, " provider status ", t.error().provider_status, ": ",
                    t.message());
      if (status != TE_OK) break;
    }
  }
}

TEST_CASE("engine: a shard of one byte cuts the smallest writes over all NICs") {
  for (const char* sim : {"reorder=0", "reorder=1,delay=2"}) {
    Setup setup{"sim", sim, 8, [](te_settings& s) { s.shard_bytes = 1; }};
    CAPTURE(std::string(sim));
    Pair pair(setup, kBytes);
    check_lengths(pair, lengths_around({64, 512}));
  }
}

TEST_CASE("engine: flushed writes land, count and may end with a read on every NIC") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup, kBytes);
    check_lengths(pair, {0, 1, 64, 777, 778, 1000, 1001, 2048, 8192, 50'000}, TE_FLAG_FLUSH);
  }
}

TEST_CASE("engine: when a flushed write without a counter has ended, its bytes are in memory") {
  // Completions come before the bytes land; only the read behind them proves it.
  for (const uint32_t nics : {1u, 3u}) {
    Setup setup{"sim", "reorder=0,delivery_complete=0,delay=5,max_write=900", nics, {}};
    Pair pair(setup, kBytes);
    Random random(nics);
    for (int i = 0; i < scaled(50); ++i) {
      const uint64_t length = 1 + random.below(20'000), from = random.below(kBytes - length),
                     to = random.below(kBytes - length);
      Transfer t = pair.write(from, to, length, false, TE_FLAG_FLUSH);
      REQUIRE(t.wait() == TE_OK);
      REQUIRE(pair.target.holds(to, pair.source.data() + from, length, 0));
    }
    CHECK(pair.owner.value(pair.counter) == 0);
  }
}

TEST_CASE("engine: a completed transfer has its bytes in memory where completions prove delivery") {
  Setup setup{"sim", "reorder=1,delay=4,mtu=100,max_write=3000", 4, {}};
  Pair pair(setup, kBytes);
  Random random(5);
  for (int i = 0; i < scaled(100); ++i) {
    const uint64_t length = random.below(20'000), from = random.below(kBytes - length),
                   to = random.below(kBytes - length);
    Transfer t = pair.write(from, to, length, false);
    REQUIRE(t.wait() == TE_OK);
    CHECK(t.quiesced());
    REQUIRE(pair.target.holds(to, pair.source.data() + from, length, 0));
  }
}

TEST_CASE("engine: the counter never runs ahead of the bytes, whatever the fabric's order") {
  // The owner looks at memory as soon as the counter moves, without waiting for the writer's transfer.
  for (const char* sim : {"reorder=1,delay=6,mtu=64,max_write=600", "reorder=0,delay=6,mtu=64,max_write=600",
                          "reorder=0,delay=6,mtu=64,max_write=600,delivery_complete=0"})
    for (const uint32_t nics : {1u, 2u, 5u}) {
      CAPTURE(std::string(sim));
      CAPTURE(nics);
      Pair pair({"sim", sim, nics, {}}, kBytes);
      Random random(nics);
      uint64_t count = 0;
      for (int i = 0; i < scaled(60); ++i) {
        const uint64_t length = random.below(6000), from = random.below(kBytes - length),
                       to = random.below(kBytes - length);
        Transfer t = pair.write(from, to, length);
        REQUIRE(pair.owner.wait(pair.counter, ++count) == TE_OK);
        REQUIRE(pair.target.holds(to, pair.source.data() + from, length, 0));
        REQUIRE(t.wait() == TE_OK);
      }
      CHECK(pair.owner.value(pair.counter) == count);
    }
}

TEST_CASE("engine: a fabric that neither keeps order nor proves delivery is refused") {
  te_settings settings;
  te_settings_defaults(&settings);
  settings.transport = "sim";
  settings.sim = "reorder=1,delivery_complete=0";
  settings.core = TE_CORE_NONE;
  te_engine* engine = nullptr;
  te_error why{};
  const int32_t opened = te_engine_open(&settings, &engine, &why);
  te_engine_free(engine);
  CHECK(opened == TE_ERR_CONFIG);
  CHECK(std::string(why.message).find("order") != std::string::npos);
}

TEST_CASE("engine: offsets, strides and indices beyond 4 GiB reach exactly the bytes they name") {
  constexpr uint64_t kFar = uint64_t{1} << 33;
  for (const Setup& setup : {Setup{"sim", "reorder=0", 2, {}}, Setup{"sim", "reorder=1,virtual_addresses=0", 3, {}}}) {
    CAPTURE(setup.text());
    Player writer(setup), owner(setup);
    Mirrored source(kFar, kFar), target(kFar, kFar);  // sparse: only what is touched takes memory
    Memory from(4096);
    Random random(1);
    from.fill(random);
    const uint32_t source_region = register_span(writer, source.data, kFar);
    Memory handle(1);
    handle.region = register_span(owner, target.data, kFar);
    const te_handle remote = writer.remote(owner, handle), counter = owner.counter();
    const te_handle remote_counter = writer.remote_counter(owner, counter);
    uint64_t count = 0;
    te_error why{};
    for (const uint64_t edge :
         {uint64_t{1} << 31, uint64_t{1} << 32, (uint64_t{1} << 32) + (uint64_t{1} << 31), kFar - 4096})
      for (const uint64_t back : {0, 1, 4096}) {
        const uint64_t at = edge - back;
        CAPTURE(at);
        std::copy_n(from.data(), 4096, source.data + at);
        std::fill_n(target.data + at, 4096, kPoison);
        require_ok({te_write(writer.engine, source_region, at, remote, at, 4096, remote_counter, 0, -1, &why), why});
        REQUIRE(owner.counted(counter, ++count));
        REQUIRE(std::memcmp(target.data + at, from.data(), 4096) == 0);
        std::fill_n(target.data + at, 4096, kPoison);
        const int64_t index = static_cast<int64_t>(at / 7);
        te_page_args pages{source_region, remote, remote_counter, 0,      at % 7, at % 7, 7, 7,
                           4096,          1,      &index,         &index, 8,      8};
        require_ok(writer.pages(pages));
        REQUIRE(owner.counted(counter, ++count));
        REQUIRE(std::memcmp(target.data + at, from.data(), 4096) == 0);
      }
    CHECK(te_write(writer.engine, source_region, 0, remote, kFar - 10, 11, remote_counter, 0, -1, &why) == nullptr);
    CHECK(why.status == TE_ERR_RANGE);
    CHECK(te_region_close(owner.engine, handle.region, kPatience, &why) == TE_OK);
    writer.free();  // before its memory goes
    owner.free();
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("engine: a write longer than 4 GiB moves all of its bytes and counts one") {
  constexpr uint64_t kPeriod = uint64_t{1} << 24, kLength = (uint64_t{1} << 32) + 4096;
  Setup setup{"sim", "reorder=0,max_write=1073741824", 2, {}};
  Player writer(setup), owner(setup);
  Mirrored source(kPeriod, kLength), target(kPeriod, kLength);
  Random random(1);
  for (uint64_t i = 0; i < kPeriod; ++i) source.data[i] = static_cast<uint8_t>(random.next() >> 32);
  const uint32_t source_region = register_span(writer, source.data, kLength);
  Memory handle(1);
  handle.region = register_span(owner, target.data, kLength);
  const te_handle remote = writer.remote(owner, handle), counter = owner.counter();
  te_error why{};
  require_ok({te_write(writer.engine, source_region, 0, remote, 0, kLength, writer.remote_counter(owner, counter), 0,
                       -1, &why),
              why});
  CHECK(owner.counted(counter, 1));
  CHECK(writer.peer_info(writer.peer(owner)).write_bytes == kLength);
  CHECK(std::memcmp(source.data, target.data, kPeriod) == 0);
  writer.free();
  owner.free();
}
#endif

TEST_CASE("engine: a region of no bytes takes writes of no bytes, which count") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    Memory nothing(0), null(0);
    pair.owner.open(nothing);
    CHECK(te_region_register(pair.owner.engine, nullptr, 0, TE_DEVICE_HOST, 0, &null.region, &pair.owner.error) ==
          TE_OK);
    uint64_t count = 0;
    for (const Memory* each : {&nothing, &null}) {
      if (each->region == TE_NONE) continue;
      const te_handle remote = pair.writer.remote(pair.owner, *each);
      require_ok(pair.writer.write(pair.source, 0, remote, 0, 0, pair.remote_counter));
      CHECK(pair.owner.counted(pair.counter, ++count));
      CHECK(pair.writer.write(pair.source, 0, remote, 0, 1, pair.remote_counter).wait() == TE_ERR_RANGE);
    }
    CHECK(pair.owner.close(nothing) == TE_OK);
    CHECK(pair.owner.close(null) == TE_OK);
  }
}

TEST_CASE("engine: hundreds of writes in flight at once count once each and all land") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup, kBytes);
    constexpr uint64_t kSlice = 600;
    constexpr uint64_t kWrites = kBytes / kSlice;
    std::vector<Transfer> transfers;
    for (uint64_t i = 0; i < kWrites; ++i) transfers.push_back(pair.write(i * kSlice, i * kSlice, i % (kSlice + 1)));
    for (Transfer& t : transfers) REQUIRE(t.wait() == TE_OK);
    CHECK(pair.owner.counted(pair.counter, kWrites));
    for (uint64_t i = 0; i < kWrites; ++i)
      REQUIRE(pair.target.holds(i * kSlice, pair.source.data() + i * kSlice, i % (kSlice + 1), 0));
    CHECK(pair.target.guards_intact());
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: small windows, queues and slots hold writes back and lose none") {
  const auto tune = [](te_settings& s) {
    s.immediate_window = 2;
    s.assembly_slots = 1;
    s.operations = 16;
    s.operations_per_peer = 5;
    s.nic_depth = 8;
    s.peer_depth = 2;
    s.bursts = 1;
    s.message_window = 4;
  };
  for (const char* sim : {"reorder=0,depth=8,max_write=300", "reorder=1,depth=8,delay=3,busy=0.3,max_write=300"}) {
    CAPTURE(std::string(sim));
    Pair pair({"sim", sim, 4, tune}, kBytes);
    const int writes = scaled(300);
    Random random(9);
    for (int i = 0; i < writes; ++i) REQUIRE_FALSE(pair.write(0, 0, random.below(6000)).refused());
    CHECK(pair.owner.counted(pair.counter, static_cast<uint64_t>(writes)));
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: a batch of writes and page lists ends once, after all of it") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup, kBytes);
    const std::vector<int32_t> source_pages = {0, 2, 4, 6}, target_pages = {7, 5, 3, 1};
    std::vector<te_batch_entry> entries;
    for (uint64_t i = 0; i < 40; ++i) {
      te_batch_entry entry{};
      if (i % 4 == 3) {
        entry.is_pages = 1;
        entry.pages = {pair.source.region,
                       pair.remote,
                       pair.remote_counter,
                       0,
                       i * 4096,
                       i * 4096,
                       128,
                       128,
                       128,
                       4,
                       source_pages.data(),
                       target_pages.data(),
                       4,
                       4};
      } else {
        entry.write = {
            pair.source.region, pair.remote, i % 4 == 0 ? te_handle{TE_NONE} : pair.remote_counter, 0, i * 4096,
            i * 4096,           i * 100};
      }
      entries.push_back(entry);
    }
    Transfer t = pair.writer.batch(entries);
    const int32_t status = t.wait();
    REQUIRE_MESSAGE(status == TE_OK, t.message());
    CHECK(t.quiesced());
    CHECK(pair.owner.counted(pair.counter, 20 + 10 * 4));
    for (uint64_t i = 0; i < 40; ++i) {
      if (i % 4 != 3) {
        CHECK(pair.target.holds(i * 4096, pair.source.data() + i * 4096, i * 100, 0));
        continue;
      }
      for (size_t k = 0; k < 4; ++k)
        CHECK(pair.target.holds(i * 4096 + static_cast<uint64_t>(target_pages[k]) * 128,
                                pair.source.data() + i * 4096 + static_cast<uint64_t>(source_pages[k]) * 128, 128, 0));
    }
    CHECK(pair.writer.batch({}).wait() == TE_OK);  // nothing to do is done
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: an engine writes to itself") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Player self(setup);
    Memory& source = self.memory(kBytes);
    Memory& target = self.memory(kBytes);
    Random random(1);
    source.fill(random);
    const te_handle counter = self.counter();
    const te_handle remote = self.remote(self, target), remote_counter = self.remote_counter(self, counter);
    uint64_t count = 0;
    for (const uint64_t length : {0, 1, 100, 1024, 2048, 5000, 70'000}) {
      require_ok(self.write(source, 11, remote, 13, length, remote_counter));
      CHECK(self.counted(counter, ++count));
      CHECK(target.holds(13, source.data() + 11, length));
      target.poison();
    }
    const int32_t me = self.peer(self);
    require_ok(self.send(me, "hello", 5));
    te_message message{};
    REQUIRE(te_message_receive(self.engine, kPatience, &message, &self.error) == TE_OK);
    CHECK(message.peer == me);
    CHECK(std::string(reinterpret_cast<const char*>(message.data), message.length) == "hello");
    te_message_release(self.engine, &message);
    CHECK(self.close(target) == TE_OK);
    CHECK(self.close() == TE_OK);
  }
}

TEST_CASE("engine: 100,000 writes leave no operation and no transfer behind") {
  for (const Setup& setup : {Setup{"sim", "reorder=0", 1, {}}, Setup{"sim", "reorder=1", 2, {}}}) {
    CAPTURE(setup.text());
    Pair pair(setup);
    const uint32_t alive = pair.writer.stats().transfers_alive;
    const int writes = scaled(100'000);
    Random random(1);
    for (int i = 0; i < writes; ++i)
      REQUIRE_FALSE(pair.write(0, random.below(1000), random.below(200), i % 2 == 0).refused());
    CHECK(pair.writer.idle());
    CHECK(eventually([&] { return pair.writer.stats().transfers_alive == alive; }));
    CHECK(pair.owner.counted(pair.counter, static_cast<uint64_t>((writes + 1) / 2)));
    const te_stats stats = pair.writer.stats();
    CHECK(stats.failed == 0);
    CHECK(stats.completed == stats.submitted);
    CHECK(pair.writer.peer_info(pair.peer()).operations == 0);
  }
}

}  // namespace te::engine_test
