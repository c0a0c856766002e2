// The tables of functions behind the inline calls of libfabric's headers, and how one gets from a handle to its object.
#pragma once

#include "tests/fabric/fabric.h"

namespace srd {

// Every public structure begins with its fid.
template <typename Object, typename Handle>
Object& behind(fid* handle) {
  return *static_cast<Object*>(reinterpret_cast<Handle*>(handle));
}

// domain.cc
int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** out, void* context);
int register_range(Domain& domain, const fi_mr_attr& attributes, uint64_t flags, fid_mr** out);
// vector.cc
int open_vector(fid_domain* domain, fi_av_attr* attributes, fid_av** out, void* context);
// queue.cc
int open_queue(fid_domain* domain, fi_cq_attr* attributes, fid_cq** out, void* context);
int try_wait(fid_fabric* fabric, fid** objects, int count);
ssize_t read_queue(fid_cq* handle, void* buffer, size_t count);
size_t write_entry(fi_cq_format format, const fi_cq_err_entry& entry, void* buffer);
// endpoint.cc
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** out, void* context);
// post.cc
extern fi_ops_msg message_ops;
extern fi_ops_rma rma_ops;
// free.cc
extern fi_ops_rma free_rma_ops;
ssize_t read_free_queue(fid_cq* handle, void* buffer, size_t count);

// What closes and nothing else.
template <int (*close)(fid*)>
fi_ops* only_close() {
  static fi_ops ops = [] {
    fi_ops made{};
    made.size = sizeof made;
    made.close = close;
    return made;
  }();
  return &ops;
}

// EBUSY, and a violation, for an object that others still stand on.
int refuse_close(const char* what, uint32_t uses);

}  // namespace srd
