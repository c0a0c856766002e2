// Primary contexts and what each thread has current.
#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

namespace standin::cuda {

std::vector<CuContext>& current() {
  static thread_local std::vector<CuContext> stack;
  return stack;
}

namespace {

// With all that was made in it.
void destroy(Call& call, CuContext context) {
  Driver& d = call.d;
  const auto stream_of = [&] {
    for (const auto& [handle, stream] : d.streams)
      if (stream->context == context && !stream->ending) return handle;
    return CuStream{nullptr};
  };
  while (const CuStream stream = stream_of()) end_stream(call.lock, stream);
  std::erase_if(d.events, [&](const auto& each) { return each.second.context == context; });
  std::erase_if(d.allocations, [&](const auto& each) {
    if (each.second.context != context) return false;
    release(d, each.second);
    return true;
  });
  d.contexts.erase(context);
}

}  // namespace
}  // namespace standin::cuda

using namespace standin::cuda;

extern "C" {

CuResult cuDevicePrimaryCtxGetState(CuDevice device, unsigned* flags, int* active) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  if (flags == nullptr || active == nullptr) return result::kInvalidValue;
  *flags = 0;
  *active = call.d.primary[static_cast<size_t>(device)] != nullptr;
  return result::kSuccess;
}

CuResult cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (context == nullptr) return result::kInvalidValue;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  CuContext& primary = call.d.primary[static_cast<size_t>(device)];
  if (primary == nullptr) {
    primary = call.d.new_handle<CuContext>();
    call.d.contexts[primary] = {.handle = primary, .device = device};
  }
  ++call.d.contexts[primary].references;
  *context = primary;
  return result::kSuccess;
}

CuResult cuDevicePrimaryCtxRelease_v2(CuDevice device) {
  Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (!call.d.has_device(device)) return result::kInvalidDevice;
  CuContext& primary = call.d.primary[static_cast<size_t>(device)];
  if (primary == nullptr) return result::kInvalidContext;
  if (--call.d.contexts[primary].references > 0) return result::kSuccess;
  const CuContext last = primary;
  primary = nullptr;
  destroy(call, last);
  return result::kSuccess;
}

CuResult cuCtxPushCurrent_v2(CuContext context) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (call.d.find_context(context) == nullptr) return result::kInvalidContext;
  current().push_back(context);
  return result::kSuccess;
}

CuResult cuCtxPopCurrent_v2(CuContext* context) {
  const Call call(Call::Needs::kDriver);
  if (call.failed()) return call.status;
  if (current().empty()) return result::kInvalidContext;
  if (context != nullptr) *context = current().back();
  current().pop_back();
  return result::kSuccess;
}

}  // extern "C"
