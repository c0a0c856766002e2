// Registered memory for control messages, and the bookkeeping of work requests. Worker thread only. Both pools grow in
// chunks when peers join (or when a lost peer keeps what it held); in steady state nothing is allocated.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <vector>

#include "native/provider.h"

namespace te {

struct Operation;
struct Peer;
struct RemoteRegion;
struct Buffer;
struct Piece;

enum class WorkKind : uint8_t { kWrite, kFlush, kMessage, kControl, kReceive };

// One work request in flight. The provider owns the first 64 bytes while it is.
struct WorkItem : WorkContext {
  WorkItem* next_free = nullptr;
  Operation* operation = nullptr;  // kWrite, kFlush, kMessage
  Peer* peer = nullptr;
  Buffer* buffer = nullptr;  // kMessage, kControl, kReceive
  Piece* piece = nullptr;    // kWrite: of a staged transfer
  uint64_t length = 0;
  WorkKind kind = WorkKind::kWrite;
  uint8_t nic = 0;
  uint8_t part = 0;
  bool with_immediate = false;
  bool slot_part = false;
  bool sequenced = false;
  uint32_t session = 0;  // of the peer when it was posted
};

class WorkItems {
 public:
  WorkItem* take() {
    if (free_ == nullptr) grow();
    WorkItem* item = free_;
    free_ = item->next_free;
    return item;
  }
  void give_back(WorkItem* item) {
    item->operation = nullptr;
    item->buffer = nullptr;
    item->piece = nullptr;
    item->with_immediate = item->slot_part = item->sequenced = false;
    item->next_free = free_;
    free_ = item;
  }

 private:
  void grow() {
    constexpr size_t kChunk = 256;
    chunks_.emplace_back(new WorkItem[kChunk]);
    for (size_t i = 0; i < kChunk; ++i) give_back(&chunks_.back()[i]);
  }
  std::vector<std::unique_ptr<WorkItem[]>> chunks_;
  WorkItem* free_ = nullptr;
};

// A fixed-size piece of memory that one NIC may send from and receive into.
struct Buffer {
  Buffer* next_free = nullptr;
  uint8_t* data = nullptr;
  uint64_t local_key = 0;
  uint32_t length = 0;  // of what was received
};

class Buffers {
 public:
  Buffers(Provider* provider, uint32_t nic, uint32_t bytes)
      : provider_(provider), nic_(nic), bytes_((bytes + 63) & ~63u) {}
  ~Buffers() {
    for (Chunk& chunk : chunks_) munmap(chunk.memory, chunk.length);
  }
  void deregister() {
    for (Chunk& chunk : chunks_) static_cast<void>(provider_->deregister_memory(nic_, chunk.key).ok());
  }
  Buffers(const Buffers&) = delete;

  // Null only when memory or registration failed.
  Buffer* take() {
    if (free_ == nullptr && grow(64)) return nullptr;
    Buffer* buffer = free_;
    free_ = buffer->next_free;
    return buffer;
  }
  void give_back(Buffer* buffer) {
    buffer->next_free = free_;
    free_ = buffer;
  }
  uint32_t bytes() const { return bytes_; }

  Error grow(uint32_t count) {
    Chunk chunk;
    chunk.length = uint64_t{bytes_} * count;
    chunk.memory = mmap(nullptr, chunk.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (chunk.memory == MAP_FAILED) return Error(Status::kRegistration, "no memory for control messages");
    if (Error e = provider_->register_memory(nic_, {chunk.memory, chunk.length, TE_DEVICE_HOST, 0}, &chunk.key)) {
      munmap(chunk.memory, chunk.length);
      return e;
    }
    chunk.buffers.reset(new Buffer[count]);
    for (uint32_t i = 0; i < count; ++i) {
      chunk.buffers[i].data = static_cast<uint8_t*>(chunk.memory) + uint64_t{bytes_} * i;
      chunk.buffers[i].local_key = chunk.key.local_key;
      give_back(&chunk.buffers[i]);
    }
    chunks_.push_back(std::move(chunk));
    return {};
  }

 private:
  struct Chunk {
    void* memory = nullptr;
    uint64_t length = 0;
    MemoryKey key;
    std::unique_ptr<Buffer[]> buffers;
  };
  Provider* provider_;
  uint32_t nic_;
  uint32_t bytes_;
  std::vector<Chunk> chunks_;
  Buffer* free_ = nullptr;
};

}  // namespace te
