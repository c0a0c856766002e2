#include "native/gpu/cuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "native/system.h"

namespace te::gpu {
namespace {

constexpr int kOldestDriver = 11040;  // CUDA 11.4: mapped memory, events and VMM as they are used here

Error unavailable(std::string why) { return Error(Status::kTransportUnavailable, std::move(why)); }

template <typename Function>
bool bind(void* handle, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, name));
  return *out != nullptr;
}

// The first function that is missing, or null.
const char* bind_all(void* handle, Cuda* c) {
  struct Entry {
    const char* name;
    bool found;
  };
  const Entry entries[] = {
      {"cuInit", bind(handle, "cuInit", &c->init)},
      {"cuDriverGetVersion", bind(handle, "cuDriverGetVersion", &c->driver_version)},
      {"cuGetErrorName", bind(handle, "cuGetErrorName", &c->error_name)},
      {"cuGetErrorString", bind(handle, "cuGetErrorString", &c->error_string)},
      {"cuDeviceGetCount", bind(handle, "cuDeviceGetCount", &c->device_count)},
      {"cuDeviceGet", bind(handle, "cuDeviceGet", &c->device_get)},
      {"cuDeviceGetName", bind(handle, "cuDeviceGetName", &c->device_name)},
      {"cuDeviceGetAttribute", bind(handle, "cuDeviceGetAttribute", &c->device_attribute)},
      {"cuDeviceGetPCIBusId", bind(handle, "cuDeviceGetPCIBusId", &c->pci_bus_id)},
      {"cuDevicePrimaryCtxGetState", bind(handle, "cuDevicePrimaryCtxGetState", &c->primary_state)},
      {"cuDevicePrimaryCtxRetain", bind(handle, "cuDevicePrimaryCtxRetain", &c->primary_retain)},
      {"cuDevicePrimaryCtxRelease_v2", bind(handle, "cuDevicePrimaryCtxRelease_v2", &c->primary_release)},
      {"cuCtxPushCurrent_v2", bind(handle, "cuCtxPushCurrent_v2", &c->push)},
      {"cuCtxPopCurrent_v2", bind(handle, "cuCtxPopCurrent_v2", &c->pop)},
      {"cuPointerGetAttributes", bind(handle, "cuPointerGetAttributes", &c->pointer_attributes)},
      {"cuMemGetAddressRange_v2", bind(handle, "cuMemGetAddressRange_v2", &c->address_range)},
      {"cuMemAlloc_v2", bind(handle, "cuMemAlloc_v2", &c->allocate)},
      {"cuMemFree_v2", bind(handle, "cuMemFree_v2", &c->free)},
      {"cuMemHostAlloc", bind(handle, "cuMemHostAlloc", &c->host_allocate)},
      {"cuMemFreeHost", bind(handle, "cuMemFreeHost", &c->host_free)},
      {"cuMemHostGetDevicePointer_v2", bind(handle, "cuMemHostGetDevicePointer_v2", &c->host_device_pointer)},
      {"cuMemcpyHtoDAsync_v2", bind(handle, "cuMemcpyHtoDAsync_v2", &c->copy_to_device)},
      {"cuMemcpyDtoHAsync_v2", bind(handle, "cuMemcpyDtoHAsync_v2", &c->copy_to_host)},
      {"cuMemsetD8Async", bind(handle, "cuMemsetD8Async", &c->fill)},
      {"cuStreamCreate", bind(handle, "cuStreamCreate", &c->stream_create)},
      {"cuStreamDestroy_v2", bind(handle, "cuStreamDestroy_v2", &c->stream_destroy)},
      {"cuStreamSynchronize", bind(handle, "cuStreamSynchronize", &c->stream_synchronize)},
      {"cuEventCreate", bind(handle, "cuEventCreate", &c->event_create)},
      {"cuEventRecord", bind(handle, "cuEventRecord", &c->event_record)},
      {"cuEventQuery", bind(handle, "cuEventQuery", &c->event_query)},
      {"cuEventDestroy_v2", bind(handle, "cuEventDestroy_v2", &c->event_destroy)},
  };
  for (const Entry& entry : entries)
    if (!entry.found) return entry.name;
  static_cast<void>(bind(handle, "cuMemGetHandleForAddressRange", &c->range_handle));
  static_cast<void>(bind(handle, "cuThreadExchangeStreamCaptureMode", &c->exchange_capture_mode));
  static_cast<void>(bind(handle, "cuFlushGPUDirectRDMAWrites", &c->flush_writes));
  return nullptr;
}

