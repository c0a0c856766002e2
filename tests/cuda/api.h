// The symbols of libcuda that the stand-in has, with the types that native/gpu/cuda.h gives them.
#pragma once

#include "native/gpu/cuda.h"

#define STANDIN_CUDA_FUNCTIONS(X)                      \
  X(cuInit, init)                                      \
  X(cuDriverGetVersion, driver_version)                \
  X(cuGetErrorName, error_name)                        \
  X(cuGetErrorString, error_string)                    \
  X(cuDeviceGetCount, device_count)                    \
  X(cuDeviceGet, device_get)                           \
  X(cuDeviceGetName, device_name)                      \
  X(cuDeviceGetAttribute, device_attribute)            \
  X(cuDeviceGetPCIBusId, pci_bus_id)                   \
  X(cuDevicePrimaryCtxGetState, primary_state)         \
  X(cuDevicePrimaryCtxRetain, primary_retain)          \
  X(cuDevicePrimaryCtxRelease_v2, primary_release)     \
  X(cuCtxPushCurrent_v2, push)                         \
  X(cuCtxPopCurrent_v2, pop)                           \
  X(cuPointerGetAttributes, pointer_attributes)        \
  X(cuMemGetAddressRange_v2, address_range)            \
  X(cuMemGetHandleForAddressRange, range_handle)       \
  X(cuMemAlloc_v2, allocate)                           \
  X(cuMemFree_v2, free)                                \
  X(cuMemHostAlloc, host_allocate)                     \
  X(cuMemFreeHost, host_free)                          \
  X(cuMemHostGetDevicePointer_v2, host_device_pointer) \
  X(cuMemcpyHtoDAsync_v2, copy_to_device)              \
  X(cuMemcpyDtoHAsync_v2, copy_to_host)                \
  X(cuMemsetD8Async, fill)                             \
  X(cuStreamCreate, stream_create)                     \
  X(cuStreamDestroy_v2, stream_destroy)                \
  X(cuStreamSynchronize, stream_synchronize)           \
  X(cuEventCreate, event_create)                       \
  X(cuEventRecord, event_record)                       \
  X(cuEventQuery, event_query)                         \
  X(cuEventDestroy_v2, event_destroy)                  \
  X(cuFlushGPUDirectRDMAWrites, flush_writes)

namespace standin::cuda {
template <typename>
struct Declared;
template <typename Result, typename... Arguments>
struct Declared<Result (*)(Arguments...)> {
  using Type = Result(Arguments...);
};
}  // namespace standin::cuda

extern "C" {
#define STANDIN_CUDA_DECLARE(name, member) standin::cuda::Declared<decltype(te::gpu::Cuda::member)>::Type name;
STANDIN_CUDA_FUNCTIONS(STANDIN_CUDA_DECLARE)
#undef STANDIN_CUDA_DECLARE
}
