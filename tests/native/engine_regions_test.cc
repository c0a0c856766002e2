// Attach and revoke: closing a region, on either side, against writes under way. Never a silent success, and nothing lands afterwards.
#include <atomic>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

// What the network does with a stale key: refuse it, lose it silently, or let it land.
const char* const kNetworks[] = {"keys_enforced=1", "keys_enforced=0", "stale_keys_land=1"};

uint64_t stat(Player& player, const std::string& name) {
  te_error text{};
  REQUIRE(te_engine_inject(player.engine, "stats", &text) == TE_OK);
  const std::string all = std::string(" ") + text.message;
  const size_t at = all.find(" " + name + "=");
  REQUIRE(at != std::string::npos);
  return std::stoull(all.substr(at + name.size() + 2));
}

bool no_stale_key_used(Player& player) {
  return stat(player, "stale_live") + stat(player, "stale_shadow") + stat(player, "stale_lost") == 0;
}

}  // namespace

TEST_CASE(
    "engine: a write that races the closing of its target lands wholly with success or fails with REGION_CLOSED") {
  constexpr uint64_t kSlot = 2000, kSlots = 32;
  for (const char* network : kNetworks)
    for (const char* order : {"reorder=0", "reorder=1"})
      for (int seed = 1; seed <= scaled(8); ++seed) {
        const std::string sim =
            std::string(network) + "," + order + ",delay=3,mtu=300,max_write=900,seed=" + std::to_string(seed);
        CAPTURE(std::string(sim));
        Pair pair({"sim", sim, static_cast<uint32_t>(1 + seed % 3), {}}, kSlot * kSlots);
        // Warm half of the time: attached already, or attaching while the region closes.
        if (seed % 2 == 0) require_ok(pair.write(0, 0, 1, false));
        pair.target.poison();
        std::vector<Transfer> transfers;
        std::atomic<bool> closed{false};
        std::thread writer([&] {
          for (uint64_t i = 0; i < kSlots; ++i) {
            transfers.push_back(pair.write(i * kSlot, i * kSlot, kSlot, i % 2 == 0));
            if (i > kSlots / 2)
              while (!closed.load() && i > kSlots * 3 / 4) std::this_thread::yield();
          }
        });
        if (seed % 3 == 0) eventually([&] { return pair.owner.value(pair.counter) > 0; }, 20 * kMs);
        const int32_t status = pair.owner.close(pair.target);
        const std::vector<uint8_t> after_close = pair.target.all;
        closed = true;
        writer.join();
        REQUIRE_MESSAGE(status == TE_OK, pair.owner.error.message);
        uint64_t counted = 0;
        for (uint64_t i = 0; i < kSlots; ++i) {
          const int32_t outcome = transfers[i].wait();
          if (outcome == TE_OK) {
            REQUIRE(pair.landed(i * kSlot, i * kSlot, kSlot));
            counted += i % 2 == 0 ? 1 : 0;
          } else {
            REQUIRE_MESSAGE(outcome == TE_ERR_REGION_CLOSED, name_of(outcome), ": ", transfers[i].message());
          }
        }
        CHECK(pair.write(0, 0, kSlot).wait() == TE_ERR_REGION_CLOSED);
        CHECK(pair.owner.counted(pair.counter, counted));
        CHECK(no_stale_key_used(pair.writer));
        CHECK(pair.target.all == after_close);
        CHECK(pair.writer.idle());
      }
}

