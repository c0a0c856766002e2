// Page lists: permutations, strides, offsets, both index widths, long lists and long pages; the counter rises by one per page.
#include <numeric>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

struct Indices {
  Indices(const std::vector<uint64_t>& values, uint32_t width) : width(width), bytes(values.size() * width) {
    for (size_t i = 0; i < values.size(); ++i)
      std::memcpy(bytes.data() + i * width, &values[i], width);  // little-endian
  }
  uint32_t width;
  std::vector<uint8_t> bytes;
};

std::vector<uint64_t> permutation(Random& random, uint64_t count) {
  std::vector<uint64_t> values(count);
  std::iota(values.begin(), values.end(), 0);
  for (uint64_t i = count; i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
  return values;
}

te_page_args page_args(const Pair& pair, const Indices& source, const Indices& target, uint64_t count,
                       uint64_t page_bytes) {
  te_page_args args{};
  args.region = pair.source.region;
  args.remote = pair.remote;
  args.counter = pair.remote_counter;
  args.source_stride = args.target_stride = page_bytes;
  args.page_bytes = page_bytes;
  args.count = count;
  args.source = source.bytes.data();
  args.target = target.bytes.data();
  args.source_index_bytes = source.width;
  args.target_index_bytes = target.width;
  return args;
}

}  // namespace

TEST_CASE("engine: pages go where the indices say and count one each") {
  constexpr size_t kBytes = 1 << 17;
  for (const Setup& setup : all_setups())
    for (const uint32_t how : {TE_PAGES_AUTO, TE_PAGES_EACH, TE_PAGES_LAST}) {
      Setup tuned = setup;
      tuned.tune = [how](te_settings& s) { s.page_immediates = how; };
      CAPTURE(setup.text());
      CAPTURE(how);
      Pair pair(tuned, kBytes);
      Random random(how + 1);
      uint64_t counted = 0;
      for (int round = 0; round < scaled(12); ++round) {
        const uint64_t page_bytes =
            round == 0 ? 0 : 1 + random.below(round % 3 == 0 ? 3000 : 200);  // above max_write too
        const uint64_t source_stride = page_bytes + random.below(50), target_stride = page_bytes + random.below(50);
        const uint64_t source_offset = random.below(100), target_offset = random.below(100);
        const uint64_t widest = std::max(source_stride, target_stride) + 1;
        const uint64_t room = (kBytes - 200 - page_bytes) / widest;
        const uint64_t count = 1 + random.below(std::min<uint64_t>(room, 200));
        const std::vector<uint64_t> from = permutation(random, std::min<uint64_t>(room, 400)),
                                    to = permutation(random, std::min<uint64_t>(room, 400));
        const Indices source(from, random.chance(0.5) ? 4 : 8), target(to, random.chance(0.5) ? 4 : 8);
        te_page_args args = page_args(pair, source, target, count, page_bytes);
        args.source_stride = source_stride;
        args.target_stride = target_stride;
        args.source_offset = source_offset;
        args.target_offset = target_offset;
        args.flags = random.chance(0.2) ? uint32_t{TE_FLAG_FLUSH} : 0;
        Transfer t = pair.writer.pages(args);
        const int32_t status = t.wait();
        REQUIRE_MESSAGE(status == TE_OK, "page_bytes ", page_bytes, " count ", count, ": ", t.message());
        counted += count;
        REQUIRE(pair.owner.counted(pair.counter, counted));
        std::vector<uint8_t> expected(kBytes, kPoison);
        for (uint64_t i = 0; i < count; ++i)
          std::copy_n(pair.source.data() + source_offset + from[i] * source_stride, page_bytes,
                      expected.data() + target_offset + to[i] * target_stride);
        REQUIRE(std::memcmp(expected.data(), pair.target.data(), kBytes) == 0);
        CHECK(pair.target.guards_intact());
        pair.target.poison();
      }
    }
}

TEST_CASE("engine: a list of one page, and of none, behave like any other") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    const Indices one({3}, 8);
    te_page_args args = page_args(pair, one, one, 1, 500);
    require_ok(pair.writer.pages(args));
    CHECK(pair.owner.counted(pair.counter, 1));
    CHECK(pair.target.holds(1500, pair.source.data() + 1500, 500));
    args.count = 0;
    args.source = args.target = nullptr;
    require_ok(pair.writer.pages(args));
    CHECK(pair.owner.value(pair.counter) == 1);
    CHECK(pair.writer.idle());
  }
}

