// Queue pairs: made, bound to those of a peer, and given back once they have drained.
#include <algorithm>
#include <bit>
#include <cstring>

#include "cx7/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {
namespace {

constexpr uint8_t kHopLimit = 64;
constexpr int kMostReads = 16;                     // RDMA reads at a time, only used by flushes
constexpr int64_t kDrainPatience = 5'000'000'000;  // with a device that does not flush a failed queue pair
constexpr int64_t kReceivePatience = 500'000'000;  // with one that does not tell of the last receive

}  // namespace

bool Nic::make(uint32_t connection, QueuePairs* ours) {
  if (connection >= connections_.size()) connections_.resize(connection + 1);
  destroy(connection);
  for (uint8_t kind = 0; kind < kPairs; ++kind) {
    const uint32_t id = make_queue(kind, connection);
    if (id == kNone) {
      destroy(connection);
      return false;
    }
    connections_[connection].queues[kind] = id;
    ours->number[kind] = queues_[id]->pair->qp_num;
    ours->sequence[kind] = queues_[id]->sequence;
    connection_by_pair_[ours->number[kind]] = connection;
  }
  ours->mtu = static_cast<uint8_t>(mtu_);
  ours->reads = static_cast<uint8_t>(std::clamp(device_.max_qp_rd_atom, 1, kMostReads));
  return true;
}

uint32_t Nic::make_queue(uint8_t kind, uint32_t connection) {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.send_cq = attributes.recv_cq = completions_.get();
  attributes.srq = kind == kMessages ? message_receives_.get() : immediate_receives_.get();
  attributes.cap.max_send_wr = sizes_.sends;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_inline_data = inline_bytes_;
  ibv_qp* pair = library_.create_qp(domain_.get(), &attributes);
  if (pair == nullptr) return kNone;
  auto queue = std::make_unique<Queue>();
  queue->pair = Owned<ibv_qp>(pair, {library_.destroy_qp});
  // Some providers report what was asked for, some what they gave; never less.
  queue->inline_bytes = std::min(attributes.cap.max_inline_data, inline_bytes_);
  static_cast<void>(random_bytes(&queue->sequence, sizeof queue->sequence));
  queue->sequence &= 0xFFFFFF;
  queue->connection = connection;
  queue->depth = sizes_.sends - 1;
  queue->mask = std::bit_ceil(sizes_.sends) - 1;
  queue->contexts.reset(new WorkContext*[queue->mask + 1]);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.pkey_index = static_cast<uint16_t>(options_.rdma.pkey_index);
  change.port_num = port_.number;
  change.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (library_.modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0)
    return kNone;
  if (free_queues_.empty()) {
    queues_.push_back(std::move(queue));
    return static_cast<uint32_t>(queues_.size() - 1);
  }
  const uint32_t id = free_queues_.back();
  free_queues_.pop_back();
  queues_[id] = std::move(queue);
  return id;
}

void Nic::fill_route(const NicAddress& remote, ibv_ah_attr* attributes) const {
  *attributes = ibv_ah_attr{};
  attributes->port_num = port_.number;
  attributes->sl = static_cast<uint8_t>(options_.rdma.service_level);
  attributes->dlid = remote.lid;
  // RoCE always has the global header; InfiniBand needs it between subnets, which the upper half of the GID names.
  attributes->is_global = own_.ethernet || std::memcmp(remote.gid, own_.gid, 8) != 0;
  if (attributes->is_global == 0) return;
  std::memcpy(attributes->grh.dgid.raw, remote.gid, 16);
  attributes->grh.sgid_index = static_cast<uint8_t>(port_.gid_index);
  attributes->grh.hop_limit = kHopLimit;
  attributes->grh.traffic_class = static_cast<uint8_t>(options_.rdma.traffic_class);
}

bool Nic::bind(uint32_t connection, const NicAddress& remote, const QueuePairs& theirs) {
  for (uint8_t kind = 0; kind < kPairs; ++kind) {
    Queue& queue = *queues_[connections_[connection].queues[kind]];
    if (!bind_queue(queue, kind, remote, theirs)) return false;
  }
  return true;
}

