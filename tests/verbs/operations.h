// The functions that programs reach through the table of a context.
#pragma once

#include "tests/verbs/objects.h"

namespace standin {

ibv_context_ops operations();

int poll_cq(ibv_cq* queue, int most, ibv_wc* out);
int req_notify_cq(ibv_cq* queue, int solicited_only);
int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** bad);
int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad);
int post_recv(ibv_qp* pair, ibv_recv_wr* request, ibv_recv_wr** bad);

// fast.cc
int post_send_fast(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad);

}  // namespace standin
