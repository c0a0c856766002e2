// A block of watched words beside what was seen of them last: a look at all of it when nothing has changed is the price of every round.
//
// Eight words fill a cache line, and lines are compared as a whole. Words change while they are read. That look is a hint only: of a
// line that differs each word is loaded again, atomically (acquire), and a change that was missed is seen in the next round, since
// what was *seen* is what the second load gave.
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
    for (uint32_t line = changed_line(words_, seen_.data(), 0, lines_); line < lines_;
         line = changed_line(words_, seen_.data(), line + 1, lines_)) {
      for (uint32_t i = 0; i < kLine; ++i) {
        const uint64_t value = words_[line * kLine + i].load(std::memory_order_acquire);
        if (value == seen_[line].words[i]) continue;
        seen_[line].words[i] = value;
        if (Watcher* watcher = watchers_[line * kLine + i]; watcher != nullptr) changed(*watcher, value);
      }
    }
  }
  // Whether look would find something.
  bool stale() const { return changed_line(words_, seen_.data(), 0, lines_) < lines_; }

 private:
  static constexpr uint32_t kLine = 8;
  struct alignas(64) Line {
    uint64_t words[kLine];
  };

  // The first of lines [from, end) whose words are others than those seen; `end` when there is none.
  static uint32_t changed_line(const std::atomic<uint64_t>* words, const Line* seen, uint32_t from, uint32_t end);

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
