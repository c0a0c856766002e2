#include "native/gpu/memory.h"

#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <utility>

namespace te::gpu {
namespace {

using ull = unsigned long long;

struct Attributes {
  unsigned memory_type = 0;
  int managed = 0;
  int ordinal = -1;
  uint64_t buffer_id = 0;
};

bool attributes_of(const Cuda& cuda, uint64_t address, Attributes* out) {
  int names[] = {pointer_attribute::kMemoryType, pointer_attribute::kIsManaged, pointer_attribute::kDeviceOrdinal,
                 pointer_attribute::kBufferId};
  unsigned long long id = 0;
  void* values[] = {&out->memory_type, &out->managed, &out->ordinal, &id};
  const CuResult code = cuda.pointer_attributes(static_cast<unsigned>(std::size(names)), names, values, address);
  out->buffer_id = id;
  return code == result::kSuccess;
}

Error refuse(uint64_t address, uint64_t length, const std::string& why) {
  return Error(Status::kRegistration, format("cannot register %llu bytes at %#llx: %s", static_cast<ull>(length),
                                             static_cast<ull>(address), why.c_str()));
}

int attribute(const Cuda& cuda, int device, int name) {
  CuDevice handle = 0;
  int value = 0;
  if (cuda.device_get(&handle, device) != result::kSuccess ||
      cuda.device_attribute(&value, name, handle) != result::kSuccess)
    return 0;
  return value;
}

}  // namespace

Error look_at(const Cuda& cuda, uint64_t address, uint64_t length, int device, DeviceRange* out) {
  CuContext context = nullptr;
  if (Error e = primary_context(cuda, device, &context)) return e;
  const ContextScope scope(cuda, context);
  uint64_t at = address;
  const uint64_t end = address + length;
  for (bool first = true; first || at < end; first = false) {
    Attributes found;
    if (!attributes_of(cuda, at, &found) || found.memory_type == 0)
      return refuse(
          address, length,
          first ? format("cuda:%d has no memory there: it was freed, or belongs to the host (then say 'cpu')", device)
                : format("the allocation ends after %llu bytes", static_cast<ull>(at - address)));
    if (found.managed != 0)
      return refuse(address, length,
                    "managed memory moves between host and device: use cudaMalloc, a plain tensor, or pinned memory");
    const bool host = found.memory_type == memory_type::kHost;
    if (first) *out = {&cuda, device, host, found.buffer_id};
    if (host != out->host) return refuse(address, length, "it is partly host and partly device memory");
    if (host) return {};  // registered as host memory, where the transport looks at all of it
    if (found.ordinal != device)
      return refuse(address, length, format("it is memory of cuda:%d, not of cuda:%d", found.ordinal, device));
    CuPointer base = 0;
    size_t bytes = 0;
    if (const CuResult code = cuda.address_range(&base, &bytes, at); code != result::kSuccess)
      return refuse(address, length, format("cuMemGetAddressRange: %s", cuda.describe(code).c_str()));
    if (base + bytes <= at) return refuse(address, length, "the driver gives an empty range for it");
    at = base + bytes;
  }
  return {};
}

bool was_freed(const Cuda& cuda, uint64_t address, uint64_t buffer_id) {
  if (buffer_id == 0) return false;
  int name = pointer_attribute::kBufferId;
  unsigned long long id = 0;
  void* value = &id;
  return cuda.pointer_attributes(1, &name, &value, address) != result::kSuccess || id != buffer_id;
}

Error export_dmabuf(const Cuda& cuda, int device, uint64_t address, uint64_t length, OwnedDescriptor* out,
                    uint64_t* offset) {
  if (cuda.range_handle == nullptr)
    return Error(Status::kUnsupported, "the NVIDIA driver has no dma-buf export: 515 (CUDA 11.7) or newer has it");
  if (attribute(cuda, device, device_attribute::kDmaBuf) == 0)
    return Error(Status::kUnsupported,
                 format("cuda:%d has no dma-buf export: the open kernel modules of the NVIDIA driver have it", device));
  CuContext context = nullptr;
  if (Error e = primary_context(cuda, device, &context)) return e;
  const ContextScope scope(cuda, context);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = address & ~(page - 1);
  const uint64_t end = (address + length + page - 1) & ~(page - 1);
  int fd = -1;
  const CuResult code = cuda.range_handle(&fd, begin, end - begin, kDmaBufDescriptor, 0);
  if (code == result::kNotSupported)
    return Error(Status::kUnsupported, format("cuMemGetHandleForAddressRange: %s", cuda.describe(code).c_str()), code);
  if (code != result::kSuccess)
    return refuse(address, length, format("cuMemGetHandleForAddressRange: %s", cuda.describe(code).c_str()));
  *out = OwnedDescriptor(fd);
  *offset = address - begin;
  return {};
}

Ordering write_ordering(const Cuda& cuda, int device) {
  if (attribute(cuda, device, device_attribute::kWritesOrdering) >= kOrderingOwner) return Ordering::kOrdered;
  const bool by_host = (attribute(cuda, device, device_attribute::kFlushOptions) & int{kFlushByHost}) != 0;
  return by_host && cuda.flush_writes != nullptr ? Ordering::kFlush : Ordering::kNeither;
}

Error flush_writes(const Cuda& cuda, int device) {
  CuContext context = nullptr;
  if (Error e = primary_context(cuda, device, &context)) return e;
  thread_local bool ignoring = false;  // the engine's worker is the only caller
  if (!std::exchange(ignoring, true)) ignore_captures(cuda);
  const ContextScope scope(cuda, context);
  const CuResult code = cuda.flush_writes(kFlushCurrentContext, kFlushToOwner);
  if (code == result::kSuccess) return {};
  return Error(Status::kTransport, format("cuFlushGPUDirectRDMAWrites: %s", cuda.describe(code).c_str()), code);
}

Error describe_device(int index, te_device_info* out) {
  const Cuda* cuda = nullptr;
  if (Error e = load_cuda(&cuda)) return e;
  if (index < 0 || index >= cuda->devices)
    return Error(Status::kConfig, format("there is no device cuda:%d: this process sees %d", index, cuda->devices));
  *out = te_device_info{};
  CuDevice device = 0;
  CuResult code = cuda->device_get(&device, index);
  if (code == result::kSuccess) code = cuda->device_name(out->name, sizeof out->name, device);
  if (code == result::kSuccess) code = cuda->pci_bus_id(out->pci, sizeof out->pci, device);
  if (code != result::kSuccess)
    return Error(Status::kTransportUnavailable, format("cuda:%d: %s", index, cuda->describe(code).c_str()), code);
  out->driver_version = cuda->version;
  out->devices = cuda->devices;
  out->compute_major = attribute(*cuda, index, device_attribute::kComputeMajor);
  out->compute_minor = attribute(*cuda, index, device_attribute::kComputeMinor);
  out->dmabuf = attribute(*cuda, index, device_attribute::kDmaBuf) != 0 && cuda->range_handle != nullptr;
  const Ordering ordering = write_ordering(*cuda, index);
  out->write_ordering = ordering == Ordering::kOrdered ? 2 : ordering == Ordering::kFlush ? 1 : 0;
  return {};
}

Error device_of(uint64_t address, int32_t* index) {
  const Cuda* cuda = nullptr;
  if (Error e = load_cuda(&cuda)) return e;
  Attributes found;
  if (!attributes_of(*cuda, address, &found) || found.memory_type == 0 || found.ordinal < 0)
    return Error(Status::kArgument, format("%#llx is no address of a GPU's memory", static_cast<ull>(address)));
  *index = found.ordinal;
  return {};
}

}  // namespace te::gpu
