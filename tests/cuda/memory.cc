// Memory: reserved addresses of devices with files behind them, and host memory, whose device address is its own.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "native/gpu/gdr.h"
#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

namespace standin::cuda {
namespace {

using te::gpu::kGpuPageBytes;
constexpr size_t kHostPageBytes = 4096;
constexpr unsigned kWriteCombined = 4;  // CU_MEMHOSTALLOC_WRITECOMBINED

constexpr uint64_t rounded(uint64_t bytes) { return (bytes + kGpuPageBytes - 1) / kGpuPageBytes * kGpuPageBytes; }

// Addresses that begin at a page of the GPU and at which nothing is; 0: none are left.
uint64_t reserve(uint64_t bytes) {
  void* all = mmap(nullptr, bytes + kGpuPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<uint64_t>(all);
  const uint64_t aligned = rounded(start);
  if (aligned > start) munmap(all, aligned - start);
  if (const uint64_t rest = start + kGpuPageBytes - aligned; rest > 0)
    munmap(reinterpret_cast<void*>(aligned + bytes), rest);
  return aligned;
}

bool make_pages(Driver& d, Allocation* made) {
  made->descriptor = memfd_create("device memory", MFD_CLOEXEC);
  const uint64_t view = reserve(made->pages_bytes);
  if (made->descriptor < 0 || view == 0 || ftruncate(made->descriptor, static_cast<off_t>(made->pages_bytes)) != 0 ||
      mmap(reinterpret_cast<void*>(view), made->pages_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           made->descriptor, 0) == MAP_FAILED) {
    if (made->descriptor >= 0) close(made->descriptor);
    if (view != 0) munmap(reinterpret_cast<void*>(view), made->pages_bytes);
    return false;
  }
  made->view = reinterpret_cast<uint8_t*>(view);
  std::vector<uint64_t>& freed = d.reservations[made->pages_bytes];
  if (freed.empty()) {
    made->pages = reserve(made->pages_bytes);
  } else {
    made->pages = freed.back();
    freed.pop_back();
  }
  return made->pages != 0;
}

uint64_t used(const Driver& d, int device) {
  uint64_t bytes = 0;
  for (const auto& [base, each] : d.allocations)
    if (each.kind == Kind::kDevice && each.device == device) bytes += each.pages_bytes;
  return bytes;
}

// What begins here, of host memory or not, once no stream works on it any more.
CuResult free_at(Call& call, uint64_t base, bool host) {
  if (call.context == nullptr) return call.status;
  drain(call.lock, nullptr, false);
  const auto found = call.d.allocations.find(base);
  if (found == call.d.allocations.end() || (found->second.kind == Kind::kHost) != host) return result::kInvalidValue;
  release(call.d, found->second);
  call.d.allocations.erase(found);
  return call.status;
}

}  // namespace

void release(Driver& d, const Allocation& gone) {
  if (gone.kind != Kind::kDevice) return std::free(gone.view);
  munmap(gone.view, gone.pages_bytes);
  close(gone.descriptor);
  d.reservations[gone.pages_bytes].push_back(gone.pages);
}

void enter(Call& call, Allocation made) {
  made.context = call.context->handle;
  made.device = call.context->device;
  made.id = ++call.d.last_id;
  call.d.allocations.emplace(made.base, made);
}

Allocation* Driver::find(uint64_t at) {
  auto next = allocations.upper_bound(at);
  return next != allocations.begin() && std::prev(next)->second.holds(at, 1) ? &std::prev(next)->second : nullptr;
}

Allocation* Driver::find_pages(uint64_t at) {
  for (auto& [base, each] : allocations)
    if (each.kind == Kind::kDevice && at >= each.pages && at - each.pages < each.pages_bytes) return &each;
  return nullptr;
}

}  // namespace standin::cuda

using namespace standin::cuda;

extern "C" {

CuResult cuMemAlloc_v2(CuPointer* at, size_t bytes) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (at == nullptr || bytes == 0) return result::kInvalidValue;
  const Options& options = call.d.options;
  if (bytes > options.memory || used(call.d, call.context->device) + rounded(options.offset + bytes) > options.memory)
    return result::kOutOfMemory;
  Allocation made{.kind = Kind::kDevice, .bytes = bytes, .pages_bytes = rounded(options.offset + bytes)};
  if (!make_pages(call.d, &made)) return result::kOutOfMemory;
  made.base = made.pages + options.offset;
  enter(call, made);
  *at = made.base;
  return result::kSuccess;
}

CuResult cuMemFree_v2(CuPointer at) {
  Call call(Call::Needs::kContext);
  return free_at(call, at, false);
}

CuResult cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (at == nullptr || bytes == 0 ||
      (flags & ~(te::gpu::kHostPortable | te::gpu::kHostDeviceMap | kWriteCombined)) != 0)
    return result::kInvalidValue;
  void* memory = nullptr;
  if (call.d.options.host_alloc_fail != 0 || posix_memalign(&memory, kHostPageBytes, bytes) != 0)
    return result::kOutOfMemory;
  enter(call, {.kind = Kind::kHost,
               .base = reinterpret_cast<uint64_t>(memory),
               .bytes = bytes,
               .view = static_cast<uint8_t*>(memory),
               .flags = flags});
  *at = memory;
  return result::kSuccess;
}

CuResult cuMemFreeHost(void* at) {
  Call call(Call::Needs::kContext);
  return free_at(call, reinterpret_cast<uint64_t>(at), true);
}

CuResult cuMemHostGetDevicePointer_v2(CuPointer* device, void* host, unsigned flags) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  const Allocation* found = call.d.find(reinterpret_cast<uint64_t>(host));
  if (device == nullptr || flags != 0 || found == nullptr || found->kind != Kind::kHost ||
      (found->flags & te::gpu::kHostDeviceMap) == 0)
    return result::kInvalidValue;
  *device = reinterpret_cast<uint64_t>(host);
  return result::kSuccess;
}

}  // extern "C"
