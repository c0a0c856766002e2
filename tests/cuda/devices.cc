// Devices, and the order in which they see writes of others.
#include <cstdio>
#include <cstring>

#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

using namespace standin::cuda;
namespace attribute = te::gpu::device_attribute;

namespace {

CuResult copy_text(const char* text, char* out, int length) {
  if (out == nullptr || length <= static_cast<int>(std::strlen(text))) return result::kInvalidValue;
  std::strcpy(out, text);
  return result::kSuccess;
}

}  // namespace

extern "C" {

CuResult cuDeviceGetCount(int* count) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (count == nullptr) return result::kInvalidValue;
  *count = static_cast<int>(call.d.options.devices);
  return result::kSuccess;
}

CuResult cuDeviceGet(CuDevice* device, int ordinal) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (device == nullptr) return result::kInvalidValue;
  if (!call.d.has_device(ordinal)) return result::kInvalidDevice;
  *device = ordinal;
  return result::kSuccess;
}

CuResult cuDeviceGetName(char* name, int length, CuDevice device) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  return copy_text("Stand-in GPU", name, length);
}

// 0000:41:00.0 and on.
CuResult cuDeviceGetPCIBusId(char* text, int length, CuDevice device) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  char address[16];
  std::snprintf(address, sizeof address, "0000:%02x:00.0", 0x41u + static_cast<uint8_t>(device));
  return copy_text(address, text, length);
}

CuResult cuDeviceGetAttribute(int* value, int which, CuDevice device) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (value == nullptr) return result::kInvalidValue;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  const Options& options = call.d.options;
  switch (which) {
    case attribute::kComputeMajor:
      return *value = 9, result::kSuccess;
    case attribute::kComputeMinor:
    case attribute::kVirtualMemory:
    case attribute::kPosixHandles:
    case attribute::kFabricHandles:
      return *value = 0, result::kSuccess;
    case attribute::kGpuDirectRdma:
      return *value = 1, result::kSuccess;
    case attribute::kFlushOptions:
      return *value = options.flush != 0 ? te::gpu::kFlushByHost : 0, result::kSuccess;
    case attribute::kWritesOrdering:
      return *value = options.ordering, result::kSuccess;
    case attribute::kDmaBuf:
      return *value = options.dmabuf != 0, result::kSuccess;
    default:
      return result::kInvalidValue;
  }
}

CuResult cuFlushGPUDirectRDMAWrites(int target, int scope) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (call.d.options.flush == 0) return result::kNotSupported;
  constexpr int kToAllDevices = 200;
  if (target != te::gpu::kFlushCurrentContext || (scope != te::gpu::kFlushToOwner && scope != kToAllDevices))
    return result::kInvalidValue;
  ++call.d.flushes;
  return result::kSuccess;
}

}  // extern "C"
