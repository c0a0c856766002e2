#include "cx7/library.h"

#ifdef TE_HAVE_VERBS
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "native/system.h"

namespace te::cx7 {
namespace {

struct Symbol {
  const char* name;
  void** slot;
  bool required;
};

template <typename Function>
void** slot(Function* function) {
  static_assert(sizeof(Function) == sizeof(void*));
  return reinterpret_cast<void**>(function);
}

Error load(const std::string& file, Library* l) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const std::string reason = dlerror();
    const char* named = std::getenv("TE_LIBIBVERBS");
    if (named != nullptr && *named != '\0')
      return Error(
          Status::kTransportUnavailable,
          format("TE_LIBIBVERBS is set to %s, which cannot be loaded: %s: correct or unset it", named, reason.c_str()));
    if (reason.rfind(file, 0) != 0 || reason.find("No such file") == std::string::npos)  // it, or what it needs
      return Error(Status::kTransportUnavailable, format("%s cannot be loaded: %s", file.c_str(), reason.c_str()));
    return Error(
        Status::kTransportUnavailable,
        format("%s not found: install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core (others), "
               "or set TE_LIBIBVERBS to its path (%s)",
               file.c_str(), reason.c_str()));
  }
  const Symbol symbols[] = {
      {"ibv_get_device_list", slot(&l->get_device_list), true},
      {"ibv_free_device_list", slot(&l->free_device_list), true},
      {"ibv_open_device", slot(&l->open_device), true},
      {"ibv_close_device", slot(&l->close_device), true},
      {"ibv_query_device", slot(&l->query_device), true},
      {"ibv_query_port", slot(&l->query_port), true},
      {"ibv_query_gid", slot(&l->query_gid), true},
      {"ibv_query_pkey", slot(&l->query_pkey), true},
      {"ibv_alloc_pd", slot(&l->alloc_pd), true},
      {"ibv_dealloc_pd", slot(&l->dealloc_pd), true},
      {"ibv_reg_mr", slot(&l->reg_mr), true},
      {"ibv_reg_mr_iova2", slot(&l->reg_mr_iova2), false},
      {"ibv_reg_dmabuf_mr", slot(&l->reg_dmabuf_mr), false},
      {"ibv_dereg_mr", slot(&l->dereg_mr), true},
      {"ibv_create_comp_channel", slot(&l->create_comp_channel), true},
      {"ibv_destroy_comp_channel", slot(&l->destroy_comp_channel), true},
      {"ibv_get_cq_event", slot(&l->get_cq_event), true},
      {"ibv_ack_cq_events", slot(&l->ack_cq_events), true},
      {"ibv_create_cq", slot(&l->create_cq), true},
      {"ibv_destroy_cq", slot(&l->destroy_cq), true},
      {"ibv_create_srq", slot(&l->create_srq), true},
      {"ibv_destroy_srq", slot(&l->destroy_srq), true},
      {"ibv_create_qp", slot(&l->create_qp), true},
      {"ibv_modify_qp", slot(&l->modify_qp), true},
      {"ibv_destroy_qp", slot(&l->destroy_qp), true},
      {"ibv_create_ah", slot(&l->create_ah), true},
      {"ibv_destroy_ah", slot(&l->destroy_ah), true},
      {"ibv_get_async_event", slot(&l->get_async_event), true},
      {"ibv_ack_async_event", slot(&l->ack_async_event), true},
      {"ibv_wc_status_str", slot(&l->wc_status_str), true},
      {"ibv_event_type_str", slot(&l->event_type_str), true},
  };
  for (const Symbol& symbol : symbols) {
    // The default version of each symbol is the newest; all of these have had the same one since rdma-core 1.1.
    *symbol.slot = dlsym(handle, symbol.name);
    if (*symbol.slot != nullptr || !symbol.required) continue;
    dlclose(handle);
    return Error(Status::kTransportUnavailable,
                 format("%s lacks %s: install a newer rdma-core", file.c_str(), symbol.name));
  }
  // ibv_fork_init is not called. It would keep registered pages out of forked children, and whatever else lies in those pages with
  // them: a child of an interpreter does not live long without pieces of its heap (seen: SIGSEGV). Linux 5.12 and later copy
  // registered pages for the child at the fork, and need no such call; for older kernels there is RDMAV_FORK_SAFE=1.
  l->name = format("libibverbs (%s)", file.substr(file.rfind('/') + 1).c_str());
  return {};
}

}  // namespace

Error load_library(const Library** out) {
  static std::mutex mutex;
  static std::map<std::string, Library> loaded;
  [[maybe_unused]] static const bool held = (hold_across_forks(&mutex), true);
  const char* named = std::getenv("TE_LIBIBVERBS");
  const std::string file = named != nullptr && *named != '\0' ? named : "libibverbs.so.1";
  const std::lock_guard lock(mutex);
  auto found = loaded.find(file);
  if (found == loaded.end()) {
    Library candidate;
    if (Error error = load(file, &candidate)) return error;
    found = loaded.emplace(file, candidate).first;
  }
  *out = &found->second;
  return {};
}

}  // namespace te::cx7
#endif
