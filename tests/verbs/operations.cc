#include "tests/verbs/operations.h"

#include <cerrno>

#include "tests/verbs/fabric.h"

namespace standin {
namespace {

template <typename Request>
int late(const char* function, Request* request, Request** bad) {
  Locked f;
  violate("%s: the object was destroyed", function);
  *bad = request;
  return EINVAL;
}

int late_poll(ibv_cq*, int, ibv_wc*) {
  Locked f;
  violate("ibv_poll_cq: the queue was destroyed");
  return -1;
}

int late_arm(ibv_cq*, int) {
  Locked f;
  violate("ibv_req_notify_cq: the queue was destroyed");
  return EINVAL;
}

int late_receive(ibv_qp*, ibv_recv_wr* request, ibv_recv_wr** bad) { return late("ibv_post_recv", request, bad); }
int late_shared(ibv_srq*, ibv_recv_wr* request, ibv_recv_wr** bad) { return late("ibv_post_srq_recv", request, bad); }
int late_send(ibv_qp*, ibv_send_wr* request, ibv_send_wr** bad) { return late("ibv_post_send", request, bad); }

}  // namespace

ibv_context_ops operations() {
  ibv_context_ops ops{};
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  ops.post_srq_recv = post_srq_recv;
  ops.post_send = post_send_fast;
  ops.post_recv = post_recv;
  return ops;
}

ibv_context* tombstone() {
  static verbs_context* const stone = [] {
    auto* made = new verbs_context{};
    ibv_context_ops& ops = made->context.ops;
    ops.poll_cq = late_poll;
    ops.req_notify_cq = late_arm;
    ops.post_srq_recv = late_shared;
    ops.post_send = late_send;
    ops.post_recv = late_receive;
    made->sz = sizeof *made;
    made->context.async_fd = made->context.cmd_fd = -1;
    made->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    return made;
  }();
  return &stone->context;
}

}  // namespace standin
