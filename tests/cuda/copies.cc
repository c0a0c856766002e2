// Copies and fills: what they may touch is checked when they are asked for, and stays there until they are done.
#include <cstring>

#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

using namespace standin::cuda;

namespace {

// Where the CPU sees the device's bytes; null: an illegal address, and the context has failed.
uint8_t* device_range(Call& call, CuPointer at, size_t bytes) {
  const Allocation* found = call.d.find(at);
  if (found != nullptr && found->kind != Kind::kHost && found->holds(at, bytes)) return found->seen(at);
  call.context->error = result::kIllegalAddress;
  return nullptr;
}

bool host_range(Call& call, const void* host, size_t bytes, const char* caller) {
  const auto at = reinterpret_cast<uint64_t>(host);
  const Allocation* found = call.d.find(at);
  if (found == nullptr || found->kind != Kind::kHost || !found->holds(at, bytes)) {
    call.d.violation("%s: %zu bytes at %p are not within memory of cuMemHostAlloc", caller, bytes, host);
    return false;
  }
  if (found->context == call.context->handle || (found->flags & te::gpu::kHostPortable) != 0) return true;
  call.d.violation("%s: the memory at %p belongs to another context and is not portable", caller, host);
  return false;
}

CuResult copy(CuPointer device, const void* host, size_t bytes, CuStream stream, bool to_device, const char* caller) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (bytes == 0) return result::kSuccess;
  if (!host_range(call, host, bytes, caller)) return result::kInvalidValue;
  uint8_t* seen = device_range(call, device, bytes);
  if (seen == nullptr) return result::kIllegalAddress;
  auto* plain = static_cast<uint8_t*>(const_cast<void*>(host));
  uint8_t* to = to_device ? seen : plain;
  const uint8_t* from = to_device ? plain : seen;
  return submit(call, stream,
                {.work = [=] { std::memcpy(to, from, bytes); }, .finish = [&d = call.d] { ++d.copies; }, .copy = true});
}

}  // namespace

extern "C" {

CuResult cuMemcpyHtoDAsync_v2(CuPointer to, const void* from, size_t bytes, CuStream stream) {
  return copy(to, from, bytes, stream, true, "cuMemcpyHtoDAsync");
}

CuResult cuMemcpyDtoHAsync_v2(void* to, CuPointer from, size_t bytes, CuStream stream) {
  return copy(from, to, bytes, stream, false, "cuMemcpyDtoHAsync");
}

CuResult cuMemsetD8Async(CuPointer at, unsigned char value, size_t bytes, CuStream stream) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (bytes == 0) return result::kSuccess;
  uint8_t* seen = device_range(call, at, bytes);
  if (seen == nullptr) return result::kIllegalAddress;
  return submit(call, stream,
                {.work = [=] { std::memset(seen, value, bytes); }, .finish = [&d = call.d] { ++d.fills; }});
}

}  // extern "C"