TEST_CASE("engine: page lists that race the closing of their target count only what landed") {
  for (const char* network : kNetworks)
    for (int seed = 1; seed <= scaled(6); ++seed) {
      const std::string sim =
          std::string(network) + ",delay=3,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : "");
      CAPTURE(std::string(sim));
      constexpr uint64_t kPage = 64, kPages = 500;
      Pair pair({"sim", sim, static_cast<uint32_t>(1 + seed % 2), {}}, kPage * kPages);
      std::vector<int32_t> indices(kPages);
      for (size_t i = 0; i < kPages; ++i) indices[i] = static_cast<int32_t>(i);
      const te_page_args args{pair.source.region,
                              pair.remote,
                              pair.remote_counter,
                              0,
                              0,
                              0,
                              kPage,
                              kPage,
                              kPage,
                              kPages,
                              indices.data(),
                              indices.data(),
                              4,
                              4};
      require_ok(pair.write(0, 0, 1, false));
      pair.target.poison();
      std::vector<Transfer> transfers;
      for (int i = 0; i < 3; ++i) transfers.push_back(pair.writer.pages(args));
      TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
      const std::vector<uint8_t> after_close = pair.target.all;
      uint64_t good = 0;
      for (Transfer& t : transfers) {
        const int32_t status = t.wait();
        REQUIRE_MESSAGE((status == TE_OK || status == TE_ERR_REGION_CLOSED), name_of(status), ": ", t.message());
        CHECK(t.wait_quiesced());
        good += status == TE_OK ? 1 : 0;
      }
      REQUIRE(pair.owner.wait(pair.counter, good * kPages) == TE_OK);
      CHECK(pair.owner.value(pair.counter) <= transfers.size() * kPages);
      if (good > 0) CHECK(std::memcmp(pair.source.data(), pair.target.data(), kPage * kPages) == 0);
      CHECK(pair.target.all == after_close);
      CHECK(no_stale_key_used(pair.writer));
    }
}

TEST_CASE("engine: over tcp and shm too nothing lands once te_region_close has returned") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    for (int round = 0; round < scaled(4); ++round) {
      constexpr uint64_t kSlot = 3000, kSlots = 20;
      Pair pair(setup, kSlot * kSlots);
      require_ok(pair.write(0, 0, 1, false));
      pair.target.poison();
      std::vector<Transfer> transfers;
      for (uint64_t i = 0; i < kSlots; ++i) transfers.push_back(pair.write(i * kSlot, i * kSlot, kSlot, false));
      TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
      const std::vector<uint8_t> after_close = pair.target.all;
      for (uint64_t i = 0; i < kSlots; ++i) {
        const int32_t status = transfers[i].wait();
        CHECK((status == TE_OK || status == TE_ERR_REGION_CLOSED));
        if (status == TE_OK) CHECK(pair.landed(i * kSlot, i * kSlot, kSlot));
      }
      CHECK(pair.write(0, 0, 10).wait() == TE_ERR_REGION_CLOSED);
      CHECK(pair.target.all == after_close);
    }
  }
}

TEST_CASE("engine: closing a source waits for the writes that read it and refuses later ones") {
  for (const char* order : {"reorder=0,delay=5", "reorder=1,delay=5"}) {
    CAPTURE(std::string(order));
    Pair pair({"sim", std::string(order) + ",max_write=500", 2, {}});
    const std::vector<uint8_t> before(pair.source.data(), pair.source.data() + 64'000);
    std::vector<Transfer> transfers;
    for (uint64_t i = 0; i < 32; ++i) transfers.push_back(pair.write(i * 2000, i * 2000, 2000));
    TE_CHECK_STATUS(pair.writer.close(pair.source), TE_OK, pair.writer.error);
    pair.source.poison();  // nobody reads it any more
    for (Transfer& t : transfers) CHECK(t.wait() == TE_OK);
    CHECK(pair.owner.counted(pair.counter, 32));
    CHECK(std::memcmp(pair.target.data(), before.data(), before.size()) == 0);
    CHECK(pair.write(0, 0, 10).wait() == TE_ERR_REGION_CLOSED);
    pair.writer.open(pair.source);
    require_ok(pair.write(0, 0, 10));
    CHECK(pair.owner.counted(pair.counter, 33));
  }
}

TEST_CASE("engine: threads that submit while their source closes are refused or served, never caught in between") {
  for (int round = 0; round < scaled(10); ++round) {
    Pair pair({"sim", "reorder=1,delay=1,seed=" + std::to_string(round + 1), 2, {}});
    require_ok(pair.write(0, 0, 1, false));
    std::atomic<int> good{0}, refused{0}, other{0};
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        while (!stop.load()) {
          Transfer transfer = pair.write(0, 0, 3000);
          const int32_t status = transfer.wait();
          if (status != TE_OK && status != TE_ERR_REGION_CLOSED) ++other;
          (status == TE_OK ? good : refused)++;
          if (status != TE_OK) return;
        }
      });
    eventually([&] { return good > 5; });
    CHECK(pair.writer.close(pair.source) == TE_OK);
    for (std::thread& t : threads) t.join();
    CHECK(other == 0);
    CHECK(refused == 4);
    CHECK(pair.owner.counted(pair.counter, static_cast<uint64_t>(good.load())));
  }
}

