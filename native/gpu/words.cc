#include "native/gpu/words.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "native/system.h"

namespace te::gpu {
namespace {

uint32_t blocks_for(uint32_t most, uint32_t words) {
  const uint64_t bytes = uint64_t{most} * words * 8;
  return static_cast<uint32_t>((bytes + Words::kBlockBytes - 1) / Words::kBlockBytes);
}

}  // namespace

const char* word_kind_name(WordKind kind) {
  switch (kind) {
    case WordKind::kHost:
      return "host";
    case WordKind::kMapped:
      return "mapped";
    case WordKind::kGdr:
      return "gdr";
    case WordKind::kDevice:
      return "device";
  }
  return "unknown";
}

Words::Words(WordKind kind, int device, uint32_t words, uint32_t most)
    : kind_(kind),
      device_(device),
      words_(words),
      most_(most),
      blocks_(blocks_for(most, words)),
      free_(0, static_cast<uint32_t>(blocks_.size()) * per_block()) {}

Words::~Words() {
  for (uint32_t i = 0; i < made_.load(std::memory_order_relaxed); ++i) release(blocks_[i]);
  if (gdr_context_ != nullptr) static_cast<void>(gdr_->close(gdr_context_));
}

Error Words::take(Word* out) {
  uint32_t index = free_.pop();
  if (index == FreeList::kNone) {
    const std::lock_guard lock(mutex_);
    while ((index = free_.pop()) == FreeList::kNone)  // else another thread has made room meanwhile
      if (Error e = grow()) return e;
  }
  const Block& block = blocks_[index / per_block()];
  const uint32_t at = index % per_block() * words_;
  const Word word{block.host == nullptr ? nullptr : block.host + at, block.device == 0 ? 0 : block.device + 8u * at,
                  index, kind_};
  if (word.host == nullptr) {
    if (Error e = zero(word.device, 8u * words_)) {
      free_.push(index);
      return e;
    }
  } else {
    for (uint32_t i = 0; i < words_; ++i) word.host[i].store(0, std::memory_order_relaxed);
    if (kind_ == WordKind::kGdr) fence_stores();
  }
  *out = word;
  return {};
}

// With the mutex.
Error Words::grow() {
  const uint32_t made = made_.load(std::memory_order_relaxed);
  if (made == blocks_.size())
    return Error(Status::kExhausted, format("all %u words of this kind are in use; close some first", most_));
  if (Error e = open_driver()) return e;
  Block block;
  if (Error e = make_block(&block)) {
    release(block);
    return e;
  }
  blocks_[made] = block;
  made_.store(made + 1, std::memory_order_relaxed);
  const uint32_t first = made * per_block();
  for (uint32_t i = std::min(first + per_block(), most_); i > first; --i)
    free_.push(i - 1);  // the lowest first: few lines
  return {};
}

Error Words::failed(const char* call, CuResult code) const {
  const Status status = code == result::kOutOfMemory ? Status::kExhausted : Status::kTransportUnavailable;
  return Error(status, format("%s on cuda:%d: %s", call, device_, cuda_->describe(code).c_str()), code);
}

Error Words::open_driver() {
  if (kind_ == WordKind::kHost || context_ != nullptr) return {};
  if (Error e = load_cuda(&cuda_)) return e;
  if (kind_ == WordKind::kGdr && gdr_context_ == nullptr) {
    if (Error e = load_gdr(&gdr_)) return e;
    if (Error e = open_gdr(*gdr_, &gdr_context_)) return e;
  }
  return primary_context(*cuda_, device_, &context_);
}

Error Words::make_block(Block* out) {
  if (kind_ == WordKind::kHost) {
    void* memory = mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Error(Status::kExhausted, "no memory for words", errno);
    out->host = static_cast<std::atomic<uint64_t>*>(memory);
    return {};
  }
  const ContextScope scope(*cuda_, context_);
  if (!scope.ok()) return Error(Status::kTransportUnavailable, format("cuda:%d has no usable context", device_));
  if (kind_ == WordKind::kMapped) return make_mapped(out);
  if (kind_ == WordKind::kDevice) return make_device(out);
  return make_gdr(out);
}

Error Words::make_mapped(Block* out) {
  void* memory = nullptr;
  CuResult code = cuda_->host_allocate(&memory, kBlockBytes, kHostPortable | kHostDeviceMap);
  if (code != result::kSuccess) return failed("cuMemHostAlloc", code);
  out->host = static_cast<std::atomic<uint64_t>*>(memory);
  std::memset(memory, 0, kBlockBytes);
  code = cuda_->host_device_pointer(&out->device, memory, 0);
  return code == result::kSuccess ? Error() : failed("cuMemHostGetDevicePointer", code);
}

Error Words::make_device(Block* out) {
  const CuResult code = cuda_->allocate(&out->allocated, kBlockBytes);
  if (code != result::kSuccess) return failed("cuMemAlloc", code);
  out->device = out->allocated;
  return {};
}

// Twice as much as is used, since what is pinned begins at a multiple of a GPU page and an allocation need not.
Error Words::make_gdr(Block* out) {
  const CuResult code = cuda_->allocate(&out->allocated, 2 * kBlockBytes);
  if (code != result::kSuccess) return failed("cuMemAlloc", code);
  out->device = (out->allocated + kGpuPageBytes - 1) & ~(kGpuPageBytes - 1);
  if (Error e = zero(out->device, kBlockBytes)) return e;
  if (const int error = gdr_->pin(gdr_context_, out->device, kBlockBytes, 0, 0, &out->pin); error != 0)
    return Error(
        Status::kTransportUnavailable,
        format("gdr_pin_buffer of 64 KiB on cuda:%d: %s: the GPU's BAR may be used up, or the gdrdrv module not "
               "be of this driver",
               device_, std::strerror(error)),
        error);
  out->pinned = true;
  if (const int error = gdr_->map(gdr_context_, out->pin, &out->mapping, kBlockBytes); error != 0) {
    out->mapping = nullptr;
    return Error(Status::kTransportUnavailable, format("gdr_map on cuda:%d: %s", device_, std::strerror(error)), error);
  }
  out->mapped_bytes = kBlockBytes;
  // The library may map from an earlier page on: the words begin where the device's address does. (Newer libraries write more
  // than GdrInfo has: room for that is behind it.)
  struct {
    GdrInfo info;
    uint64_t more[16];
  } described = {};
  if (const int error = gdr_->info(gdr_context_, out->pin, &described.info); error != 0)
    return Error(Status::kTransportUnavailable, format("gdr_get_info on cuda:%d: %s", device_, std::strerror(error)),
                 error);
  auto* begin = static_cast<uint8_t*>(out->mapping) + (out->device - described.info.va);
  out->host = reinterpret_cast<std::atomic<uint64_t>*>(begin);
  return {};
}

// A stream of its own: the default one would wait for all others of the device.
Error Words::zero(CuPointer at, size_t bytes) {
  const ContextScope scope(*cuda_, context_);
  if (!scope.ok()) return Error(Status::kTransportUnavailable, format("cuda:%d has no usable context", device_));
  CuStream stream = nullptr;
  if (const CuResult code = cuda_->stream_create(&stream, kStreamNonBlocking); code != result::kSuccess)
    return failed("cuStreamCreate", code);
  CuResult code = cuda_->fill(at, 0, bytes, stream);
  if (code == result::kSuccess) code = cuda_->stream_synchronize(stream);
  static_cast<void>(cuda_->stream_destroy(stream));
  return code == result::kSuccess ? Error() : failed("cuMemsetD8Async", code);
}

// Also of one that was made half-way.
void Words::release(Block& block) {
  if (kind_ == WordKind::kHost) {
    if (block.host != nullptr) munmap(block.host, kBlockBytes);
    return;
  }
  const ContextScope scope(*cuda_, context_);
  if (block.mapping != nullptr)
    static_cast<void>(gdr_->unmap(gdr_context_, block.pin, block.mapping, block.mapped_bytes));
  if (block.pinned) static_cast<void>(gdr_->unpin(gdr_context_, block.pin));
  if (block.allocated != 0) static_cast<void>(cuda_->free(block.allocated));
  if (kind_ == WordKind::kMapped && block.host != nullptr) static_cast<void>(cuda_->host_free(block.host));
  block = {};
}

double read_cost_ns(const Word& word) {
  constexpr int kSamples = 31, kReads = 8;
  double samples[kSamples];
  uint64_t sum = 0;
  for (double& sample : samples) {
    const int64_t begin = now_ns();
    for (int i = 0; i < kReads; ++i) sum += word.host->load(std::memory_order_acquire);
    sample = static_cast<double>(now_ns() - begin) / kReads;
  }
  asm volatile("" ::"r"(sum));
  std::nth_element(samples, samples + kSamples / 2, samples + kSamples);
  return samples[kSamples / 2];
}

}  // namespace te::gpu
