// libibverbs, loaded at run time: nothing here is linked, so the package imports on machines without it. Posting and
// polling are inline in its header and go through the tables of the objects that these functions return.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#define TE_HAVE_VERBS 1
#include <infiniband/verbs.h>

#include <memory>
#include <string>

#include "native/status.h"

namespace te::cx7 {

// The macros of the header stand before some of these names; the symbols behind them are what is loaded.
struct Library {
  ibv_device** (*get_device_list)(int*) = nullptr;
  void (*free_device_list)(ibv_device**) = nullptr;
  ibv_context* (*open_device)(ibv_device*) = nullptr;
  int (*close_device)(ibv_context*) = nullptr;
  int (*query_device)(ibv_context*, ibv_device_attr*) = nullptr;
  int (*query_port)(ibv_context*, uint8_t, _compat_ibv_port_attr*) = nullptr;
  int (*query_gid)(ibv_context*, uint8_t, int, ibv_gid*) = nullptr;
  int (*query_pkey)(ibv_context*, uint8_t, int, __be16*) = nullptr;
  ibv_pd* (*alloc_pd)(ibv_context*) = nullptr;
  int (*dealloc_pd)(ibv_pd*) = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int) = nullptr;
  ibv_mr* (*reg_mr_iova2)(ibv_pd*, void*, size_t, uint64_t, unsigned) = nullptr;      // rdma-core 28; may be absent
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int) = nullptr;  // rdma-core 34; may be absent
  int (*dereg_mr)(ibv_mr*) = nullptr;
  ibv_comp_channel* (*create_comp_channel)(ibv_context*) = nullptr;
  int (*destroy_comp_channel)(ibv_comp_channel*) = nullptr;
  int (*get_cq_event)(ibv_comp_channel*, ibv_cq**, void**) = nullptr;
  void (*ack_cq_events)(ibv_cq*, unsigned) = nullptr;
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int) = nullptr;
  int (*destroy_cq)(ibv_cq*) = nullptr;
  ibv_srq* (*create_srq)(ibv_pd*, ibv_srq_init_attr*) = nullptr;
  int (*destroy_srq)(ibv_srq*) = nullptr;
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*) = nullptr;
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int) = nullptr;
  int (*destroy_qp)(ibv_qp*) = nullptr;
  ibv_ah* (*create_ah)(ibv_pd*, ibv_ah_attr*) = nullptr;
  int (*destroy_ah)(ibv_ah*) = nullptr;
  int (*get_async_event)(ibv_context*, ibv_async_event*) = nullptr;
  void (*ack_async_event)(ibv_async_event*) = nullptr;
  const char* (*wc_status_str)(ibv_wc_status) = nullptr;
  const char* (*event_type_str)(ibv_event_type) = nullptr;

  std::string name;  // "libibverbs (libibverbs.so.1)"
};

// Loads the library at the first call; later calls return the same object, which is never unloaded. A failure is not
// remembered: the library may be installed while the process runs. TE_LIBIBVERBS names another file (and it is a library of
// its own, if another was loaded before).
Error load_library(const Library** out);

// Owns an object of libibverbs and gives it back with the function that belongs to it.
template <typename Object>
struct Giver {
  int (*give_back)(Object*) = nullptr;
  void operator()(Object* object) const { give_back(object); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, Giver<Object>>;

}  // namespace te::cx7
#endif
