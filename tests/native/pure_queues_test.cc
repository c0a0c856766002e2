// The lock-free ring and free list under many threads: every value exactly once. The intrusive list against a model.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "native/free_list.h"
#include "native/list.h"
#include "native/ring.h"
#include "tests/native/engine_support.h"

namespace te {
namespace {

using engine_test::Random;
using engine_test::scaled;

struct Item {
  int number = 0;
  Link<Item> link;
};

}  // namespace

TEST_CASE("pure: ring: holds as many as it was made for, and gives them back in order") {
  for (const uint32_t capacity : {1u, 2u, 3u, 8u, 1000u}) {
    Ring<uint64_t> ring(capacity);
    const uint64_t rounded = std::bit_ceil(std::max(capacity, 2u));
    uint64_t next_in = 0, next_out = 0;
    for (int lap = 0; lap < 5; ++lap) {
      CHECK(ring.empty());
      while (next_in - next_out <= rounded && ring.push(next_in)) ++next_in;
      CHECK(next_in - next_out == rounded);
      uint64_t value = 0;
      while (ring.pop(&value)) CHECK(value == next_out++);
      CHECK(next_in == next_out);
    }
  }
}

TEST_CASE("pure: ring: many producers, every value exactly once and in order for each of them") {
  constexpr uint32_t kProducers = 8;
  const uint64_t each = static_cast<uint64_t>(scaled(20'000));
  for (const uint32_t capacity : {2u, 64u}) {
    Ring<uint64_t> ring(capacity);
    std::vector<std::thread> producers;
    for (uint64_t p = 0; p < kProducers; ++p)
      producers.emplace_back([&, p] {
        for (uint64_t i = 0; i < each; ++i)
          while (!ring.push(p << 32 | i)) std::this_thread::yield();
      });
    std::vector<uint64_t> next(kProducers, 0);
    uint64_t value = 0, taken = 0, wrong = 0;
    while (taken < kProducers * each) {
      if (!ring.pop(&value)) {
        std::this_thread::yield();
        continue;
      }
      ++taken;
      if (next[value >> 32]++ != (value & 0xFFFFFFFF)) ++wrong;
    }
    for (std::thread& t : producers) t.join();
    CHECK(wrong == 0);
    CHECK_FALSE(ring.pop(&value));
  }
}

TEST_CASE("pure: free list: gives every index once, then none; what is added later is given too") {
  FreeList list(5, 8);
  std::vector<bool> seen(8, false);
  for (int i = 0; i < 5; ++i) {
    const uint32_t index = list.pop();
    REQUIRE(index < 5);
    CHECK_FALSE(seen[index]);
    seen[index] = true;
  }
  CHECK(list.pop() == FreeList::kNone);
  list.push(7);
  CHECK(list.pop() == 7);
  CHECK(list.pop() == FreeList::kNone);
  FreeList none(0, 1);
  CHECK(none.pop() == FreeList::kNone);
}

TEST_CASE("pure: free list: many threads never hold the same index at once, and none is lost") {
  constexpr uint32_t kIndices = 5;
  constexpr int kThreads = 8;
  FreeList list(kIndices, kIndices);
  std::vector<std::atomic<int>> owners(kIndices);
  std::vector<int> plain(kIndices, 0);  // TSan: the hand-over orders it
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < scaled(20'000); ++i) {
        const uint32_t index = list.pop();
        if (index == FreeList::kNone) {
          std::this_thread::yield();
          continue;
        }
        if (owners[index].fetch_add(1) != 0) ++shared;
        ++plain[index];
        owners[index].fetch_sub(1);
        list.push(index);
      }
    });
  for (std::thread& t : threads) t.join();
  CHECK(shared == 0);
  std::vector<bool> seen(kIndices, false);
  for (uint32_t i = 0; i < kIndices; ++i) {
    const uint32_t index = list.pop();
    REQUIRE(index < kIndices);
    CHECK_FALSE(seen[index]);
    seen[index] = true;
  }
  CHECK(list.pop() == FreeList::kNone);
}

TEST_CASE("pure: list: behaves like a deque from whose middle one can leave") {
  Random random(1);
  std::vector<Item> items(20);
  for (int i = 0; i < 20; ++i) items[static_cast<size_t>(i)].number = i;
  List<Item, &Item::link> list;
  std::deque<Item*> model;
  for (int step = 0; step < 20'000; ++step) {
    Item* item = &items[random.below(items.size())];
    switch (random.below(3)) {
      case 0:
        if (!list.contains(item)) {
          list.push_back(item);
          model.push_back(item);
        }
        break;
      case 1:
        list.remove(item);
        std::erase(model, item);
        break;
      default: {
        Item* const front = model.empty() ? nullptr : model.front();
        if (random.chance(0.5)) break;
        REQUIRE(list.pop_front() == front);
        if (front != nullptr) model.pop_front();
      }
    }
    REQUIRE(list.size() == model.size());
    REQUIRE(list.empty() == model.empty());
    Item* at = list.front();
    for (Item* expected : model) {
      REQUIRE(at == expected);
      at = list.next(at);
    }
    REQUIRE(at == nullptr);
  }
}

}  // namespace te
