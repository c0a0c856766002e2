// Posting: what a device's library checks before it takes a work request.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tests/verbs/execution.h"
#include "tests/verbs/operations.h"

namespace standin {
namespace {

bool is_send(ibv_wr_opcode opcode) { return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM; }
bool is_write(ibv_wr_opcode opcode) { return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }

uint64_t length_of(const ibv_send_wr& request) {
  uint64_t length = 0;
  for (int i = 0; i < request.num_sge; ++i) length += request.sg_list[i].length;
  return length;
}

// Null, or why a correct program does not post this.
const char* wrong_request(const Qp& pair, const ibv_send_wr& request) {
  const bool reliable = pair.qp_type == IBV_QPT_RC;
  const bool known =
      is_send(request.opcode) || (reliable && (is_write(request.opcode) || request.opcode == IBV_WR_RDMA_READ));
  if (!known) return "the opcode is not one of this kind of queue pair";
  if (request.num_sge < 0 || static_cast<uint32_t>(request.num_sge) > pair.cap.max_send_sge)
    return "more parts than max_send_sge";
  const bool inlined = (request.send_flags & IBV_SEND_INLINE) != 0;
  if (inlined && request.opcode == IBV_WR_RDMA_READ) return "a read cannot be inline";
  if (inlined && length_of(request) > pair.cap.max_inline_data) return "more inline bytes than max_inline_data";
  if (length_of(request) > 0xffffffff) return "longer than 4 GiB";
  if (request.opcode == IBV_WR_RDMA_READ && pair.attr.max_rd_atomic == 0) return "max_rd_atomic is 0";
  if (reliable) return nullptr;
  const Ah* ah = static_cast<Ah*>(request.wr.ud.ah);
  if (ah == nullptr || !ah->alive) return "the address handle was destroyed, or is null";
  if (ah->pd != pair.pd) return "the address handle is of another protection domain";
  if (request.wr.ud.remote_qpn > 0xffffff) return "remote_qpn has 24 bits";
  return request.wr.ud.remote_qkey >> 31 != 0 ? "remote_qkey: bit 31 is for the privileged" : nullptr;
}

Send take(Fabric& f, Qp& pair, const ibv_send_wr& request) {
  Send work;
  work.id = request.wr_id;
  work.index = pair.posted++;
  work.opcode = request.opcode;
  work.signalled = pair.signal_all || (request.send_flags & IBV_SEND_SIGNALED) != 0;
  work.solicited = (request.send_flags & IBV_SEND_SOLICITED) != 0;
  work.inlined = (request.send_flags & IBV_SEND_INLINE) != 0;
  work.with_immediate = request.opcode == IBV_WR_SEND_WITH_IMM || request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  work.immediate = request.imm_data;
  work.length = static_cast<uint32_t>(length_of(request));
  if (work.inlined) {
    work.payload.reserve(work.length);
    for (int i = 0; i < request.num_sge; ++i) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(request.sg_list[i].addr);
      work.payload.insert(work.payload.end(), bytes, bytes + request.sg_list[i].length);
    }
  } else {
    work.part_count = static_cast<size_t>(request.num_sge);
    std::copy_n(request.sg_list, work.part_count, work.parts.begin());
  }
  if (pair.qp_type == IBV_QPT_UD) {
    work.to = static_cast<Ah*>(request.wr.ud.ah)->attributes;
    work.to_number = request.wr.ud.remote_qpn;
    work.to_key = request.wr.ud.remote_qkey;
    return work;
  }
  if (!is_send(request.opcode)) {
    work.remote_address = request.wr.rdma.remote_addr;
    work.remote_key = request.wr.rdma.rkey;
  }
  if (f.faults.error_in > 0 && --f.faults.error_in == 0) {
    work.injected = f.faults.error_status;
    work.injected_late = f.faults.error_late;
  }
  return work;
}

constexpr uint64_t kAll = ~uint64_t{0};

template <typename Request>
uint64_t length_of_chain(const Request* request) {
  uint64_t count = 0;
  for (; request != nullptr; request = request->next) ++count;
  return count;
}

// How many requests of this call are taken at most.
uint64_t partial_limit(Fabric& f, const ibv_send_wr* request) {
  Faults& faults = f.faults;
  if (faults.partial_left > 0) {
    --faults.partial_left;
    return faults.partial_take;
  }
  if (faults.partial_period > 0 && ++faults.calls_since >= faults.partial_period) {
    faults.calls_since = 0;
    return faults.partial_take;
  }
  if (request->next == nullptr || !f.random.chance(f.options.post_partial)) return kAll;
  return f.random.below(length_of_chain(request));
}

uint64_t receive_limit(Fabric& f, const Srq& queue, const ibv_recv_wr* request) {
  if (f.faults.srq_refusals > 0) {
    --f.faults.srq_refusals;
    return 0;
  }
  return queue.begun && f.random.chance(f.options.srq_full) ? f.random.below(length_of_chain(request)) : kAll;
}

void count(Fabric& f, const Send& work, bool first) {
  ++f.counts.posted;
  if (work.signalled) ++f.counts.signalled;
  if (work.inlined) ++f.counts.inlined;
  if (!first) ++f.counts.chained;
}

int refuse_send(Fabric& f, Qp& pair, ibv_send_wr* request, ibv_send_wr** bad, int code) {
  ++f.counts.refused;
  *bad = request;
  f.schedule(pair);
  return code;
}

// Null, or why a correct program does not post this.
const char* wrong_receive(const ibv_recv_wr& request, uint32_t most_parts) {
  return request.num_sge < 0 || static_cast<uint32_t>(request.num_sge) > most_parts ? "more parts than max_sge"
                                                                                    : nullptr;
}

int post_receives(Fabric& f, std::deque<Receive>& queue, size_t depth, uint32_t most_parts, ibv_recv_wr* request,
                  ibv_recv_wr** bad, uint64_t left = kAll) {
  for (; request != nullptr; request = request->next, --left) {
    const char* wrong = wrong_receive(*request, most_parts);
    if (wrong != nullptr) violate("posting a receive: %s", wrong);
    if (wrong != nullptr || left == 0 || queue.size() >= depth) {
      ++f.counts.refused;
      *bad = request;
      return wrong != nullptr ? EINVAL : ENOMEM;
    }
    ++f.counts.receives;
    queue.push_back({request->wr_id, {request->sg_list, request->sg_list + request->num_sge}});
  }
  return 0;
}

}  // namespace

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
  Locked f;
  Qp& pair = *static_cast<Qp*>(handle);
  ++f->counts.calls;
  if (pair.device->fatal) return refuse_send(*f, pair, request, bad, EIO);
  if (request == nullptr) {
    violate("ibv_post_send: there is nothing to post");
    return EINVAL;
  }
  if (pair.now != IBV_QPS_RTS && pair.now != IBV_QPS_ERR) {
    violate("ibv_post_send: queue pair %u is not ready to send", pair.qp_num);
    return refuse_send(*f, pair, request, bad, EINVAL);
  }
  uint64_t left = partial_limit(*f, request);
  for (bool first = true; request != nullptr; request = request->next, first = false, --left) {
    if (const char* wrong = wrong_request(pair, *request)) {
      violate("ibv_post_send: queue pair %u: %s", pair.qp_num, wrong);
      return refuse_send(*f, pair, request, bad, EINVAL);
    }
    if (left == 0 || pair.posted - pair.freed >= pair.cap.max_send_wr)
      return refuse_send(*f, pair, request, bad, ENOMEM);
    pair.sends.push_back(take(*f, pair, *request));
    count(*f, pair.sends.back(), first);
  }
  f->schedule(pair);
  return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  Locked f;
  Qp& pair = *static_cast<Qp*>(handle);
  if (pair.srq != nullptr || pair.now == IBV_QPS_RESET) {
    violate("ibv_post_recv: queue pair %u %s", pair.qp_num,
            pair.srq != nullptr ? "has a shared receive queue" : "is in RESET");
    *bad = request;
    return EINVAL;
  }
  if (pair.device->fatal) {
    *bad = request;
    return EIO;
  }
  const int code = post_receives(*f, pair.receives, pair.cap.max_recv_wr, pair.cap.max_recv_sge, request, bad);
  f->schedule(pair);
  return code;
}

int post_srq_recv(ibv_srq* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  Locked f;
  Srq* queue = alive<Srq>(handle, "ibv_post_srq_recv");
  if (queue == nullptr) return EINVAL;
  *bad = request;
  if (context_of(queue->context)->owner->fatal) return EIO;
  return post_receives(*f, queue->queue, queue->attributes.max_wr, queue->attributes.max_sge, request, bad,
                       receive_limit(*f, *queue, request));
}

}  // namespace standin
