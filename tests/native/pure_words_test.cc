// Shared words on the host, the block that watches them, and the refusals of what needs a GPU.
#include <cstdlib>
#include <set>

#include "native/gpu/words.h"
#include "proxy/coordination.h"
#include "tests/native/coordination_support.h"

namespace te {
namespace {

using engine_test::Random;
using engine_test::scaled;
using gpu::Word;
using gpu::WordKind;
using gpu::Words;

}  // namespace

TEST_CASE("pure: words: each is given once, zero, and stays where it is") {
  for (const uint32_t size : {1u, 8u}) {
    Words words(WordKind::kHost, -1, size, 20'000);
    std::vector<Word> out;
    std::set<const void*> places;
    for (uint32_t i = 0; i < 20'000; ++i) {
      Word word;
      REQUIRE(words.take(&word).ok());
      CHECK(word.device == 0);
      CHECK(word.kind == WordKind::kHost);
      CHECK(word.host == words.block_of(word) + word.index % words.per_block() * size);
      CHECK(reinterpret_cast<uintptr_t>(word.host) % (8 * size) == 0);
      CHECK(places.insert(word.host).second);
      for (uint32_t k = 0; k < size; ++k) CHECK(word.host[k].exchange(i + 1) == 0);
      out.push_back(word);
    }
    for (uint32_t i = 0; i < out.size(); ++i) CHECK(out[i].host->load() == i + 1);
    Word one;
    while (words.take(&one).ok()) {
    }
    CHECK(words.take(&one).status() == Status::kExhausted);
    words.give_back(out[77]);
    REQUIRE(words.take(&one).ok());
    CHECK(one.host == out[77].host);
    CHECK(one.host->load() == 0);
  }
}

TEST_CASE("pure: words: many threads take and give back") {
  Words words(WordKind::kHost, -1, 8, 4096);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t k = 1; k <= 4; ++k)
    threads.emplace_back([&, k] {
      for (int i = 0; i < scaled(3000); ++i) {
        Word word;
        if (!words.take(&word).ok() || word.host->exchange(k) != 0) ++wrong;
        if (word.host->load() != k) ++wrong;
        words.give_back(word);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("pure: words: many threads that begin at once find room while there is some") {
  for (int round = 0; round < scaled(500); ++round) {
    Words words(WordKind::kHost, -1, 8, 1024);  // one block
    std::atomic<int> refused{0}, ready{0};
    std::vector<std::thread> threads;
    for (int k = 0; k < 4; ++k)
      threads.emplace_back([&] {
        ++ready;
        while (ready.load() < 4) std::this_thread::yield();
        Word word;
        if (!words.take(&word).ok()) ++refused;
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(refused == 0);
  }
}

TEST_CASE("pure: words: without a GPU the reason is told") {
  const gpu::Cuda* cuda = nullptr;
  const Error none = gpu::load_cuda(&cuda);
  if (none.ok()) return;  // there is one: other tests are about that
  for (const WordKind kind : {WordKind::kMapped, WordKind::kGdr, WordKind::kDevice}) {
    Words words(kind, 0, 1, 8);
    Word word;
    const Error error = words.take(&word);
    CHECK(error.status() == Status::kTransportUnavailable);
    CHECK(error.message() == none.message());
    CHECK(word.index == FreeList::kNone);
  }
}

TEST_CASE("pure: words: a library for GDRCopy that is not there is named") {
  const char* before = std::getenv("TE_LIBGDRAPI");
  const std::string kept = before == nullptr ? "" : before;
  setenv("TE_LIBGDRAPI", "/nowhere/libgdrapi.so", 1);
  const gpu::Gdr* gdr = nullptr;
  const Error error = gpu::load_gdr(&gdr);
  CHECK(error.status() == Status::kTransportUnavailable);
  CHECK(error.message().find("TE_LIBGDRAPI is set to /nowhere/libgdrapi.so") != std::string::npos);
  setenv("TE_LIBGDRAPI", "libm.so.6", 1);
  const Error other = gpu::load_gdr(&gdr);
  CHECK(other.message().find("has no gdr_open") != std::string::npos);
  if (before == nullptr) unsetenv("TE_LIBGDRAPI");
  else setenv("TE_LIBGDRAPI", kept.c_str(), 1);
}

TEST_CASE("pure: watch block: tells each change of a watched word once, against a model") {
  constexpr uint32_t kCount = 512;
  alignas(64) static std::atomic<uint64_t> words[kCount];
  for (std::atomic<uint64_t>& word : words) word.store(0);
  std::vector<Watcher> watchers(kCount);
  WatchBlock block(words, kCount);
  std::vector<uint64_t> told(kCount, 0);
  std::vector<bool> watched(kCount, false);
  Random random(3);
  const auto look = [&] {
    std::set<uint32_t> changed;
    block.look([&](Watcher& watcher, uint64_t value) {
      const auto i = static_cast<uint32_t>(&watcher - watchers.data());
      CHECK(watched[i]);
      CHECK(value == words[i].load());
      CHECK(value != told[i]);
      CHECK(changed.insert(i).second);
      told[i] = value;
    });
    for (uint32_t i = 0; i < kCount; ++i)
      if (watched[i]) CHECK(told[i] == words[i].load());
  };
  CHECK(block.empty());
  for (int step = 0; step < scaled(20'000); ++step) {
    const auto i = static_cast<uint32_t>(random.next() % kCount);
    switch (random.next() % 4) {
      case 0:
        if (watched[i]) block.remove(i);
        else block.add(i, &watchers[i], told[i] = words[i].load());
        watched[i] = !watched[i];
        break;
      case 1:
        look();
        CHECK_FALSE(block.stale());
        break;
      default:
        words[i].fetch_add(1);
        if (watched[i]) CHECK(block.stale());
    }
  }
  for (uint32_t i = 0; i < kCount; ++i)
    if (watched[i]) block.remove(i);
  CHECK(block.empty());
  CHECK_FALSE(block.stale());
}

TEST_CASE("pure: binding: rises once for each `every`, whatever the steps, up to the end of numbers") {
  Random random(5);
  for (int round = 0; round < scaled(2000); ++round) {
    Binding binding;
    binding.every = 1 + random.next() % 9;
    binding.next_at = binding.every;
    uint64_t value = 0, risen = 0;
    for (int step = 0; step < 50; ++step) {
      value += random.next() % 20;
      risen += binding.due(value);
      CHECK(risen == value / binding.every);
    }
  }
  Binding binding;
  binding.every = binding.next_at = uint64_t{1} << 63;
  CHECK(binding.due(UINT64_MAX - 1) == 1);
  CHECK(binding.due(UINT64_MAX - 1) == 0);
}

}  // namespace te
