// What lies at an address of GPU memory, and how a NIC gets at it. Any thread.
#pragma once

#include <cstdint>

#include "native/gpu/cuda.h"
#include "native/provider.h"
#include "native/system.h"

namespace te::gpu {

// A range of one device's memory: the whole of it was allocated when it was looked at.
struct DeviceRange {
  const Cuda* cuda = nullptr;
  int device = 0;
  bool host = false;  // pinned host memory, which transports reach as such
  uint64_t buffer_id =
      0;  // of the allocation at the range's start, 0 where the driver gives none; never used again in this process
};

// Looks at [address, address + length), which may cover several allocations that lie side by side (as torch's expandable segments do).
// Refuses what is no GPU memory, what ends before the range does, managed memory, and memory of another device than `device`.
Error look_at(const Cuda& cuda, uint64_t address, uint64_t length, int device, DeviceRange* out);

// Has the memory at `address` been freed since it had this buffer id? (False where the id is 0.)
bool was_freed(const Cuda& cuda, uint64_t address, uint64_t buffer_id);

// A dma-buf of the pages around the range, which begins at `offset` of it. kUnsupported where the driver or the device has none.
Error export_dmabuf(const Cuda& cuda, int device, uint64_t address, uint64_t length, OwnedDescriptor* out,
                    uint64_t* offset);

// When a NIC's writes become visible to the device, that is, what must come between a completion and a counter.
enum class Ordering { kOrdered, kFlush, kNeither };
Ordering write_ordering(const Cuda& cuda, int device);
// cuFlushGPUDirectRDMAWrites for the device's own memory; where Ordering is kFlush.
Error flush_writes(const Cuda& cuda, int device);

Error describe_device(int index, te_device_info* out);
// kArgument: no GPU's memory.
Error device_of(uint64_t address, int32_t* index);

}  // namespace te::gpu
