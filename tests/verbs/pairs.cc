// Exported: queue pairs, but for their states.
#include <algorithm>
#include <bit>
#include <cerrno>

#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"
#include "tests/verbs/operations.h"

using namespace standin;

namespace standin {
namespace {

// Null, or what is wrong.
const char* wrong_limits(const Fabric& f, const ibv_qp_init_attr& wanted) {
  const ibv_qp_cap& cap = wanted.cap;
  const uint64_t sges = std::min<uint64_t>(f.options.max_sge, kSges);
  if (wanted.qp_type != IBV_QPT_RC && wanted.qp_type != IBV_QPT_UD) return "only RC and UD are known";
  if (cap.max_send_wr > f.options.max_qp_wr) return "max_send_wr is above the device's";
  if (wanted.srq == nullptr && cap.max_recv_wr > f.options.max_qp_wr) return "max_recv_wr is above the device's";
  if (cap.max_send_sge > sges) return "max_send_sge is above the device's";
  if (wanted.srq == nullptr && cap.max_recv_sge > sges) return "max_recv_sge is above the device's";
  if (cap.max_inline_data > f.options.max_inline) return "max_inline_data is above the device's";
  return nullptr;
}

void make_fast(Fabric& f, Qp& pair) {
  auto& queue = *static_cast<Cq*>(pair.send_cq);
  pair.fast.on = f.options.fast != 0 && pair.qp_type == IBV_QPT_RC;
  if (!pair.fast.on) return;
  pair.fast.queue = &queue.fast;
  pair.fast.last_swallowed = f.options.fast_imm != 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
  if (queue.fast.used) return;
  queue.fast.used = true;
  queue.fast.ring.resize(std::bit_ceil(static_cast<size_t>(queue.cqe) + 1));
  queue.fast.mask = queue.fast.ring.size() - 1;
}

}  // namespace
}  // namespace standin

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* handle, ibv_qp_init_attr* wanted) {
  Locked f;
  const auto refused = [](int code) {
    errno = code;
    return nullptr;
  };
  Pd* domain = alive<Pd>(handle, "ibv_create_qp");
  if (domain == nullptr) return refused(EINVAL);
  Device& device = *context_of(domain->context)->owner;
  if (device.fatal) return refused(EIO);
  Cq* send_queue = alive<Cq>(wanted->send_cq, "ibv_create_qp");
  Cq* receive_queue = alive<Cq>(wanted->recv_cq, "ibv_create_qp");
  if (send_queue == nullptr || receive_queue == nullptr) return refused(EINVAL);
  if (wanted->srq != nullptr && alive<Srq>(wanted->srq, "ibv_create_qp") == nullptr) return refused(EINVAL);
  if (send_queue->context != domain->context || receive_queue->context != domain->context) {
    violate("ibv_create_qp: a completion queue is of another context");
    return refused(EINVAL);
  }
  // A limit is no breach: programs try which inline size there is.
  if (wrong_limits(*f, *wanted) != nullptr) return refused(EINVAL);
  if (f->faults.pair_failures > 0) {
    --f->faults.pair_failures;
    return refused(ENOMEM);
  }
  if (device.pairs.size() >= f->options.max_qp) return refused(ENOMEM);
  auto* made = new Qp;
  made->context = domain->context;
  made->qp_context = wanted->qp_context;
  made->pd = domain;
  made->send_cq = wanted->send_cq;
  made->recv_cq = wanted->recv_cq;
  made->srq = wanted->srq;
  made->qp_type = wanted->qp_type;
  made->state = IBV_QPS_RESET;
  made->serial = f->pairs_created++;
  made->cap = wanted->cap;
  if (wanted->srq != nullptr) made->cap.max_recv_wr = made->cap.max_recv_sge = 0;
  wanted->cap = made->cap;
  made->signal_all = wanted->sq_sig_all != 0;
  made->device = &device;
  while (device.pairs.contains(device.next_number)) device.next_number = (device.next_number + 1) & 0xffffff;
  made->qp_num = made->handle = device.next_number;
  device.next_number = std::max(kFirstNumber, (device.next_number + 1) & 0xffffff);
  device.pairs[made->qp_num] = made;
  ++domain->uses;
  ++send_queue->uses;
  ++receive_queue->uses;
  if (wanted->srq != nullptr) ++static_cast<Srq*>(wanted->srq)->uses;
  ++f->objects;
  make_fast(*f, *made);
  return made;
}

int ibv_destroy_qp(ibv_qp* handle) {
  Locked f;
  Qp* pair = alive<Qp>(handle, "ibv_destroy_qp");
  if (pair == nullptr) return EINVAL;
  if (pair->async_taken != pair->async_acknowledged) {
    violate("ibv_destroy_qp: events of queue pair %u are not acknowledged", pair->qp_num);
    return EBUSY;
  }
  leave_ghosts(*f, *pair);
  pair->now = IBV_QPS_RESET;
  pair->fast.usable = false;
  f->forget(*pair);
  drop_completions(*f, *pair);
  drop_events(*context_of(pair->context), static_cast<ibv_qp*>(pair));
  pair->device->pairs.erase(pair->qp_num);
  --static_cast<Pd*>(pair->pd)->uses;
  --static_cast<Cq*>(pair->send_cq)->uses;
  --static_cast<Cq*>(pair->recv_cq)->uses;
  if (pair->srq != nullptr) --static_cast<Srq*>(pair->srq)->uses;
  f->add_fast_counts(*pair, &f->buried);
  pair->context = tombstone();
  bury(pair);
  return 0;
}

int ibv_query_qp(ibv_qp* handle, ibv_qp_attr* attributes, int, ibv_qp_init_attr* initial) {
  Locked f;
  Qp* pair = alive<Qp>(handle, "ibv_query_qp");
  if (pair == nullptr) return EINVAL;
  *attributes = pair->attr;
  attributes->qp_state = attributes->cur_qp_state = pair->now;
  attributes->cap = pair->cap;
  attributes->sq_psn = pair->send_psn;
  attributes->rq_psn = pair->expect_psn;
  pair->state = pair->now;
  *initial = {};
  initial->qp_context = pair->qp_context;
  initial->send_cq = pair->send_cq;
  initial->recv_cq = pair->recv_cq;
  initial->srq = pair->srq;
  initial->cap = pair->cap;
  initial->qp_type = pair->qp_type;
  initial->sq_sig_all = pair->signal_all;
  return 0;
}

int ibv_attach_mcast(ibv_qp*, const ibv_gid*, uint16_t) { return EOPNOTSUPP; }
int ibv_detach_mcast(ibv_qp*, const ibv_gid*, uint16_t) { return EOPNOTSUPP; }
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp*) { return nullptr; }

}  // extern "C"
