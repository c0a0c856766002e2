// What the driver says about addresses, and the descriptors of device memory that it hands out.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

using namespace standin::cuda;
namespace attribute = te::gpu::pointer_attribute;
namespace memory_type = te::gpu::memory_type;

namespace {

constexpr uint64_t kHostPageBytes = 4096;
constexpr unsigned long long kThroughPcie = 1;  // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
constexpr int kNoOrdinal = -2;                  // what a driver says of addresses that it does not know

template <typename Value>
bool put(void* out, Value value) {
  std::memcpy(out, &value, sizeof value);
  return true;
}

// Of an address that is in no allocation. As a driver does, leaves alone what has no meaning then.
bool describe_unknown(int which, CuPointer at, void* out) {
  switch (which) {
    case attribute::kContext:
    case attribute::kDevicePointer:
    case attribute::kBufferId:
      return put(out, uint64_t{0});
    case attribute::kHostPointer:
      return put(out, at);
    case attribute::kMemoryType:
    case attribute::kIsManaged:
    case attribute::kMapped:
      return put(out, uint32_t{0});
    case attribute::kDeviceOrdinal:
      return put(out, kNoOrdinal);
    case attribute::kRangeStart:
    case attribute::kRangeSize:
      return true;
    default:
      return false;
  }
}

bool describe(const Allocation& of, int which, CuPointer at, void* out) {
  switch (which) {
    case attribute::kContext:
      return put(out, of.context);
    case attribute::kMemoryType:
      return put(out, of.kind == Kind::kHost ? memory_type::kHost : memory_type::kDevice);
    case attribute::kDevicePointer:
      return put(out, at);
    case attribute::kHostPointer:
      return put(out, of.kind == Kind::kDevice ? uint64_t{0} : at);
    case attribute::kBufferId:
      return put(out, of.id);
    case attribute::kIsManaged:
      return put(out, uint32_t{of.kind == Kind::kManaged});
    case attribute::kDeviceOrdinal:
      return put(out, of.device);
    case attribute::kRangeStart:
      return put(out, of.base);
    case attribute::kRangeSize:
      return put(out, size_t{of.bytes});
    case attribute::kMapped:
      return put(out, uint32_t{1});
    default:
      return false;
  }
}

// A descriptor whose position is where the range begins in the allocation's file: a file cannot begin elsewhere, as a dma-buf does.
int open_range(const Allocation& of, uint64_t offset) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", of.descriptor);
  const int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened >= 0) lseek(opened, static_cast<off_t>(offset), SEEK_SET);
  return opened;
}

}  // namespace

extern "C" {

CuResult cuPointerGetAttributes(unsigned count, int* attributes, void** data, CuPointer at) {
  Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (count == 0 || attributes == nullptr || data == nullptr) return result::kInvalidValue;
  const Allocation* found = call.d.find(at);
  for (unsigned i = 0; i < count; ++i)
    if (found != nullptr ? !describe(*found, attributes[i], at, data[i])
                         : !describe_unknown(attributes[i], at, data[i]))
      return result::kInvalidValue;
  return result::kSuccess;
}

CuResult cuMemGetAddressRange_v2(CuPointer* base, size_t* bytes, CuPointer at) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  const Allocation* found = call.d.find(at);
  if (found == nullptr) return result::kNotFound;
  if (base != nullptr) *base = found->base;
  if (bytes != nullptr) *bytes = found->bytes;
  return result::kSuccess;
}

CuResult cuMemGetHandleForAddressRange(void* handle, CuPointer at, size_t bytes, int type, unsigned long long flags) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (call.d.options.dmabuf == 0 || flags == kThroughPcie) return result::kNotSupported;
  if (handle == nullptr || type != te::gpu::kDmaBufDescriptor || flags != 0 || bytes == 0 || at % kHostPageBytes != 0 ||
      bytes % kHostPageBytes != 0)
    return result::kInvalidValue;
  const Allocation* found = call.d.find_pages(at);
  // What is asked for may begin before and end after the allocation, in its pages, but not be without a byte of it.
  if (found == nullptr || bytes > found->pages_bytes || at - found->pages > found->pages_bytes - bytes ||
      at >= found->base + found->bytes || at + bytes <= found->base)
    return result::kInvalidValue;
  const int opened = open_range(*found, at - found->pages);
  if (opened < 0) return result::kOutOfMemory;
  return put(handle, opened), result::kSuccess;
}

}  // extern "C"
