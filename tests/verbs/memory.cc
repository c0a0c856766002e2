// Exported: protection domains, memory regions, address handles.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tests/verbs/execution.h"

using namespace standin;

namespace standin {
namespace {

template <typename Pointer = std::nullptr_t>
Pointer refused(int code) {
  errno = code;
  return nullptr;
}

bool mapped(const void* address, size_t length) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t at = reinterpret_cast<uintptr_t>(address) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + length;
  unsigned char present[4096];
  while (at < end) {
    const size_t bytes = std::min<size_t>(end - at, sizeof present * page);
    if (mincore(reinterpret_cast<void*>(at), bytes, present) != 0) return false;
    at += bytes;
  }
  return true;
}

// Keys are of no device but one, are never used again, and the two of a region differ.
uint32_t new_key(Fabric& f) {
  for (;;) {
    const uint32_t key = f.random.word();
    if (key != 0 && !f.local_keys.contains(key) && !f.remote_keys.contains(key)) return key;
  }
}

ibv_mr* register_memory(const char* function, ibv_pd* handle, void* address, size_t length, uint64_t iova,
                        unsigned access) {
  Locked f;
  Pd* domain = alive<Pd>(handle, function);
  if (domain == nullptr) return refused(EINVAL);
  constexpr unsigned kKnown = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                              IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_HUGETLB |
                              IBV_ACCESS_OPTIONAL_RANGE;
  const bool writes = (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
  if ((access & ~kKnown) != 0 || (writes && (access & IBV_ACCESS_LOCAL_WRITE) == 0)) {
    violate("%s: access 0x%x; remote writing needs local writing", function, access);
    return refused(EINVAL);
  }
  if (f->options.relaxed == 0 && (access & IBV_ACCESS_RELAXED_ORDERING) != 0) return refused(EINVAL);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (length == 0 || begin + length < begin || iova + length < iova) return refused(EINVAL);
  if (context_of(domain->context)->owner->fatal) return refused(EIO);
  if (f->faults.registration_failures > 0) {
    --f->faults.registration_failures;
    return refused(ENOMEM);
  }
  if (f->local_keys.size() >= f->options.max_mr) return refused(ENOMEM);
  if (!mapped(address, length)) return refused(EFAULT);
  auto* made = new Mr;
  made->context = domain->context;
  made->pd = domain;
  made->addr = address;
  made->bytes = static_cast<uint8_t*>(address);
  made->length = length;
  made->iova = iova;
  made->access = access;
  made->lkey = new_key(*f);
  f->local_keys[made->lkey] = made;
  made->rkey = new_key(*f);
  f->remote_keys[made->rkey] = made;
  made->handle = made->lkey;
  ++domain->uses;
  ++f->objects;
  return made;
}

}  // namespace
}  // namespace standin

