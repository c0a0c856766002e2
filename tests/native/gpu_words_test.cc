// Words of every kind over the stand-ins: where they lie, who sees them, what is left when something fails.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <vector>

#include "native/gpu/words.h"
#include "tests/native/gdr_support.h"

namespace te::test {
namespace {

using namespace te::gpu;

constexpr uint64_t kPage = kGpuPageBytes;
constexpr const char* kPlaces[] = {"", "offset=512", "offset=4096", "offset=65024"};  // of allocations in their pages
constexpr WordKind kAll[] = {WordKind::kHost, WordKind::kMapped, WordKind::kGdr, WordKind::kDevice};
constexpr WordKind kOfDevices[] = {WordKind::kMapped, WordKind::kGdr, WordKind::kDevice};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

int device_of_kind(WordKind kind, int device = 0) { return kind == WordKind::kHost ? -1 : device; }

Word take(Words& words) {
  Word word;
  const Error error = words.take(&word);
  REQUIRE_MESSAGE(error.ok(), error.message());
  return word;
}

std::vector<Word> take(Words& words, uint32_t count) {
  std::vector<Word> all;
  for (uint32_t i = 0; i < count; ++i) all.push_back(take(words));
  return all;
}

// The item's words at an index, from whichever side reaches them, and not through a mapping where there is memory of a device.
uint64_t get(const GpuStandins& gpus, const Word& word, uint32_t at = 0) {
  if (word.kind == WordKind::kHost) return word.host[at].load();
  return gpus.seen(word.device + 8 * at);
}
void put(const GpuStandins& gpus, const Word& word, uint64_t value, uint32_t at = 0) {
  if (word.host != nullptr) word.host[at].store(value);
  else REQUIRE(gpus.standin.write(word.device + 8 * at, &value, sizeof value));
}

}  // namespace

TEST_CASE("words: what is pinned is one whole GPU page inside the allocation, wherever that begins") {
  for (const char* place : kPlaces) {
    CAPTURE(place);
    GpuStandins gpus(place);
    const CudaContext context(*gpus.cuda, 1);
    Words words(WordKind::kGdr, 1, 1, 4 * Words::kBlockBytes / 8);
    const uint64_t pins = gpus.gdr.statistic("pins");
    for (uint64_t block = 0; block < 4; ++block) {
      const std::vector<Word> all = take(words, words.per_block());
      CHECK(gpus.gdr.statistic("pins") == pins + block + 1);
      const auto first = std::min_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.device < b.device; });
      const auto last = std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.device < b.device; });
      CHECK(first->device % kPage == 0);
      CHECK(last->device == first->device + kPage - 8);
      CuPointer base = 0;
      size_t bytes = 0;
      REQUIRE(gpus.cuda->address_range(&base, &bytes, first->device) == result::kSuccess);
      CHECK(first->device >= base);
      CHECK(first->device - base < kPage);
      CHECK(first->device + kPage <= base + bytes);
    }
  }
}

