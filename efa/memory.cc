// Registration of memory. Runs in any thread.
#include <cerrno>
#include <cinttypes>

#include "efa/nic.h"
#include "native/mappings.h"
#include "native/system.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {
namespace {

constexpr uint64_t kAccess = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

Error refuse(const MemorySpan& span, int reason, const std::string& why) {
  return Error(Status::kRegistration,
               format("cannot register %" PRIu64 " bytes at %p: %s", span.length, span.address, why.c_str()), reason);
}

}  // namespace

Error Nic::register_memory(const MemorySpan& span, MemoryKey* key) {
  const auto begin = reinterpret_cast<uintptr_t>(span.address);
  if (span.length == 0 || span.address == nullptr) return refuse(span, EINVAL, "the range is empty");
  if (begin + span.length < begin) return refuse(span, ERANGE, "the range wraps around");
  const bool device = span.device_kind != TE_DEVICE_HOST && span.dmabuf_fd < 0;
  if (device && !capabilities_.device_memory) {
    return refuse(
        span, EOPNOTSUPP,
        format("%s on NIC %s cannot reach GPU memory", info_->fabric_attr->prov_name, description_.name.c_str()));
  }
  if (span.dmabuf_fd >= 0) {
    if (Error error = check_dmabuf(span)) return error;
  } else if (kind_ != Kind::kEfa) {
    if (Error error = check_mapped(span)) return error;
  }
  FidPtr<fid_mr> region;
  {
    const std::lock_guard lock(gate_);
    if (Error error = open_region(span, &region)) return error;
  }
  key->base = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? begin : 0;
  key->remote_key = fi_mr_key(region.get());
  key->local_key = reinterpret_cast<uint64_t>(fi_mr_desc(region.get()));
  key->handle = region.get();
  const std::lock_guard lock(memory_mutex_);
  objects_.memory.emplace(static_cast<fid_mr*>(key->handle), std::move(region));
  return {};
}

// What is missing is said here: libfabric before 1.20 would take the descriptor's structure for an address.
Error Nic::check_dmabuf(const MemorySpan& span) const {
  if (kind_ != Kind::kEfa)
    return refuse(span, EOPNOTSUPP,
                  format("%s on NIC %s cannot reach memory through a dma-buf", info_->fabric_attr->prov_name,
                         description_.name.c_str()));
#ifdef FI_MR_DMABUF
  if (FI_VERSION_LT(library_.version, FI_VERSION(1, 20)))
    return refuse(span, EOPNOTSUPP,
                  format("a dma-buf needs libfabric 1.20 or newer, this is %s", library_.name.c_str()));
  if (reinterpret_cast<uintptr_t>(span.address) < span.dmabuf_offset)
    return refuse(span, EINVAL, "its address is below its offset in the dma-buf");
  return {};
#else
  return refuse(span, EOPNOTSUPP, "built with headers of a libfabric older than 1.20, which knows no dma-buf");
#endif
}

Error Nic::open_region(const MemorySpan& span, FidPtr<fid_mr>* out) {
  const auto mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
  const size_t key_bytes = info_->domain_attr->mr_key_size;
  const uint64_t key_mask = key_bytes >= 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * key_bytes)) - 1;
  const iovec range{span.address, span.length};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = kAccess;
  attributes.iface = span.device_kind != TE_DEVICE_HOST ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  if (attributes.iface == FI_HMEM_CUDA) attributes.device.cuda = span.device_index;
  uint64_t flags = 0;
#ifdef FI_MR_DMABUF
  fi_mr_dmabuf buffer{};
  if (span.dmabuf_fd >= 0) {
    buffer.fd = span.dmabuf_fd;
    buffer.offset = span.dmabuf_offset;
    buffer.len = span.length;
    // Where the buffer begins; the region then has address base + offset.
    buffer.base_addr = static_cast<uint8_t*>(span.address) - span.dmabuf_offset;
    attributes.dmabuf = &buffer;
    flags = FI_MR_DMABUF;
  }
#endif
  fid_mr* memory = nullptr;
  int status = 0;
  // Own keys are random: a key is a capability, and a stale one must not hit another region. Two may collide, then the
  // provider refuses and another one is drawn.
  for (int attempt = 0; attempt < 16; ++attempt) {
    if ((mode & FI_MR_PROV_KEY) == 0) {
      if (!random_bytes(&attributes.requested_key, sizeof attributes.requested_key))
        return refuse(span, EIO, "no random bytes from the kernel");
      attributes.requested_key &= key_mask;
    }
    status = fi_mr_regattr(objects_.domain.get(), &attributes, flags, &memory);
    if (status != -FI_ENOKEY || (mode & FI_MR_PROV_KEY) != 0) break;
  }
  if (status != 0)
    return refuse(span, -status, format("%s: %s", info_->fabric_attr->prov_name, library_.describe(status).c_str()));
  out->reset(memory);
  if ((mode & FI_MR_ENDPOINT) != 0) {
    status = fi_mr_bind(memory, &endpoint_->fid, 0);
    if (status == 0) status = fi_mr_enable(memory);
    if (status != 0) return refuse(span, -status, library_.describe(status));
  }
  return {};
}

Error Nic::deregister_memory(const MemoryKey& key) {
  auto* memory = static_cast<fid_mr*>(key.handle);
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = objects_.memory.find(memory);
    if (found == objects_.memory.end())
      return Error(Status::kRegistration, "this memory is not registered on this NIC", EINVAL);
    (void)found->second.release();
    objects_.memory.erase(found);
  }
  const std::lock_guard lock(gate_);
  const int status = fi_close(&memory->fid);
  if (status == 0) return {};
  return Error(
      Status::kRegistration,
      format("fi_close of a memory region on NIC %s: %s", description_.name.c_str(), library_.describe(status).c_str()),
      -status);
}

}  // namespace te::efa
#endif
