// GPU memory: how the NICs reach it, or that they do not; and the slots through which it then goes.
#include <algorithm>
#include <bit>

#include "native/gpu/memory.h"
#include "proxy/engine.h"

namespace te {
namespace {

Error no_such_way(const std::string& transport, int device) {
  return Error(Status::kRegistration,
               format("transport %s cannot reach memory of cuda:%d: register it with staging=True, or take memory that "
                      "both reach from engine.allocate(nbytes, device)",
                      transport.c_str(), device));
}

}  // namespace

// Turns a span of device memory into what the provider takes; `reach` says how. `dmabuf` owns the descriptor in the span.
Error Engine::reach_device(MemorySpan* span, gpu::DeviceRange* range, OwnedDescriptor* dmabuf, Reach* reach) {
  const gpu::Cuda* cuda = nullptr;
  if (Error e = gpu::load_cuda(&cuda)) return Error(Status::kRegistration, e.message());
  range->cuda = cuda;
  const auto address = reinterpret_cast<uint64_t>(span->address);
  if (Error e = gpu::look_at(*cuda, address, span->length, span->device_index, range)) return e;
  if (range->host) {
    span->device_kind = TE_DEVICE_HOST;
    *reach = Reach::kHost;
    return {};
  }
  if (!capabilities_.device_memory) return no_such_way(settings_.transport, span->device_index);
  switch (gpu::write_ordering(*cuda, span->device_index)) {
    case gpu::Ordering::kOrdered:
      break;
    case gpu::Ordering::kFlush:
      flusher_.store(cuda, std::memory_order_seq_cst);
      flush_devices_.fetch_or(uint64_t{1} << (span->device_index & 63), std::memory_order_seq_cst);
      break;
    case gpu::Ordering::kNeither:
      return Error(
          Status::kRegistration,
          format("this platform neither orders nor flushes what NICs write to cuda:%d, so a counter could rise "
                 "before its bytes are visible: register with staging=True",
                 span->device_index));
  }
  const Error exported =
      gpu::export_dmabuf(*cuda, span->device_index, address, span->length, dmabuf, &span->dmabuf_offset);
  if (exported && exported.status() != Status::kUnsupported) return exported;
  *reach = exported ? Reach::kPeerMemory : Reach::kDmabuf;
  if (!exported) span->dmabuf_fd = dmabuf->fd();
  return {};
}

Error Engine::register_staged(const MemorySpan& span, te_handle* handle) {
  if (span.address == nullptr && span.length > 0)
    return Error(Status::kArgument, "a null pointer cannot be registered");
  if (span.length > 0 && reinterpret_cast<uint64_t>(span.address) > UINT64_MAX - span.length)
    return Error(Status::kRange, format("%llu bytes from %p wrap around the address space",
                                        static_cast<unsigned long long>(span.length), span.address));
  const gpu::Cuda* cuda = nullptr;
  if (Error e = gpu::load_cuda(&cuda)) return Error(Status::kRegistration, e.message());
  gpu::DeviceRange range;
  range.cuda = cuda;
  if (span.length > 0)
    if (Error e = gpu::look_at(*cuda, reinterpret_cast<uint64_t>(span.address), span.length, span.device_index, &range))
      return e;
  if (range.host) {  // a NIC reaches it as it is
    MemorySpan host = span;
    host.device_kind = TE_DEVICE_HOST;
    return register_region(host, handle);
  }
  const std::shared_lock provider_lock(provider_mutex_);
  if (provider_ == nullptr) return Error(Status::kClosed, kClosedEngine);
  if (Error e = open_staging(*cuda, span.device_index)) return e;
  return add_region(span, range, OwnedDescriptor(), nullptr, Reach::kStaged, handle);
}

// The caller holds provider_mutex_.
Error Engine::open_staging(const gpu::Cuda& cuda, int device) {
  const std::lock_guard lock(staging_mutex_);
  if (Staging* made = staging_.load(std::memory_order_relaxed); made != nullptr)
    return made->copier->add_device(device);
  auto staging = std::make_unique<Staging>();
  staging->cuda = &cuda;
  staging->slot_bytes = settings_.values.staging_slot_bytes;
  staging->count = settings_.values.staging_slots;
  gpu::CuContext context = nullptr;
  if (Error e = gpu::primary_context(cuda, device, &context)) return e;
  staging->context = context;
  const gpu::ContextScope scope(cuda, context);
  const uint32_t most = 2 * staging->count;  // one a slot
  if (Error e = gpu::Copier::open(cuda, most, [this] { doorbell_.ring(); }, &staging->copier)) return e;
  if (Error e = staging->copier->add_device(device)) return e;
  void* memory = nullptr;
  if (const gpu::CuResult code =
          cuda.host_allocate(&memory, staging->length(), gpu::kHostPortable | gpu::kHostDeviceMap);
      code != gpu::result::kSuccess)
    return Error(Status::kRegistration,
                 format("%llu bytes of pinned memory for staging: %s: lower staging_slots or staging_slot_bytes",
                        static_cast<unsigned long long>(staging->length()), cuda.describe(code).c_str()),
                 code);
  staging->memory = static_cast<uint8_t*>(memory);
  for (; staging->registered < nic_count_; ++staging->registered) {
    const uint32_t nic = staging->registered;
    if (Error e =
            provider_->register_memory(nic, {memory, staging->length(), TE_DEVICE_HOST, 0}, &staging->keys[nic])) {
      close_staging(*staging);
      free_staging(*staging);
      return e;
    }
  }
  staging_.store(staging.release(), std::memory_order_release);
  return {};
}

// Nobody uses it any more: the worker has ended, or never saw it.
void Engine::close_staging(Staging& staging) {
  staging.copier.reset();  // what was submitted is finished
  for (uint32_t i = 0; i < staging.registered; ++i)
    static_cast<void>(provider_->deregister_memory(i, staging.keys[i]).ok());
  staging.registered = 0;
}

// After the provider has gone, which may hold requests that never completed.
void Engine::free_staging(Staging& staging) {
  const gpu::ContextScope scope(*staging.cuda, staging.context);
  if (staging.memory != nullptr) static_cast<void>(staging.cuda->host_free(staging.memory));
  staging.memory = nullptr;
}

// GPU memory that was freed since it was registered may be anybody's by now.
Error Engine::check_device_memory(const Region& region) {
  if (!gpu::was_freed(*region.cuda, reinterpret_cast<uint64_t>(region.span.address), region.buffer_id)) return {};
  return Error(Status::kRegistration,
               format("the memory of cuda:%d at %p was freed after it was registered: keep it until the region is "
                      "closed, or close the region first",
                      region.span.device_index, region.span.address));
}

Error Engine::describe_reach(te_handle handle, te_region_info* out) {
  const Region* region = regions_.get(handle);
  if (region == nullptr) return Error(Status::kRegionClosed, "the region is closed");
  *out = te_region_info{};
  out->length = region->span.length;
  out->device_kind = region->reach == Reach::kHost ? TE_DEVICE_HOST : TE_DEVICE_CUDA;
  out->device_index = region->span.device_index;
  out->reach = static_cast<uint32_t>(region->reach);
  return {};
}

// Pinned host memory that a device reaches at the same address (unified addressing).
Error Engine::allocate_mapped(int device, uint64_t length, void** out) {
  const gpu::Cuda* cuda = nullptr;
  if (Error e = gpu::load_cuda(&cuda)) return Error(Status::kRegistration, e.message());
  gpu::CuContext context = nullptr;
  if (Error e = gpu::primary_context(*cuda, device, &context)) return e;
  const gpu::ContextScope scope(*cuda, context);
  void* memory = nullptr;
  gpu::CuPointer mapped = 0;
  gpu::CuResult code = cuda->host_allocate(&memory, length, gpu::kHostPortable | gpu::kHostDeviceMap);
  if (code == gpu::result::kSuccess) code = cuda->host_device_pointer(&mapped, memory, 0);
  if (code != gpu::result::kSuccess || mapped != reinterpret_cast<uint64_t>(memory)) {
    if (memory != nullptr) static_cast<void>(cuda->host_free(memory));
    return Error(
        Status::kRegistration,
        format("%llu bytes of pinned memory for cuda:%d: %s", static_cast<unsigned long long>(length), device,
               code == gpu::result::kSuccess ? "the device sees it at another address" : cuda->describe(code).c_str()),
        code);
  }
  std::fill_n(static_cast<uint8_t*>(memory), length, uint8_t{0});
  *out = memory;
  return {};
}

void Engine::free_mapped(void* memory) {
  const gpu::Cuda* cuda = nullptr;
  int32_t device = 0;
  gpu::CuContext context = nullptr;
  if (gpu::load_cuda(&cuda) || gpu::device_of(reinterpret_cast<uint64_t>(memory), &device) ||
      gpu::primary_context(*cuda, device, &context))
    return;
  const gpu::ContextScope scope(*cuda, context);
  static_cast<void>(cuda->host_free(memory));
}

}  // namespace te