Error load(const std::string& file, bool named, Cuda* c) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    if (named)
      return unavailable(
          format("TE_LIBCUDA is set to %s, which cannot be loaded: %s: correct or unset it", file.c_str(), reason));
    return unavailable(
        format("%s cannot be loaded: this machine has no NVIDIA driver, or the container was started without it (%s)",
               file.c_str(), reason));
  }
  if (const char* missing = bind_all(handle, c); missing != nullptr) {
    dlclose(handle);
    return unavailable(format("%s has no %s: the NVIDIA driver is too old; 470 (CUDA 11.4) or newer is needed",
                              file.c_str(), missing));
  }
  c->file = file;
  if (const CuResult code = c->init(0); code != result::kSuccess) {
    const bool none = code == result::kNoDevice;
    return unavailable(format("cuInit: %s: %s", c->describe(code).c_str(),
                              none ? "no GPU is visible to this process (CUDA_VISIBLE_DEVICES, the container's devices)"
                                   : "the driver and its kernel module do not work; nvidia-smi may say why"));
  }
  if (const CuResult code = c->driver_version(&c->version); code != result::kSuccess)
    return unavailable(format("cuDriverGetVersion: %s", c->describe(code).c_str()));
  if (c->version < kOldestDriver)
    return unavailable(
        format("the NVIDIA driver supports CUDA %d.%d; 470 (CUDA 11.4) or newer is needed: install a newer driver",
               c->version / 1000, c->version % 1000 / 10));
  if (const CuResult code = c->device_count(&c->devices); code != result::kSuccess)
    return unavailable(format("cuDeviceGetCount: %s", c->describe(code).c_str()));
  return {};
}

}  // namespace

std::string Cuda::describe(CuResult code) const {
  const char *name = nullptr, *text = nullptr;
  if (error_name == nullptr || error_name(code, &name) != result::kSuccess || name == nullptr)
    return format("CUDA error %d", code);
  if (error_string(code, &text) != result::kSuccess || text == nullptr) return name;
  return format("%s (%s)", name, text);
}

Error load_cuda(const Cuda** out) {
  static std::mutex mutex;
  static std::map<std::string, Cuda> loaded;
  [[maybe_unused]] static const bool held = (hold_across_forks(&mutex), true);
  const char* variable = std::getenv("TE_LIBCUDA");
  const bool named = variable != nullptr && *variable != '\0';
  const std::string file = named ? variable : "libcuda.so.1";
  const std::lock_guard lock(mutex);
  auto found = loaded.find(file);
  if (found == loaded.end()) {
    Cuda candidate;
    if (Error error = load(file, named, &candidate)) return error;
    found = loaded.emplace(file, candidate).first;
  }
  *out = &found->second;
  return {};
}

void ignore_captures(const Cuda& cuda) {
  int mode = kCaptureRelaxed;
  if (cuda.exchange_capture_mode != nullptr) static_cast<void>(cuda.exchange_capture_mode(&mode));
}

Error primary_context(const Cuda& cuda, int device, CuContext* out) {
  static std::mutex mutex;
  static std::map<std::pair<const Cuda*, int>, CuContext> retained;
  [[maybe_unused]] static const bool held = (hold_across_forks(&mutex), true);
  if (device < 0 || device >= cuda.devices)
    return Error(Status::kConfig, format("there is no device cuda:%d: this process sees %d", device, cuda.devices));
  const std::lock_guard lock(mutex);
  const auto found = retained.find({&cuda, device});
  if (found != retained.end()) {
    *out = found->second;
    return {};
  }
  CuDevice handle = 0;
  CuContext context = nullptr;
  CuResult code = cuda.device_get(&handle, device);
  if (code == result::kSuccess) code = cuda.primary_retain(&context, handle);
  if (code != result::kSuccess)
    return Error(Status::kTransportUnavailable,
                 format("the primary context of cuda:%d: %s", device, cuda.describe(code).c_str()), code);
  retained.emplace(std::pair{&cuda, device}, context);
  *out = context;
  return {};
}

}  // namespace te::gpu