// INIT to ready-to-receive to ready-to-send, with the attributes that InfiniBand requires of a reliable connection (table 96).
bool Nic::bind_queue(Queue& queue, uint8_t kind, const NicAddress& remote, const QueuePairs& theirs) {
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_RTR;
  change.path_mtu = std::min(mtu_, static_cast<ibv_mtu>(theirs.mtu));
  change.dest_qp_num = theirs.number[kind];
  change.rq_psn = theirs.sequence[kind];
  change.max_dest_rd_atomic = static_cast<uint8_t>(std::clamp(device_.max_qp_rd_atom, 1, kMostReads));
  change.min_rnr_timer = static_cast<uint8_t>(options_.rdma.rnr_timer);
  fill_route(remote, &change.ah_attr);
  if (library_.modify_qp(queue.pair.get(), &change,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0)
    return false;
  change = ibv_qp_attr{};
  change.qp_state = IBV_QPS_RTS;
  change.timeout = static_cast<uint8_t>(options_.rdma.ack_timeout);
  change.retry_cnt = static_cast<uint8_t>(options_.rdma.retry_count);
  change.rnr_retry = static_cast<uint8_t>(options_.rdma.rnr_retry);
  change.sq_psn = queue.sequence;
  queue.bound = true;
  change.max_rd_atomic =
      static_cast<uint8_t>(std::clamp<int>(std::min<int>(theirs.reads, device_.max_qp_init_rd_atom), 1, kMostReads));
  return library_.modify_qp(queue.pair.get(), &change,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                IBV_QP_MAX_QP_RD_ATOMIC) == 0;
}

// Into the error state: everything outstanding completes, what comes in is refused.
void Nic::flush_queue(Queue& queue) {
  queue.failed = true;
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_ERR;
  static_cast<void>(library_.modify_qp(queue.pair.get(), &change, IBV_QP_STATE));
}

void Nic::destroy(uint32_t connection) {
  forget_events(connection);
  for (uint32_t& id : connections_[connection].queues) {
    if (id == kNone) continue;
    Queue& queue = *queues_[id];
    connection_by_pair_.erase(queue.pair->qp_num);
    queue.connection = kNone;
    if (queue.bound) {
      flush_queue(queue);
      queue.dying_since_ns = now_ns();
      dying_.push_back(id);
    } else {
      bury(id);
    }
    id = kNone;
  }
}

void Nic::bury(uint32_t id) {
  std::erase(markers_due_, id);
  queues_[id].reset();
  free_queues_.push_back(id);
}

// A queue pair may only be destroyed once its completions are out, those of receives included: the device drops what is left. So it
// goes to the error state, where it takes no more receives; the device says when the last one has been taken
// (IBV_EVENT_QP_LAST_WQE_REACHED); after that the completion queue is read until it is empty. What a device does not flush in
// time is reported with an unknown outcome.
void Nic::reap(int64_t now) {
  for (size_t i = 0; i < dying_.size();) {
    const uint32_t id = dying_[i];
    Queue& queue = *queues_[id];
    const int64_t age = now - queue.dying_since_ns;
    while (age > kDrainPatience && queue.head != queue.tail) {
      WorkContext* context = queue.contexts[queue.head++ & queue.mask];
      if (context == nullptr) continue;
      Completion ended;
      ended.status = Status::kCancelled;
      ended.landed_unknown = true;
      ended.context = context;
      events_.push_back(ended);
    }
    if (queue.buried_at == 0 && (queue.receives_ended || age > kReceivePatience)) queue.buried_at = empty_polls_ + 1;
    if (queue.head != queue.tail || queue.buried_at == 0 || empty_polls_ < queue.buried_at) {
      ++i;
      continue;
    }
    bury(id);
    dying_.erase(dying_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Nic::up(uint32_t connection) {
  Completion event;
  event.kind = CompletionKind::kPathUp;
  event.path = connection;
  events_.push_back(event);
}

void Nic::down(uint32_t connection, Loss loss) {
  for (const uint32_t id : connections_[connection].queues)
    if (id != kNone && !queues_[id]->failed) flush_queue(*queues_[id]);
  Completion event;
  event.kind = CompletionKind::kPathDown;
  event.path = connection;
  event.status = loss_status(loss);
  event.detail = loss_text(loss);
  events_.push_back(event);
}

void Nic::forget_events(uint32_t connection) {
  std::erase_if(events_, [connection](const Completion& event) {
    return (event.kind == CompletionKind::kPathUp || event.kind == CompletionKind::kPathDown) &&
           event.path == connection;
  });
}

}  // namespace te::cx7
#endif
