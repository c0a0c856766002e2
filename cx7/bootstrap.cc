// The bootstrap queue pair: an unreliable datagram queue pair (UD) whose number is the NIC's public address. It carries the
// messages of the handshake and nothing else; what does not fit, is garbage or is too much is dropped, as the network may do.
#include <cerrno>
#include <cstring>

#include "cx7/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {
namespace {

// In front of every datagram received: the global routing header (InfiniBand 8.3; on RoCEv2 over IPv4 only its last 20 bytes mean something).
constexpr uint32_t kHeaderBytes = 40;
// As long as the longest datagram there is, so that a stranger's cannot make a length error.
constexpr uint32_t kParcelBytes = kHeaderBytes + 4096;
constexpr uint64_t kOutgoingFlag = 1u << 31;

}  // namespace

Error Nic::open_bootstrap() {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_UD;
  attributes.send_cq = attributes.recv_cq = bootstrap_completions_.get();
  attributes.cap.max_send_wr = sizes_.outgoing;
  attributes.cap.max_recv_wr = sizes_.incoming;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  ibv_qp* pair = library_.create_qp(domain_.get(), &attributes);
  if (pair == nullptr) return fail("ibv_create_qp (datagrams)", errno);
  bootstrap_ = Owned<ibv_qp>(pair, {library_.destroy_qp});

  std::memcpy(own_.gid, port_.gid, 16);
  own_.lid = port_attributes_.lid;
  own_.ethernet = port_.ethernet;
  own_.queue_pair = pair->qp_num;
  if (!random_bytes(&own_.queue_key, sizeof own_.queue_key) || !random_bytes(&own_.cookie, sizeof own_.cookie))
    return fail("getrandom", errno);
  own_.queue_key &= 0x7FFFFFFF;  // the kernel keeps keys with bit 31 for itself

  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.pkey_index = static_cast<uint16_t>(options_.rdma.pkey_index);
  change.port_num = port_.number;
  change.qkey = own_.queue_key;
  int status = library_.modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  if (status != 0) return fail("the datagram queue pair to INIT", status);
  change = ibv_qp_attr{};
  change.qp_state = IBV_QPS_RTR;
  if (status = library_.modify_qp(pair, &change, IBV_QP_STATE); status != 0)
    return fail("the datagram queue pair to ready-to-receive", status);
  change.qp_state = IBV_QPS_RTS;
  if (status = library_.modify_qp(pair, &change, IBV_QP_STATE | IBV_QP_SQ_PSN); status != 0)
    return fail("the datagram queue pair to ready-to-send", status);

  const size_t bytes = size_t{kParcelBytes} * (sizes_.incoming + sizes_.outgoing);
  parcel_memory_.reset(new uint8_t[bytes]());
  ibv_mr* registration = library_.reg_mr(domain_.get(), parcel_memory_.get(), bytes, IBV_ACCESS_LOCAL_WRITE);
  if (registration == nullptr) return fail("registering the datagram buffers", errno);
  parcel_registration_ = Owned<ibv_mr>(registration, {library_.dereg_mr});
  incoming_.resize(sizes_.incoming);
  outgoing_.resize(sizes_.outgoing);
  uint8_t* data = parcel_memory_.get();
  for (std::vector<Parcel>* parcels : {&incoming_, &outgoing_})
    for (Parcel& parcel : *parcels) {
      parcel.data = data;
      data += kParcelBytes;
    }
  for (uint32_t i = 0; i < sizes_.outgoing; ++i) free_parcels_.push_back(i);
  for (uint32_t i = 0; i < sizes_.incoming; ++i)
    if (!post_parcel_receive(i)) return fail("posting datagram receives", ENOMEM);

  resolver_ = std::make_unique<Resolver>(library_, domain_.get());
  if (Error error = resolver_->start()) return error;
  description_.address = encode(own_);
  Switchboard::Options options;
  std::memcpy(options.identity, options_.identity, sizeof options.identity);
  options.generation = options_.generation;
  options.own = own_;
  if (options_.connect_timeout_ns > 0) options.patience_ns = options_.connect_timeout_ns;
  switchboard_ = std::make_unique<Switchboard>(options, this);
  return {};
}