TEST_CASE("engine: closing a region whose holder does not answer times out, keeps it refused, and succeeds later") {
  for (const char* network : kNetworks) {
    CAPTURE(std::string(network));
    Pair pair({"sim", network, 2, {}});
    require_ok(pair.write(0, 0, 5000));
    pair.writer.inject("pause");
    Transfer stuck = pair.write(0, 0, 5000);
    CHECK(pair.owner.close(pair.target, 50 * kMs) == TE_ERR_TIMEOUT);
    te_region_descriptor d;
    CHECK(te_region_describe(pair.owner.engine, pair.target.region, &d, &pair.owner.error) == TE_ERR_REGION_CLOSED);
    CHECK(pair.owner.close(pair.target, 0) == TE_ERR_TIMEOUT);
    CHECK(pair.owner.stats().regions == 1);
    pair.writer.inject("resume");
    TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
    CHECK(pair.owner.stats().regions == 0);
    const int32_t status = stuck.wait();
    CHECK((status == TE_OK || status == TE_ERR_REGION_CLOSED));
    CHECK(pair.write(0, 0, 10).wait() == TE_ERR_REGION_CLOSED);
  }
}

TEST_CASE("engine: closing a region whose holder died ends once its loss is noticed and nothing can land any more") {
  for (const char* network : kNetworks) {
    CAPTURE(std::string(network));
    Setup setup{"sim", network, 2, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }};
    Pair pair(setup);
    require_ok(pair.write(0, 0, 5000));
    pair.writer.inject("kill");
    TE_CHECK_STATUS(pair.owner.close(pair.target), TE_OK, pair.owner.error);
    CHECK(te_counter_close(pair.owner.engine, pair.counter, kPatience, &pair.owner.error) == TE_OK);
  }
}

TEST_CASE("engine: memory registered again is a new region: old handles stay refused, new ones work") {
  for (const char* network : kNetworks) {
    CAPTURE(std::string(network));
    Pair pair({"sim", network, 2, {}});
    for (int round = 0; round < 5; ++round) {
      const te_region_descriptor old = pair.owner.describe(pair.target);
      require_ok(pair.write(0, 0, 5000));
      REQUIRE(pair.owner.close(pair.target) == TE_OK);
      pair.target.poison();
      pair.owner.open(pair.target);
      CHECK(pair.write(0, 0, 5000).wait() == TE_ERR_REGION_CLOSED);  // the old handle
      const te_handle from_old = pair.writer.remote(old);            // the old descriptor once more
      CHECK(pair.writer.write(pair.source, 0, from_old, 0, 5000).wait() == TE_ERR_REGION_CLOSED);
      CHECK(pair.target.poisoned(0, pair.target.size));
      CHECK(pair.owner.describe(pair.target).serial != old.serial);
      pair.remote = pair.writer.remote(pair.owner, pair.target);
      require_ok(pair.write(0, 0, 5000));
      CHECK(pair.target.holds(0, pair.source.data(), 5000));
      CHECK(no_stale_key_used(pair.writer));
    }
  }
}

