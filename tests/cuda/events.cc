// Events: ready when the latest record of them has been carried out.
#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

using namespace standin::cuda;

namespace {

Event* find_event(Call& call, CuEvent handle, const char* caller) {
  const auto found = call.d.events.find(handle);
  if (found == call.d.events.end()) {
    call.d.violation("%s: %p is no event, or one that was destroyed", caller, static_cast<void*>(handle));
    return nullptr;
  }
  if (found->second.context == call.context->handle) return &found->second;
  call.d.violation("%s: the event belongs to another context than the current one", caller);
  return nullptr;
}

}  // namespace

extern "C" {

CuResult cuEventCreate(CuEvent* event, unsigned flags) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  constexpr unsigned kBlockingSync = 1;
  if (event == nullptr || (flags & ~(kBlockingSync | te::gpu::kEventDisableTiming)) != 0) return result::kInvalidValue;
  *event = call.d.new_handle<CuEvent>();
  call.d.events[*event].context = call.context->handle;
  return result::kSuccess;
}

CuResult cuEventRecord(CuEvent event, CuStream stream) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  Event* found = find_event(call, event, "cuEventRecord");
  if (found == nullptr) return result::kInvalidHandle;
  const uint64_t number = ++found->recorded;
  Task task{.work = {}, .finish = [&d = call.d, event, number] {
              // It may have been destroyed meanwhile, or recorded again in a stream that was faster.
              if (const auto at = d.events.find(event); at != d.events.end() && at->second.reached < number)
                at->second.reached = number;
            }};
  const CuResult status = submit(call, stream, std::move(task));
  if (status == result::kInvalidHandle) --found->recorded;
  return status;
}

CuResult cuEventQuery(CuEvent event) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  const Event* found = find_event(call, event, "cuEventQuery");
  if (found == nullptr) return result::kInvalidHandle;
  return found->reached == found->recorded ? result::kSuccess : result::kNotReady;
}

CuResult cuEventDestroy_v2(CuEvent event) {
  Call call(Call::Needs::kContext);
  if (call.context == nullptr) return call.status;
  if (find_event(call, event, "cuEventDestroy") == nullptr) return result::kInvalidHandle;
  call.d.events.erase(event);
  return call.status;
}

}  // extern "C"