TEST_CASE("engine: 70,000 pages need more than one final immediate and count exactly") {
  constexpr uint64_t kPages = 70'000;
  for (const Setup& setup : {Setup{"sim", "reorder=0", 1, {}}, Setup{"sim", "reorder=1,delay=1", 1, {}}}) {
    CAPTURE(setup.text());
    Setup tuned = setup;
    tuned.tune = [](te_settings& s) { s.page_immediates = TE_PAGES_LAST; };
    Pair pair(tuned, kPages);
    Random random(4);
    const std::vector<uint64_t> from = permutation(random, kPages), to = permutation(random, kPages);
    const Indices source(from, 4), target(to, 8);
    require_ok(pair.writer.pages(page_args(pair, source, target, kPages, 1)));
    CHECK(pair.owner.counted(pair.counter, kPages));
    std::vector<uint8_t> expected(kPages);
    for (uint64_t i = 0; i < kPages; ++i) expected[to[i]] = pair.source.data()[from[i]];
    CHECK(std::memcmp(expected.data(), pair.target.data(), kPages) == 0);
    te_nic_info info{};
    REQUIRE(te_nic_describe(pair.owner.engine, 0, &info, &pair.owner.error) == TE_OK);
    CHECK(info.immediates == 2);
  }
}

TEST_CASE("engine: pages that are counted are in memory, page by page") {
  // The owner watches the counter move; of n counted pages at least n are wholly there.
  constexpr uint64_t kPageBytes = 300, kPages = 200;
  for (const char* sim : {"reorder=1,delay=4,mtu=100,max_write=128", "reorder=0,delay=4,mtu=100,max_write=128",
                          "reorder=1,delay=4,mtu=64"})
    for (const uint32_t nics : {1u, 3u}) {
      CAPTURE(std::string(sim));
      CAPTURE(nics);
      Pair pair({"sim", sim, nics, {}}, kPages * kPageBytes);
      Random random(2);
      const std::vector<uint64_t> order = permutation(random, kPages);
      const Indices indices(order, 4);
      Transfer t = pair.writer.pages(page_args(pair, indices, indices, kPages, kPageBytes));
      uint64_t seen = 0;
      bool honest = true;
      while (seen < kPages) {
        REQUIRE(pair.owner.wait(pair.counter, seen + 1) == TE_OK);
        seen = pair.owner.value(pair.counter);
        REQUIRE(seen <= kPages);
        if (seen < kPages) continue;  // reading memory that is being written to is a race: look at the end only
        for (uint64_t i = 0; i < kPages; ++i)
          honest = honest && pair.landed(i * kPageBytes, i * kPageBytes, kPageBytes);
      }
      CHECK(honest);
      CHECK(t.wait() == TE_OK);
      CHECK(pair.owner.value(pair.counter) == kPages);
    }
}

TEST_CASE("engine: changing the index arrays after the call changes nothing") {
  Pair pair({"sim", "reorder=1,delay=5", 2, {}});
  std::vector<int32_t> from = {0, 1, 2, 3, 4, 5, 6, 7}, to = {7, 6, 5, 4, 3, 2, 1, 0};
  te_page_args args{};
  args.region = pair.source.region;
  args.remote = pair.remote;
  args.counter = pair.remote_counter;
  args.source_stride = args.target_stride = args.page_bytes = 1000;
  args.count = 8;
  args.source = from.data();
  args.target = to.data();
  args.source_index_bytes = args.target_index_bytes = 4;
  Transfer t = pair.writer.pages(args);
  std::fill(from.begin(), from.end(), -1);
  std::fill(to.begin(), to.end(), 1 << 30);
  REQUIRE(t.wait() == TE_OK);
  CHECK(pair.owner.counted(pair.counter, 8));
  for (uint64_t i = 0; i < 8; ++i) CHECK(pair.landed(i * 1000, (7 - i) * 1000, 1000));
}

TEST_CASE("engine: the same page may be sent to many places, and a stride of zero repeats it") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    const Indices zeros(std::vector<uint64_t>(50, 0), 4);
    std::vector<uint64_t> order(50);
    std::iota(order.begin(), order.end(), 0);
    const Indices rising(order, 8);
    te_page_args args = page_args(pair, zeros, rising, 50, 1000);
    require_ok(pair.writer.pages(args));
    args.source = rising.bytes.data();
    args.source_index_bytes = 8;
    args.source_stride = 0;
    require_ok(pair.writer.pages(args));
    CHECK(pair.owner.counted(pair.counter, 100));
    for (uint64_t i = 0; i < 50; ++i) REQUIRE(pair.landed(0, i * 1000, 1000));
  }
}

}  // namespace te::engine_test