bool Nic::post_parcel_receive(uint32_t index) {
  ibv_sge piece{};
  piece.addr = reinterpret_cast<uint64_t>(incoming_[index].data);
  piece.length = kParcelBytes;
  piece.lkey = parcel_registration_->lkey;
  ibv_recv_wr request{}, *bad = nullptr;
  request.wr_id = index;
  request.sg_list = &piece;
  request.num_sge = 1;
  return ibv_post_recv(bootstrap_.get(), &request, &bad) == 0;
}

// What cannot be sent now is as good as lost: offers are repeated. Sent is once the way is known; until then a newer message to the
// same NIC takes the place of the older one.
void Nic::send(const NicAddress& to, const HandshakeMessage& message) {
  if (!up_.load(std::memory_order_relaxed)) return;
  const HandshakeBytes bytes = encode(message);
  for (Parcel& parcel : outgoing_) {
    if (!parcel.resolving || parcel.to != to) continue;
    std::memcpy(parcel.data, bytes.data(), bytes.size());
    return;
  }
  if (free_parcels_.empty()) return;
  const uint32_t index = free_parcels_.back();
  free_parcels_.pop_back();
  Parcel& parcel = outgoing_[index];
  std::memcpy(parcel.data, bytes.data(), bytes.size());
  parcel.to = to;
  parcel.resolving = true;
  ibv_ah_attr route;
  fill_route(to, &route);
  resolver_->ask(index, route);
}

uint32_t Nic::post_parcels() {
  uint32_t count = 0;
  for (Resolver::Answer answer; resolver_->take(&answer); ++count) {
    Parcel& parcel = outgoing_[answer.parcel];
    parcel.resolving = false;
    if (answer.handle == nullptr) {
      free_parcels_.push_back(answer.parcel);
      continue;
    }
    parcel.handle = Owned<ibv_ah>(answer.handle, {library_.destroy_ah});
    ibv_sge piece{};
    piece.addr = reinterpret_cast<uint64_t>(parcel.data);
    piece.length = static_cast<uint32_t>(kHandshakeBytes);
    piece.lkey = parcel_registration_->lkey;
    ibv_send_wr request{}, *bad = nullptr;
    request.wr_id = kOutgoingFlag | answer.parcel;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.ud.ah = answer.handle;
    request.wr.ud.remote_qpn = parcel.to.queue_pair;
    request.wr.ud.remote_qkey = parcel.to.queue_key;
    if (ibv_post_send(bootstrap_.get(), &request, &bad) == 0) continue;
    parcel.handle.reset();
    free_parcels_.push_back(answer.parcel);
  }
  return count;
}

uint32_t Nic::poll_bootstrap() {
  const uint32_t posted = resolver_->has_answers() ? post_parcels() : 0;
  ibv_wc entries[8];
  const int count = ibv_poll_cq(bootstrap_completions_.get(), 8, entries);
  for (int i = 0; i < count; ++i) {
    const ibv_wc& entry = entries[i];
    const auto index = static_cast<uint32_t>(entry.wr_id & ~kOutgoingFlag);
    if ((entry.wr_id & kOutgoingFlag) != 0) {
      outgoing_[index].handle.reset();
      free_parcels_.push_back(index);
      continue;
    }
    if (entry.status != IBV_WC_SUCCESS) {  // flushed: one that is posted again would be, too
      bootstrap_failed();
      continue;
    }
    if (entry.byte_len > kHeaderBytes)
      switchboard_->receive(std::span(incoming_[index].data + kHeaderBytes, entry.byte_len - kHeaderBytes), now_ns());
    if (!post_parcel_receive(index)) bootstrap_failed();
  }
  return posted + (count > 0 ? static_cast<uint32_t>(count) : 0);
}

}  // namespace te::cx7
#endif