TEST_CASE("words: the CPU's stores through a gdr window are the device's bytes, and the other way round") {
  for (const char* place : kPlaces) {
    CAPTURE(place);
    GpuStandins gpus(place);
    Words words(WordKind::kGdr, 0, 1, 3 * Words::kBlockBytes / 8);
    const std::vector<Word> all = take(words, 2 * words.per_block() + 10);
    for (size_t i = 0; i < all.size(); ++i) store_word(all[i], 0xABCD'0000'0000'0000u + i);
    for (size_t i = 0; i < all.size(); ++i) {
      uint64_t value = 0;
      REQUIRE(gpus.standin.read(all[i].device, &value, sizeof value));
      REQUIRE(value == 0xABCD'0000'0000'0000u + i);
      value = ~value;
      REQUIRE(gpus.standin.write(all[i].device, &value, sizeof value));
      REQUIRE(all[i].host->load() == value);
    }
  }
}

TEST_CASE("words: mapped ones are the same bytes at both pointers") {
  GpuStandins gpus;
  const CudaContext context(*gpus.cuda);
  Words words(WordKind::kMapped, 0, 8, 2000);
  for (const Word& word : take(words, 2000)) {
    CuPointer device = 0;
    REQUIRE(gpus.cuda->host_device_pointer(&device, word.host, 0) == result::kSuccess);
    REQUIRE(word.device == device);
    store_word(word, word.index + 1);
    REQUIRE(gpus.seen(word.device) == word.index + 1);
    gpus.raise(word.device, 5);
    REQUIRE(word.host->load() == word.index + 6);
  }
}

TEST_CASE("words: device ones are out of the CPU's reach, those of the host out of a device's") {
  GpuStandins gpus;
  Words device(WordKind::kDevice, 0, 1, 8), host(WordKind::kHost, -1, 1, 8);
  CHECK(take(device).host == nullptr);
  CHECK(take(device).device != 0);
  CHECK(take(host).device == 0);
  CHECK(take(host).host != nullptr);
}

TEST_CASE("words: as many are given out as were promised, all of them apart, over several blocks") {
  for (const WordKind kind : kAll) {
    CAPTURE(word_kind_name(kind));
    GpuStandins gpus("offset=512");
    constexpr uint32_t kWords = 8, kMost = 2 * Words::kBlockBytes / (8 * kWords) + 77;
    Words words(kind, device_of_kind(kind), kWords, kMost);
    std::vector<Word> all = take(words, kMost);
    std::set<uint64_t> places;
    for (const Word& word : all) {
      CHECK(word.kind == kind);
      const uint64_t at = kind == WordKind::kDevice ? word.device : reinterpret_cast<uint64_t>(word.host);
      REQUIRE(at % (8 * kWords) == 0);
      REQUIRE(places.insert(at).second);
      if (word.host == nullptr) continue;
      const auto offset = word.host - words.block_of(word);
      REQUIRE(offset == word.index % words.per_block() * kWords);
    }
    for (int i = 0; i < 2; ++i) {
      Word more;
      const Error error = words.take(&more);
      CHECK(error.status() == Status::kExhausted);
      CHECK(contains(error.message(), "all " + std::to_string(kMost) + " words"));
      CHECK(more.index == FreeList::kNone);
    }
    words.give_back(all[17]);
    CHECK(take(words).index == all[17].index);
  }
}

TEST_CASE("words: what is taken is zero, all of the item, also when it had served before") {
  for (const WordKind kind : kAll)
    for (const uint32_t each : {1u, 2u, 8u}) {
      CAPTURE(word_kind_name(kind));
      CAPTURE(each);
      GpuStandins gpus("offset=512");
      Words words(kind, device_of_kind(kind, 1), each, 40);
      for (int turn = 0; turn < 3; ++turn) {
        const std::vector<Word> all = take(words, 40);
        for (const Word& word : all)
          for (uint32_t i = 0; i < each; ++i) {
            REQUIRE(get(gpus, word, i) == 0);
            put(gpus, word, ~uint64_t{0}, i);
          }
        for (const Word& word : all) words.give_back(word);
      }
    }
}

TEST_CASE("words: others of the block keep their values when one is taken again") {
  for (const WordKind kind : kAll) {
    CAPTURE(word_kind_name(kind));
    GpuStandins gpus;
    Words words(kind, device_of_kind(kind), 1, 3);
    const std::vector<Word> all = take(words, 3);
    for (const Word& word : all) put(gpus, word, 7);
    words.give_back(all[1]);
    CHECK(get(gpus, take(words)) == 0);
    CHECK(get(gpus, all[0]) == 7);
    CHECK(get(gpus, all[2]) == 7);
  }
}

TEST_CASE("words: nothing is there before the first, and nothing stays after the last") {
  for (const WordKind kind : kOfDevices) {
    CAPTURE(word_kind_name(kind));
    GpuStandins gpus("offset=512");
    const auto count = [&](const char* name) { return gpus.standin.statistic(name); };
    const uint64_t allocations = count("allocations"), host = count("host_allocations");
    {
      Words words(kind, 0, 8, 3000);
      CHECK(count("allocations") + count("host_allocations") == allocations + host);
      take(words, 3000);
      CHECK(count("allocations") == allocations + (kind == WordKind::kMapped ? 0 : 3));
      CHECK(count("host_allocations") == host + (kind == WordKind::kMapped ? 3 : 0));
      CHECK(gpus.gdr.statistic("mapped") == (kind == WordKind::kGdr ? 3 : 0));
      CHECK(gpus.gdr.statistic("opened") == (kind == WordKind::kGdr ? 1 : 0));
      CHECK(count("streams") == 0);
    }
    CHECK(count("allocations") == allocations);
    CHECK(count("host_allocations") == host);
    CHECK(gpus.gdr.statistic("pinned") == 0);
    CHECK(gpus.gdr.statistic("opened") == 0);
  }
}

TEST_CASE("words: a call that fails is told with the driver's reason, leaves nothing behind, and may work next time") {
  const struct {
    WordKind kind;
    const char *cuda, *gdr, *says;
    int64_t code;
  } cases[] = {
      {WordKind::kMapped, "host_alloc_fail=1", "", "cuMemHostAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY", 2},
      {WordKind::kDevice, "memory=1000", "", "cuMemAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY", 2},
      {WordKind::kGdr, "memory=65536", "", "cuMemAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY", 2},
      {WordKind::kGdr, "", "pin=12", "gdr_pin_buffer of 64 KiB on cuda:0: Cannot allocate memory: the GPU's BAR",
       ENOMEM},
      {WordKind::kGdr, "", "pin=22", "gdr_pin_buffer of 64 KiB on cuda:0: Invalid argument", EINVAL},
      {WordKind::kGdr, "", "map=11", "gdr_map on cuda:0: Resource temporarily unavailable", EAGAIN},
      {WordKind::kGdr, "", "open=13", "permission denied for /dev/gdrdrv", 0},
      {WordKind::kGdr, "", "version=1.3", "is GDRCopy 1.3", 0},
  };
  for (const auto& each : cases)
    for (const bool grown : {false, true}) {  // the first block, or the second
      const bool at_opening = each.code == 0;
      if (grown && at_opening) continue;
      CAPTURE(each.says);
      CAPTURE(grown);
      GpuStandins gpus;
      Words words(each.kind, 0, 8, 2048);
      std::vector<Word> before;
      if (grown) before = take(words, words.per_block());
      for (const Word& word : before) put(gpus, word, word.index + 1);
      const auto left = [&] {
        return gpus.standin.statistic("allocations") + gpus.standin.statistic("host_allocations") +
               gpus.standin.statistic("streams") + gpus.gdr.statistic("pinned") + gpus.gdr.statistic("mapped");
      };
      const uint64_t there = left();
      gpus.standin.configure(each.cuda);
      gpus.gdr.configure(each.gdr);
      for (int i = 0; i < 3; ++i) {
        Word word;
        const Error error = words.take(&word);
        CAPTURE(error.message());
        CHECK(error.status() ==
              (each.code == result::kOutOfMemory ? Status::kExhausted : Status::kTransportUnavailable));
        CHECK(contains(error.message(), each.says));
        CHECK(error.provider_status() == each.code);
        CHECK(word.index == FreeList::kNone);
        CHECK(left() == there);
      }
      for (const Word& word : before) REQUIRE(get(gpus, word) == word.index + 1);
      gpus.standin.configure("");
      gpus.gdr.configure("");
      take(words, words.per_block());
    }
}

TEST_CASE("words: a device that is not there is a mistake of the settings") {
  GpuStandins gpus;
  for (const WordKind kind : kOfDevices) {
    Words words(kind, 7, 1, 8);
    Word word;
    const Error error = words.take(&word);
    CHECK(error.status() == Status::kConfig);
    CHECK(contains(error.message(), "there is no device cuda:7"));
  }
}

TEST_CASE("words: threads take and give back at once, and no word has two owners") {
  for (const WordKind kind : kAll) {
    CAPTURE(word_kind_name(kind));
    GpuStandins gpus("offset=512");
    constexpr uint32_t kThreads = 4, kHeld = 700;
    const int rounds = kind == WordKind::kDevice ? 1 : 5;  // each of its words is zeroed by the driver
    Words words(kind, device_of_kind(kind), 8, kThreads * kHeld);
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (uint64_t me = 1; me <= kThreads; ++me)
      threads.emplace_back([&, me] {
        for (int round = 0; round < rounds; ++round) {
          std::vector<Word> mine(kHeld);
          for (Word& word : mine) {
            if (!words.take(&word).ok()) wrong.fetch_add(1);
            else if (word.host != nullptr && word.host->exchange(me) != 0) wrong.fetch_add(1);
          }
          for (const Word& word : mine) {
            if (word.host != nullptr && word.host->load() != me) wrong.fetch_add(1);
            words.give_back(word);
          }
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("words: which of two is read faster goes by their cost, and by the first where that is the same") {
  GpuStandins gpus;
  Words mapped(WordKind::kMapped, 0, 1, 8), gdr(WordKind::kGdr, 0, 1, 8);
  const Word near = take(mapped), far = take(gdr);
  CHECK(read_cost_ns(near) >= 0);
  CHECK(read_cost_ns(far) >= 0);
  for (const auto& [of_mapped, of_gdr] : {std::pair{10.0, 900.0}, {900.0, 10.0}, {10.0, 10.0}}) {
    const ReadCosts costs(of_mapped, of_gdr);
    CHECK(reads_faster(far, near) == (of_gdr <= of_mapped));
    CHECK(reads_faster(near, far) == (of_mapped <= of_gdr));
  }
}

}  // namespace te::test
