// CUDA's driver, loaded at run time: nothing here is linked and no header of CUDA is needed, so the package builds and imports on machines
// without it. What is declared here is the part of the driver API that is used; its binary interface has been stable since CUDA 11.
//
// Threads: everything may be called from any thread. The driver keeps a current context per thread: see ContextScope.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "native/status.h"

namespace te::gpu {

using CuResult = int;
using CuDevice = int;
using CuPointer = uint64_t;  // CUdeviceptr
using CuContext = struct CuContextObject*;
using CuStream = struct CuStreamObject*;
using CuEvent = struct CuEventObject*;

// Values of the driver API (cuda.h of CUDA 12), named as there without their prefixes.
namespace result {
inline constexpr CuResult kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100,
                          kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                          kNotReady = 600, kIllegalAddress = 700, kNotPermitted = 800, kNotSupported = 801;
}
namespace pointer_attribute {
inline constexpr int kContext = 1, kMemoryType = 2, kDevicePointer = 3, kHostPointer = 4, kBufferId = 7, kIsManaged = 8,
                     kDeviceOrdinal = 9, kRangeStart = 11, kRangeSize = 12, kMapped = 13;
}
namespace memory_type {
inline constexpr unsigned kHost = 1, kDevice = 2;
}
namespace device_attribute {
inline constexpr int kComputeMajor = 75, kComputeMinor = 76, kVirtualMemory = 102, kPosixHandles = 103,
                     kGpuDirectRdma = 116, kFlushOptions = 117, kWritesOrdering = 118, kDmaBuf = 124,
                     kFabricHandles = 128;
}
inline constexpr int kOrderingNone = 0, kOrderingOwner = 100, kOrderingAll = 200;  // of kWritesOrdering
inline constexpr unsigned kFlushByHost = 1;                                        // a bit of kFlushOptions
inline constexpr int kFlushCurrentContext = 0, kFlushToOwner = 100;
inline constexpr int kDmaBufDescriptor = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
inline constexpr unsigned kHostPortable = 1, kHostDeviceMap = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureRelaxed = 2;

struct Cuda {
  CuResult (*init)(unsigned flags) = nullptr;                                          // cuInit
  CuResult (*driver_version)(int* version) = nullptr;                                  // cuDriverGetVersion
  CuResult (*error_name)(CuResult error, const char** text) = nullptr;                 // cuGetErrorName
  CuResult (*error_string)(CuResult error, const char** text) = nullptr;               // cuGetErrorString
  CuResult (*device_count)(int* count) = nullptr;                                      // cuDeviceGetCount
  CuResult (*device_get)(CuDevice* device, int ordinal) = nullptr;                     // cuDeviceGet
  CuResult (*device_name)(char* name, int length, CuDevice device) = nullptr;          // cuDeviceGetName
  CuResult (*device_attribute)(int* value, int attribute, CuDevice device) = nullptr;  // cuDeviceGetAttribute
  CuResult (*pci_bus_id)(char* text, int length, CuDevice device) = nullptr;           // cuDeviceGetPCIBusId
  CuResult (*primary_state)(CuDevice device, unsigned* flags, int* active) = nullptr;  // cuDevicePrimaryCtxGetState
  CuResult (*primary_retain)(CuContext* context, CuDevice device) = nullptr;           // cuDevicePrimaryCtxRetain
  CuResult (*primary_release)(CuDevice device) = nullptr;                              // cuDevicePrimaryCtxRelease_v2
  CuResult (*push)(CuContext context) = nullptr;                                       // cuCtxPushCurrent_v2
  CuResult (*pop)(CuContext* context) = nullptr;                                       // cuCtxPopCurrent_v2
  CuResult (*pointer_attributes)(unsigned count, int* attributes, void** data,
                                 CuPointer at) = nullptr;                             // cuPointerGetAttributes
  CuResult (*address_range)(CuPointer* base, size_t* bytes, CuPointer at) = nullptr;  // cuMemGetAddressRange_v2
  CuResult (*range_handle)(void* handle, CuPointer at, size_t bytes, int type,
                           unsigned long long flags) = nullptr;  // cuMemGetHandleForAddressRange; CUDA 11.7, else null
  CuResult (*allocate)(CuPointer* at, size_t bytes) = nullptr;   // cuMemAlloc_v2
  CuResult (*free)(CuPointer at) = nullptr;                      // cuMemFree_v2
  CuResult (*host_allocate)(void** at, size_t bytes, unsigned flags) = nullptr;  // cuMemHostAlloc
  CuResult (*host_free)(void* at) = nullptr;                                     // cuMemFreeHost
  CuResult (*host_device_pointer)(CuPointer* device, void* host,
                                  unsigned flags) = nullptr;  // cuMemHostGetDevicePointer_v2
  CuResult (*copy_to_device)(CuPointer to, const void* from, size_t bytes,
                             CuStream stream) = nullptr;                                         // cuMemcpyHtoDAsync_v2
  CuResult (*copy_to_host)(void* to, CuPointer from, size_t bytes, CuStream stream) = nullptr;   // cuMemcpyDtoHAsync_v2
  CuResult (*fill)(CuPointer at, unsigned char value, size_t bytes, CuStream stream) = nullptr;  // cuMemsetD8Async
  CuResult (*stream_create)(CuStream* stream, unsigned flags) = nullptr;                         // cuStreamCreate
  CuResult (*stream_destroy)(CuStream stream) = nullptr;                                         // cuStreamDestroy_v2
  CuResult (*stream_synchronize)(CuStream stream) = nullptr;                                     // cuStreamSynchronize
  CuResult (*event_create)(CuEvent* event, unsigned flags) = nullptr;                            // cuEventCreate
  CuResult (*event_record)(CuEvent event, CuStream stream) = nullptr;                            // cuEventRecord
  CuResult (*event_query)(CuEvent event) = nullptr;                                              // cuEventQuery
  CuResult (*event_destroy)(CuEvent event) = nullptr;                                            // cuEventDestroy_v2
  CuResult (*flush_writes)(int target, int scope) = nullptr;  // cuFlushGPUDirectRDMAWrites; CUDA 11.3, else null

  // cuThreadExchangeStreamCaptureMode: in a thread that has chosen relaxed, calls go on while another one captures a graph.
  CuResult (*exchange_capture_mode)(int* mode) = nullptr;

  std::string file;  // what was loaded
  int version = 0;   // 1000 * major + 10 * minor, of the driver
  int devices = 0;

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(CuResult code) const;
};

// Loads the library that TE_LIBCUDA names (libcuda.so.1) and initialises it, once; what is loaded stays. A failure is
// kTransportUnavailable with the reason and the remedy, and is not remembered: a driver may be installed meanwhile.
Error load_cuda(const Cuda** out);

// The device's primary context, which the CUDA run time and torch use, too: retained once per device, for as long as the process
// lives (releasing the last reference would destroy what the application made in it).
Error primary_context(const Cuda& cuda, int device, CuContext* out);

// For threads of our own that call the driver. Else a graph that some thread captures in the default mode (as torch does) makes the
// driver refuse their calls, and ends the capture.
void ignore_captures(const Cuda& cuda);

// Makes a context current in this thread while it lives, and puts back what was there.
class ContextScope {
 public:
  ContextScope(const Cuda& cuda, CuContext context) : cuda_(cuda), pushed_(cuda.push(context) == result::kSuccess) {}
  ~ContextScope() {
    CuContext popped = nullptr;
    if (pushed_) static_cast<void>(cuda_.pop(&popped));
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  bool ok() const { return pushed_; }

 private:
  const Cuda& cuda_;
  const bool pushed_;
};

}  // namespace te::gpu
