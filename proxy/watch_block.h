// A block of watched words beside what was seen of them last: a look at all of it when nothing has changed is the price of every round.
//
// Eight words fill a cache line, and a line is compared at once. Words change while they are read. That look is a hint only: of a line that
// differs each word is loaded again, atomically (acquire), and a change that was missed is seen in the next round, since what was
// *seen* is what the second load gave. The plain loads of the first look race with the raises by intent, in the only function that
// the thread sanitizer is told to leave alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace te {

struct Watcher;

class WatchBlock {
 public:
  WatchBlock(std::atomic<uint64_t>* words, uint32_t count) : words_(words), seen_(count / kLine), watchers_(count) {}
  WatchBlock(const WatchBlock&) = delete;

  // From now on a change of the word is told, from `value` on.
  void add(uint32_t index, Watcher* watcher, uint64_t value) {
    watchers_[index] = watcher;
    seen_[index / kLine].words[index % kLine] = value;
    lines_ = std::max(lines_, index / kLine + 1);
    ++watched_;
  }
  void remove(uint32_t index) {
    watchers_[index] = nullptr;
    --watched_;
    while (lines_ > 0 && !line_watched(lines_ - 1)) --lines_;
  }
  bool empty() const { return watched_ == 0; }

  // Calls changed(watcher, value) for each watched word whose value is another one than last time.
  template <typename F>
  void look(F&& changed) {
    for (uint32_t line = 0; line < lines_; ++line) {
      if (!differs(reinterpret_cast<const Line*>(words_ + line * kLine), &seen_[line])) [[likely]]
        continue;
      for (uint32_t i = 0; i < kLine; ++i) {
        const uint64_t value = words_[line * kLine + i].load(std::memory_order_acquire);
        if (value == seen_[line].words[i]) continue;
        seen_[line].words[i] = value;
        if (Watcher* watcher = watchers_[line * kLine + i]; watcher != nullptr) changed(*watcher, value);
      }
    }
  }
  // Whether look would find something.
  bool stale() const {
    for (uint32_t line = 0; line < lines_; ++line)
      if (differs(reinterpret_cast<const Line*>(words_ + line * kLine), &seen_[line])) return true;
    return false;
  }

 private:
  static constexpr uint32_t kLine = 8;
  typedef uint64_t Pair __attribute__((vector_size(16), may_alias));
  struct alignas(64) Line {
    uint64_t words[kLine];
  };

#if defined(__SANITIZE_THREAD__)
  [[gnu::no_sanitize("thread"), gnu::noinline]]
#endif
  static bool differs(const Line* now, const Line* then) {
    const auto* a = reinterpret_cast<const volatile Pair*>(now);
    const auto* b = reinterpret_cast<const Pair*>(then);
    const Pair different = (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]);
    return (different[0] | different[1]) != 0;
  }

  bool line_watched(uint32_t line) const {
    return std::any_of(watchers_.begin() + line * kLine, watchers_.begin() + (line + 1) * kLine,
                       [](const Watcher* watcher) { return watcher != nullptr; });
  }

  std::atomic<uint64_t>* const words_;
  std::vector<Line> seen_;
  std::vector<Watcher*> watchers_;
  uint32_t lines_ = 0;  // that hold watched words, and those before them
  uint32_t watched_ = 0;
};

}  // namespace te
