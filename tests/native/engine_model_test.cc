// A random program of writes, page lists and batches in both directions on a fabric that reorders, delays, refuses and cuts; after
// each round memory equals a model made of plain byte arrays, and every counter has risen by exactly what was sent.
#include <numeric>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

constexpr uint64_t kCells = 256;  // places of kCell bytes in the target; each is written at most once a round
constexpr uint64_t kCell = 128;
constexpr uint64_t kBytes = kCells * kCell;
constexpr int kCounters = 3;

// One direction.
struct Flow {
  Flow(Player& writer, Player& owner, Random& random)
      : writer(writer),
        owner(owner),
        source(writer.memory(kBytes)),
        target(owner.memory(kBytes)),
        model(kBytes, kPoison) {
    source.fill(random);
    remote = writer.remote(owner, target);
    for (int i = 0; i < kCounters; ++i) {
      counters.push_back(owner.counter());
      remote_counters.push_back(writer.remote_counter(owner, counters.back()));
    }
    expected.assign(kCounters, 0);
  }

  // Takes up to `most` neighbouring free cells.
  uint64_t take_cells(Random& random, uint64_t most, uint64_t* begin) {
    *begin = random.below(kCells);
    uint64_t count = 0;
    while (count < most && *begin + count < kCells && !used[*begin + count]) used[*begin + count++] = true;
    return count;
  }

  te_handle choose_counter(Random& random, uint64_t rise) {
    const uint64_t which = random.below(kCounters + 1);
    if (which == kCounters) return TE_NONE;
    expected[which] += rise;
    return remote_counters[which];
  }

  bool make_write(Random& random, te_write_args* args) {
    uint64_t begin = 0;
    const uint64_t cells = take_cells(random, 1 + random.below(60), &begin);
    if (cells == 0) return false;
    const uint64_t shift = random.below(kCell);
    const uint64_t length = random.below(cells * kCell - shift + 1), to = begin * kCell + shift,
                   from = random.below(kBytes - length + 1);
    *args = {
        source.region, remote, choose_counter(random, 1), random.chance(0.2) ? uint32_t{TE_FLAG_FLUSH} : 0, from, to,
        length};
    std::copy_n(source.data() + from, length, model.data() + to);
    return true;
  }

  bool make_pages(Random& random, te_page_args* args) {
    std::vector<int32_t> from, to;
    const uint64_t page_bytes = random.below(kCell + 1);
    for (uint64_t wanted = 1 + random.below(30); wanted > 0; --wanted) {
      uint64_t cell = 0;
      if (take_cells(random, 1, &cell) == 0) continue;
      to.push_back(static_cast<int32_t>(cell));
      from.push_back(static_cast<int32_t>(random.below(kBytes - page_bytes + 1)));
      std::copy_n(source.data() + from.back(), page_bytes, model.data() + cell * kCell);
    }
    if (to.empty()) return false;
    indices.push_back(from);
    indices.push_back(to);
    *args = {source.region,
             remote,
             choose_counter(random, to.size()),
             0,
             0,
             0,
             1,
             kCell,
             page_bytes,
             to.size(),
             indices[indices.size() - 2].data(),
             indices.back().data(),
             4,
             4};
    return true;
  }

  void step(Random& random, std::vector<Transfer>* transfers) {
    te_batch_entry entry{};
    if (random.chance(0.2)) {
      std::vector<te_batch_entry> entries;
      for (uint64_t n = 1 + random.below(5); n > 0; --n) {
        entry.is_pages = random.chance(0.4);
        if (entry.is_pages != 0 ? make_pages(random, &entry.pages) : make_write(random, &entry.write))
          entries.push_back(entry);
      }
      transfers->push_back(writer.batch(entries));
    } else if (random.chance(0.4)) {
      if (make_pages(random, &entry.pages)) transfers->push_back(writer.pages(entry.pages));
    } else if (make_write(random, &entry.write)) {
      const te_write_args& a = entry.write;
      transfers->push_back(
          writer.write(source, a.source_offset, a.remote, a.target_offset, a.length, a.counter, a.flags));
    }
  }