extern "C" {

ibv_pd* ibv_alloc_pd(ibv_context* handle) {
  Locked f;
  auto* context = alive<Context>(static_cast<verbs_context*>(context_of(handle)), "ibv_alloc_pd");
  if (context == nullptr) return refused(EINVAL);
  if (context->owner->fatal) return refused(EIO);
  auto* made = new Pd;
  made->context = handle;
  ++context->uses;
  ++f->objects;
  return made;
}

int ibv_dealloc_pd(ibv_pd* handle) {
  Locked f;
  Pd* domain = alive<Pd>(handle, "ibv_dealloc_pd");
  if (domain == nullptr) return EINVAL;
  if (domain->uses > 0) {
    violate("ibv_dealloc_pd: %u objects of the domain are left", domain->uses);
    return EBUSY;
  }
  --context_of(domain->context)->uses;
  domain->context = tombstone();
  bury(domain);
  return 0;
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* address, size_t length, uint64_t iova, unsigned access) {
  return register_memory("ibv_reg_mr_iova2", domain, address, length, iova, access);
}

ibv_mr* ibv_reg_mr_iova(ibv_pd* domain, void* address, size_t length, uint64_t iova, int access) {
  return register_memory("ibv_reg_mr_iova", domain, address, length, iova, static_cast<unsigned>(access));
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, size_t length, int access) {
  return register_memory("ibv_reg_mr", domain, address, length, reinterpret_cast<uintptr_t>(address),
                         static_cast<unsigned>(access));
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t length, uint64_t iova, int descriptor, int access) {
  {
    Locked f;
    if (f->options.dmabuf == 0) return refused(EOPNOTSUPP);
  }
  // Offset and address must agree within a page, as in the kernel.
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (offset % page != iova % page) return refused(EINVAL);
  const size_t whole = length + offset % page;
  // A dma-buf begins where its range does. A file that stands for one tells it by its position.
  const off_t begin = lseek(descriptor, 0, SEEK_CUR);
  if (begin < 0) return refused(EBADF);
  void* mapping = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                       begin + static_cast<off_t>(offset / page * page));
  if (mapping == MAP_FAILED) return refused(EBADF);
  ibv_mr* made = register_memory("ibv_reg_dmabuf_mr", domain, static_cast<char*>(mapping) + offset % page, length, iova,
                                 static_cast<unsigned>(access));
  if (made == nullptr) {
    const int code = errno;
    munmap(mapping, whole);
    return refused(code);
  }
  Locked f;
  made->addr = reinterpret_cast<void*>(offset);  // as libibverbs has it
  static_cast<Mr*>(made)->mapping = mapping;
  static_cast<Mr*>(made)->mapping_bytes = whole;
  return made;
}

int ibv_dereg_mr(ibv_mr* handle) {
  Locked f;
  Mr* mr = alive<Mr>(handle, "ibv_dereg_mr");
  if (mr == nullptr) return EINVAL;
  arrive(*f, *mr);
  f->local_keys.erase(mr->lkey);
  f->remote_keys.erase(mr->rkey);
  --static_cast<Pd*>(mr->pd)->uses;
  if (mr->mapping != nullptr) munmap(mr->mapping, mr->mapping_bytes);
  mr->context = tombstone();
  bury(mr);
  return 0;
}

ibv_ah* ibv_create_ah(ibv_pd* handle, ibv_ah_attr* attributes) {
  Locked f;
  Pd* domain = alive<Pd>(handle, "ibv_create_ah");
  if (domain == nullptr) return refused(EINVAL);
  Device& device = *context_of(domain->context)->owner;
  if (device.fatal) return refused(EIO);
  if (f->faults.handle_failures > 0) {
    --f->faults.handle_failures;
    return refused(ENOMEM);
  }
  if (const char* wrong = wrong_address(device, *attributes)) {
    violate("ibv_create_ah: %s", wrong);
    return refused(EINVAL);
  }
  auto* made = new Ah;
  made->context = domain->context;
  made->pd = domain;
  made->attributes = *attributes;
  ++domain->uses;
  ++f->objects;
  return made;
}

int ibv_destroy_ah(ibv_ah* handle) {
  Locked f;
  Ah* ah = alive<Ah>(handle, "ibv_destroy_ah");
  if (ah == nullptr) return EINVAL;
  --static_cast<Pd*>(ah->pd)->uses;
  ah->context = tombstone();
  bury(ah);
  return 0;
}

}  // extern "C"

const char* standin::wrong_address(const Device& device, const ibv_ah_attr& attributes) {
  const ibv_global_route& route = attributes.grh;
  const auto empty = [](const ibv_gid& gid) { return gid.global.subnet_prefix == 0 && gid.global.interface_id == 0; };
  if (attributes.is_global != 1) return "is_global is not 1, as Ethernet needs it";
  if (attributes.port_num != 1) return "the device has port 1 only";
  if (route.sgid_index >= kGids || empty(device.gids[route.sgid_index])) return "sgid_index is of an empty slot";
  if (empty(route.dgid)) return "dgid is empty";
  if (attributes.sl > 15) return "service levels end at 15";
  // A mapped source cannot reach an IPv6 target, nor the other way round.
  const auto ipv4 = [](const ibv_gid& gid) { return gid.global.subnet_prefix == 0; };
  if (ipv4(device.gids[route.sgid_index]) != ipv4(route.dgid)) return "the two GIDs are of different kinds";
  return nullptr;
}
