// What tests ask of the stand-in itself: tests/cuda/standin.h.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "tests/cuda/driver.h"
#include "tests/cuda/standin.h"

using namespace standin::cuda;

namespace {

// The allocation that has all of these bytes, of a device or managed; null: none.
const Allocation* holder(Call& call, uint64_t at, size_t bytes) {
  if (call.failed()) return nullptr;
  const Allocation* found = call.d.find(at);
  return found != nullptr && found->kind != Kind::kHost && found->holds(at, bytes) ? found : nullptr;
}

uint64_t alive(const Driver& d, bool host) {
  uint64_t count = 0;
  for (const auto& [base, each] : d.allocations) count += (each.kind == Kind::kHost) == host;
  return count;
}

uint64_t references(const Driver& d) {
  uint64_t count = 0;
  for (const auto& [handle, each] : d.contexts) count += each.references;
  return count;
}

}  // namespace

extern "C" {

int standin_cuda_configure(const char* text) {
  const Call call(Call::Needs::kNothing);
  Options wanted = call.d.initial;
  if (call.failed() || text == nullptr || !parse_options(text, &wanted)) return EINVAL;
  call.d.options = wanted;
  call.d.async_copies = 0;
  call.d.changed.notify_all();
  return 0;
}

int standin_cuda_read(uint64_t at, void* out, size_t bytes) {
  Call call(Call::Needs::kNothing);
  const Allocation* found = holder(call, at, bytes);
  if (found == nullptr) return EFAULT;
  std::memcpy(out, found->seen(at), bytes);
  return 0;
}

int standin_cuda_write(uint64_t at, const void* from, size_t bytes) {
  Call call(Call::Needs::kNothing);
  const Allocation* found = holder(call, at, bytes);
  if (found == nullptr) return EFAULT;
  std::memcpy(found->seen(at), from, bytes);
  return 0;
}

void* standin_cuda_view(uint64_t at) {
  Call call(Call::Needs::kNothing);
  const Allocation* found = call.failed() ? nullptr : call.d.find_pages(at);
  return found == nullptr ? nullptr : found->seen(at);
}

uint64_t standin_cuda_allocate_managed(size_t bytes) {
  Call call(Call::Needs::kContext);
  void* memory = nullptr;
  if (call.failed() || bytes == 0 || posix_memalign(&memory, 4096, bytes) != 0) return 0;
  const auto base = reinterpret_cast<uint64_t>(memory);
  enter(call, {.kind = Kind::kManaged, .base = base, .bytes = bytes, .view = static_cast<uint8_t*>(memory)});
  return base;
}

uint64_t standin_cuda_statistic(const char* name) {
  const Call call(Call::Needs::kNothing);
  if (call.failed()) return UINT64_MAX;
  const Driver& d = call.d;
  const std::string_view wanted = name == nullptr ? "" : name;
  if (wanted == "allocations") return alive(d, false);
  if (wanted == "host_allocations") return alive(d, true);
  if (wanted == "streams") return d.streams.size();
  if (wanted == "events") return d.events.size();
  if (wanted == "references") return references(d);
  if (wanted == "copies") return d.copies;
  if (wanted == "fills") return d.fills;
  if (wanted == "flushes") return d.flushes;
  if (wanted == "violations") return d.violations;
  return UINT64_MAX;
}

void standin_cuda_clear_errors(void) {
  const Call call(Call::Needs::kNothing);
  if (call.failed()) return;
  for (auto& [handle, context] : call.d.contexts) context.error = result::kSuccess;
}

}  // extern "C"