  void check() {
    for (size_t i = 0; i < counters.size(); ++i) {
      const bool counted = owner.counted(counters[i], expected[i]);
      REQUIRE_MESSAGE(counted, "counter ", i, " is at ", owner.value(counters[i]), ", not at ", expected[i]);
    }
    REQUIRE(std::memcmp(model.data(), target.data(), kBytes) == 0);
    CHECK(target.guards_intact());
    std::fill(used.begin(), used.end(), false);
    indices.clear();
  }

  Player& writer;
  Player& owner;
  Memory& source;
  Memory& target;
  std::vector<uint8_t> model;
  std::vector<bool> used = std::vector<bool>(kCells, false);
  std::vector<std::vector<int32_t>> indices;
  te_handle remote = TE_NONE;
  std::vector<te_handle> counters, remote_counters;
  std::vector<uint64_t> expected;
};

std::string random_fabric(Random& random, uint64_t seed) {
  std::string sim = "seed=" + std::to_string(seed);
  sim += random.chance(0.7) ? ",reorder=1" : ",reorder=0";
  sim += ",delay=" + std::to_string(random.below(8));
  sim += ",mtu=" + std::to_string(16 + random.below(300));
  sim += ",max_write=" + std::to_string(100 + random.below(2000));
  sim += ",max_send=" + std::to_string(2600 + random.below(3000));
  sim += ",depth=" + std::to_string(8 + random.below(60));
  if (random.chance(0.5)) sim += ",busy=0.2";
  if (random.chance(0.3)) sim += ",reads=0";
  if (random.chance(0.3)) sim += ",virtual_addresses=0";
  if (random.chance(0.3)) sim += ",wait_fd=0";
  if (random.chance(0.3)) sim += ",require_peer=1";
  if (random.chance(0.3)) sim += ",keys_enforced=0";
  return sim;
}

}  // namespace

TEST_CASE("engine: a random program leaves exactly what the model says, on many fabrics") {
  for (int seed = 1; seed <= scaled(24); ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const std::string sim = random_fabric(random, static_cast<uint64_t>(seed));
    const auto tune = [&](te_settings& s) {
      s.shard_bytes = 1 + random.below(2000);
      s.immediate_window = static_cast<uint32_t>(2 + random.below(60));
      s.assembly_slots = static_cast<uint32_t>(1 + random.below(8));
      s.message_window = static_cast<uint32_t>(4 + random.below(20));
      s.page_immediates = static_cast<uint32_t>(random.below(3));
      s.bursts = static_cast<uint32_t>(1 + random.below(40));
      s.operations = 64;
      if (random.chance(0.3)) s.chunk_bytes = 50 + random.below(500);
      if (random.chance(0.3)) s.peer_depth = static_cast<uint32_t>(1 + random.below(8));
    };
    const auto nics_a = static_cast<uint32_t>(1 + random.below(8)), nics_b = static_cast<uint32_t>(1 + random.below(8));
    CAPTURE(seed);
    CAPTURE(std::string(sim));
    CAPTURE(nics_a);
    CAPTURE(nics_b);
    Player a({"sim", sim, nics_a, tune}), b({"sim", sim, nics_b, tune});
    Flow there(a, b, random), back(b, a, random);
    for (int round = 0; round < 6; ++round) {
      std::vector<Transfer> transfers;
      for (int i = 0; i < 12; ++i) {
        there.step(random, &transfers);
        back.step(random, &transfers);
      }
      for (Transfer& t : transfers) {
        const int32_t status = t.wait();
        REQUIRE_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
      }
      there.check();
      back.check();
    }
    CHECK(a.close() == TE_OK);
    CHECK(b.close() == TE_OK);
  }
}

}  // namespace te::engine_test