TEST_CASE("engine: the same descriptor gives the same handle, and closing is idempotent") {
  Pair pair({"sim", "", 1, {}});
  CHECK(pair.writer.remote(pair.owner, pair.target) == pair.remote);
  CHECK(pair.writer.remote_counter(pair.owner, pair.counter) == pair.remote_counter);
  CHECK(pair.owner.close(pair.target) == TE_OK);
  CHECK(pair.owner.close(pair.target) == TE_OK);
  CHECK(te_region_close(pair.owner.engine, 12345, kPatience, &pair.owner.error) == TE_OK);
}

TEST_CASE("engine: several holders, the owner itself among them, are all revoked") {
  Setup setup{"sim", "reorder=1,delay=2", 2, {}};
  Player owner(setup);
  Memory& target = owner.memory(8192);
  std::vector<std::unique_ptr<Player>> writers;
  std::vector<te_handle> remotes;
  for (int i = 0; i < 4; ++i) {
    writers.push_back(std::make_unique<Player>(setup));
    Memory& source = writers.back()->memory(8192);
    remotes.push_back(writers.back()->remote(owner, target));
    require_ok(writers.back()->write(source, 0, remotes.back(), 0, 4000));
  }
  const te_handle own = owner.remote(owner, target);
  Memory& own_source = owner.memory(8192);
  require_ok(owner.write(own_source, 0, own, 0, 4000));
  std::vector<Transfer> transfers;
  for (int i = 0; i < 20; ++i)
    for (size_t w = 0; w < writers.size(); ++w)
      transfers.push_back(writers[w]->write(*writers[w]->memories[0], 0, remotes[w], 0, 4000));
  TE_CHECK_STATUS(owner.close(target), TE_OK, owner.error);
  const std::vector<uint8_t> after = target.all;
  for (Transfer& t : transfers) {
    const int32_t status = t.wait();
    CHECK((status == TE_OK || status == TE_ERR_REGION_CLOSED));
  }
  for (size_t w = 0; w < writers.size(); ++w)
    CHECK(writers[w]->write(*writers[w]->memories[0], 0, remotes[w], 0, 10).wait() == TE_ERR_REGION_CLOSED);
  CHECK(owner.write(own_source, 0, own, 0, 10).wait() == TE_ERR_REGION_CLOSED);
  CHECK(target.all == after);
}

TEST_CASE("engine: regions attached, written, closed and registered again thousands of times do not run out") {
  Pair pair({"sim", "reorder=0", 1, [](te_settings& s) { s.max_regions = 8; }}, 4096);
  for (int i = 0; i < scaled(1500); ++i) {
    require_ok(pair.write(0, 0, 10));
    REQUIRE(pair.owner.close(pair.target) == TE_OK);
    pair.owner.open(pair.target);
    pair.remote = pair.writer.remote(pair.owner, pair.target);
  }
  CHECK(pair.owner.stats().regions == 1);
  CHECK(eventually([&] { return pair.writer.stats().remote_regions <= 2; }));
}

TEST_CASE("engine: a descriptor that claims more than the region has is never granted") {
  Pair pair({"sim", "", 1, {}}, 4096);
  te_region_descriptor forged = pair.owner.describe(pair.target);
  forged.length += 4096;
  const te_handle remote = pair.writer.remote(forged);
  Transfer t = pair.writer.write(pair.source, 0, remote, 4096, 100);
  CHECK(t.wait() < 0);
  CHECK(pair.target.guards_intact());
  te_region_descriptor unknown = pair.owner.describe(pair.target);
  unknown.serial += 1000;
  CHECK(pair.writer.write(pair.source, 0, pair.writer.remote(unknown), 0, 100).wait() == TE_ERR_REGION_CLOSED);
  CHECK(pair.owner.idle());
}

}  // namespace te::engine_test
