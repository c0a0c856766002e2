// Registration of memory. Runs in any thread.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cx7/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
constexpr int kRelaxed = kAccess | static_cast<int>(IBV_ACCESS_RELAXED_ORDERING);
constexpr int kNoFunction = -1;  // of relaxed_refusal_: the library cannot be asked

// These say something about the memory or the machine; the same registration without the flag would meet them, too.
bool concerns_ordering(int code) { return code != ENOMEM && code != EFAULT && code != EAGAIN && code != EBADF; }

}  // namespace

// Relaxed ordering lets bytes of different packets pass each other on PCIe, which is what makes some hosts fast. A completion
// entry is written without it, so it still comes after all bytes. The flag is optional by its number: a kernel that does not know
// it takes the rest, so only a library or device that knows and refuses it is seen here. Once one has, it is not asked again.
ibv_mr* Nic::register_relaxed(const std::function<ibv_mr*(int)>& attempt) {
  if (relaxed_refusal_.load(std::memory_order_relaxed) == 0) {
    if (ibv_mr* region = attempt(kRelaxed); region != nullptr) return region;
    const int code = errno;
    if (!concerns_ordering(code)) return nullptr;
    ibv_mr* region = attempt(kAccess);
    if (region != nullptr) relaxed_refusal_.store(code, std::memory_order_relaxed);
    return region;
  }
  return attempt(kAccess);
}

void Nic::describe_ordering(NicInfo* info) const {
  const int refusal = relaxed_refusal_.load(std::memory_order_relaxed);
  info->relaxed_ordering = refusal == 0;
  if (refusal == kNoFunction) info->ordering_reason = "the library has no ibv_reg_mr_iova2";
  else if (refusal != 0) info->ordering_reason = format("registration with it: %s", std::strerror(refusal));
}

Error Nic::register_memory(const MemorySpan& span, MemoryKey* key) {
  // An empty region has a key, too: one byte that nobody can name, since every range is checked against the length.
  static uint8_t nothing[1];
  void* address = span.length == 0 ? nothing : span.address;
  const uint64_t length = std::max<uint64_t>(span.length, 1);
  const auto begin = reinterpret_cast<uint64_t>(address);
  ibv_mr* region = nullptr;
  if (span.dmabuf_fd >= 0) {
    if (Error error = check_dmabuf(span)) return error;
    region = register_relaxed([&](int access) {
      return library_.reg_dmabuf_mr(domain_.get(), span.dmabuf_offset, length, begin, span.dmabuf_fd, access);
    });
  } else if (library_.reg_mr_iova2 == nullptr) {
    relaxed_refusal_.store(kNoFunction, std::memory_order_relaxed);
    region = library_.reg_mr(domain_.get(), address, length, kAccess);
  } else {
    region = register_relaxed([&](int access) {
      return access == kAccess
                 ? library_.reg_mr(domain_.get(), address, length, access)
                 : library_.reg_mr_iova2(domain_.get(), address, length, begin, static_cast<unsigned>(access));
    });
  }
  if (region == nullptr) return registration_failed(span, errno);
  key->base = begin;
  key->remote_key = region->rkey;
  const bool far = span.dmabuf_fd >= 0 || span.device_kind != TE_DEVICE_HOST;
  key->local_key = region->lkey | (far ? kFarMemory : 0);
  key->handle = region;
  return {};
}

// What would only come back as EINVAL is said in words.
Error Nic::check_dmabuf(const MemorySpan& span) const {
  if (library_.reg_dmabuf_mr == nullptr) {
    return Error(
        Status::kRegistration,
        format("%s has no ibv_reg_dmabuf_mr: dma-buf memory needs rdma-core 34 or newer", library_.name.c_str()),
        EOPNOTSUPP);
  }
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (span.length == 0) return Error(Status::kArgument, "a dma-buf of no bytes cannot be registered", EINVAL);
  if (span.dmabuf_offset % page == reinterpret_cast<uint64_t>(span.address) % page) return {};
  return Error(Status::kArgument,
               format("offset %llu of the dma-buf and address %p do not lie at the same place of their pages",
                      static_cast<unsigned long long>(span.dmabuf_offset), span.address),
               EINVAL);
}

Error Nic::registration_failed(const MemorySpan& span, int code) const {
  const bool dmabuf = span.dmabuf_fd >= 0;
  const std::string what = format("registering %llu bytes at %p%s", static_cast<unsigned long long>(span.length),
                                  span.address, dmabuf ? " through a dma-buf" : "");
  const Error error = fail(what.c_str(), code);
  const char* hint = dmabuf && (code == EOPNOTSUPP || code == ENOSYS || code == EPROTONOSUPPORT)
                         ? ": dma-buf memory needs Linux 5.12 or newer and a driver that takes it (mlx5)"
                         : "";
  return Error(Status::kRegistration, error.message() + hint, error.provider_status());
}

Error Nic::deregister_memory(const MemoryKey& key) {
  if (key.handle == nullptr) return {};
  if (const int status = library_.dereg_mr(static_cast<ibv_mr*>(key.handle)); status != 0) {
    const Error error = fail("ibv_dereg_mr", status);
    return Error(Status::kRegistration, error.message(), error.provider_status());
  }
  return {};
}

}  // namespace te::cx7
#endif
