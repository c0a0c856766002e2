// Words: 64-bit words that CPU and GPU share. They live in blocks that never move and go with the object, since a kernel that was left
// behind may still look at them.
//
// Kinds, by who reads them at what cost:
//   host    plain memory; no GPU sees it. The same interface where there is no GPU.
//   mapped  pinned memory of the host, mapped for the device: the CPU reads it in nanoseconds, a GPU over its bus.
//   gdr     memory of the device, mapped for the CPU through libgdrapi: a GPU reads it where it lies, the CPU over its bus (about a
//           microsecond), and the CPU's stores are posted.
//   device  memory of the device that the CPU never touches.
//
// Threads: take, by callers only (it may call the driver), and give_back, which never waits, may run at the same time.
//
// Order of a store that a GPU waits for. What was written before must be seen by whoever sees the new value. In host and mapped memory a
// release store does that: x86 and aarch64 keep it for other observers of coherent memory, too. A gdr mapping is write-combining: its
// stores are kept in a buffer of the core and pass others. So a fence stands before the store (what came before is out) and one behind
// it (the store itself leaves now).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "native/free_list.h"
#include "native/gpu/cuda.h"
#include "native/gpu/gdr.h"
#include "native/status.h"

namespace te::gpu {

enum class WordKind : uint32_t {
  kHost = TE_WORD_HOST,
  kMapped = TE_WORD_MAPPED,
  kGdr = TE_WORD_GDR,
  kDevice = TE_WORD_DEVICE
};
const char* word_kind_name(WordKind kind);

struct Word {
  std::atomic<uint64_t>* host = nullptr;  // null: the CPU cannot reach it
  CuPointer device = 0;                   // 0: no GPU can
  uint32_t index = FreeList::kNone;       // in its Words
  WordKind kind = WordKind::kHost;
};

class Words {
 public:
  static constexpr uint32_t kBlockBytes = 65536;
  static_assert(kBlockBytes == kGpuPageBytes);

  // Items of `words` words each (a power of two), of which the first is given out; at most `most` items. `device` < 0: the host.
  Words(WordKind kind, int device, uint32_t words, uint32_t most);
  ~Words();
  Words(const Words&) = delete;

  // All words of the item are zero. kExhausted when `most` are out or memory is; else what the driver said.
  Error take(Word* out);
  void give_back(const Word& word) { free_.push(word.index); }

  WordKind kind() const { return kind_; }
  // Of an item's block, which has per_block() items: where the CPU finds it.
  std::atomic<uint64_t>* block_of(const Word& word) const { return blocks_[word.index / per_block()].host; }
  uint32_t per_block() const { return kBlockBytes / (8 * words_); }

 private:
  struct Block {
    std::atomic<uint64_t>* host = nullptr;
    CuPointer device = 0;
    // gdr and device
    CuPointer allocated = 0;
    GdrHandle pin;
    bool pinned = false;
    void* mapping = nullptr;
    uint64_t mapped_bytes = 0;
  };

  Error grow();
  Error open_driver();
  Error make_block(Block* out);
  Error make_mapped(Block* out);
  Error make_gdr(Block* out);
  Error make_device(Block* out);
  Error zero(CuPointer at, size_t bytes);
  void release(Block& block);
  Error failed(const char* call, CuResult code) const;

  const WordKind kind_;
  const int device_;
  const uint32_t words_;
  const uint32_t most_;
  std::mutex mutex_;  // growth
  const Cuda* cuda_ = nullptr;
  CuContext context_ = nullptr;
  const Gdr* gdr_ = nullptr;
  GdrContext gdr_context_ = nullptr;
  std::vector<Block> blocks_;  // room for all from the start: entries never move
  std::atomic<uint32_t> made_{0};
  FreeList free_;
};

// Makes what was stored through a mapping of device memory leave the core, and keeps earlier stores before later ones.
inline void fence_stores() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#elif defined(__aarch64__)
  asm volatile("dsb st" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// See above. One thread at a time for each word.
inline void store_word(const Word& word, uint64_t value) {
  if (word.kind == WordKind::kGdr) fence_stores();
  word.host->store(value, std::memory_order_release);
  if (word.kind == WordKind::kGdr) fence_stores();
}

// How long the CPU takes to read it, in nanoseconds: the median of some.
double read_cost_ns(const Word& word);
// By what `reads_faster` goes; tests put another in its place.
inline std::atomic<double (*)(const Word& word)> read_cost{&read_cost_ns};
// Does the CPU read one word at no more cost than another?
inline bool reads_faster(const Word& one, const Word& than) {
  const auto cost = read_cost.load(std::memory_order_relaxed);
  return cost(one) <= cost(than);
}

}  // namespace te::gpu
