// Set-up and tear-down of a NIC.
#include "cx7/nic.h"

#ifdef TE_HAVE_VERBS
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "native/system.h"

namespace te::cx7 {
namespace {

constexpr uint64_t kLongestWrite = 1u << 30;
constexpr uint32_t kSendBytes = 64u << 10;
constexpr uint32_t kMostInline =
    128;  // bytes copied into the work request itself: saves the device a read of host memory

}  // namespace

Nic::Nic(const Library& library, const Port& port, const ProviderOptions& options)
    : library_(library), options_(options), port_(port) {
  description_.name = port.number == 1 ? port.device : format("%s:%u", port.device.c_str(), port.number);
}

// A connection that is still open is dropped without a word: the engine has said its goodbyes.
Nic::~Nic() {
  queues_.clear();
  resolver_.reset();
  for (Parcel& parcel : outgoing_) parcel.handle.reset();
  if (wait_fd_ >= 0) ::close(wait_fd_);
}

Error Nic::fail(const char* what, int code) const {
  const int number = code < 0 ? -code : code;
  std::string hint;
  if (number == ENOMEM) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY)
      hint = format(
          " (at most %llu KiB of memory may be locked: ulimit -l, LimitMEMLOCK=infinity, or --ulimit memlock=-1)",
          static_cast<unsigned long long>(limit.rlim_cur >> 10));
  }
  return Error(Status::kTransport,
               format("%s on NIC %s: %s%s", what, description_.name.c_str(), std::strerror(number), hint.c_str()),
               number);
}

Error Nic::open(const Library& library, const Port& port, const ProviderOptions& options, std::unique_ptr<Nic>* out) {
  std::unique_ptr<Nic> nic(new Nic(library, port, options));
  if (Error error = nic->open_device()) return error;
  if (Error error = nic->open_queues()) return error;
  if (Error error = nic->open_bootstrap()) return error;
  if (Error error = nic->open_sleep()) return error;
  nic->describe_capabilities();
  *out = std::move(nic);
  return {};
}

Error Nic::open_device() {
  int count = 0;
  ibv_device** devices = library_.get_device_list(&count);
  if (devices == nullptr) return fail("ibv_get_device_list", errno);
  ibv_context* context = nullptr;
  bool found = false;
  for (int i = 0; i < count && !found; ++i) {
    found = port_.device == devices[i]->name;
    if (found) context = library_.open_device(devices[i]);
  }
  const int code = errno;
  library_.free_device_list(devices);
  if (!found) {
    return Error(Status::kTransportUnavailable,
                 format("%s: the kernel has this device, but %s does not show it: install its user-space provider "
                        "(ibverbs-providers), and give the process access to /dev/infiniband",
                        port_.device.c_str(), library_.name.c_str()));
  }
  if (context == nullptr) {
    return Error(Status::kTransportUnavailable,
                 format("%s cannot be opened: %s; the process needs access to /dev/infiniband/uverbs*",
                        port_.device.c_str(), std::strerror(code)),
                 code);
  }
  context_ = Owned<ibv_context>(context, {library_.close_device});
  if (const int status = library_.query_device(context, &device_); status != 0) return fail("ibv_query_device", status);
  // The symbol fills what was known of ports when it was made, which is all that is used here.
  if (const int status =
          library_.query_port(context, port_.number, reinterpret_cast<_compat_ibv_port_attr*>(&port_attributes_));
      status != 0)
    return fail("ibv_query_port", status);
  mtu_ = port_attributes_.active_mtu;
  if (options_.rdma.path_mtu != 0) {
    const auto wanted = static_cast<ibv_mtu>(std::countr_zero(options_.rdma.path_mtu) - 7);  // 256 is 1
    if (wanted > mtu_) {
      return Error(Status::kConfig, format("path_mtu is %u; port %u of %s takes at most %u", options_.rdma.path_mtu,
                                           port_.number, port_.device.c_str(), 128u << mtu_));
    }
    mtu_ = wanted;
  }
  ibv_pd* domain = library_.alloc_pd(context);
  if (domain == nullptr) return fail("ibv_alloc_pd", errno);
  domain_ = Owned<ibv_pd>(domain, {library_.dealloc_pd});
  return {};
}

Error Nic::open_queues() {
  if (Error error = fit_queues(description_.name, device_, options_.nic_depth, options_.completion_depth, &sizes_))
    return error;
  ibv_comp_channel* channel = library_.create_comp_channel(context_.get());
  if (channel == nullptr) return fail("ibv_create_comp_channel", errno);
  channel_ = Owned<ibv_comp_channel>(channel, {library_.destroy_comp_channel});
  ibv_cq* completions = library_.create_cq(context_.get(), static_cast<int>(sizes_.completions), nullptr, channel, 0);
  if (completions == nullptr) return fail("ibv_create_cq", errno);
  completions_ = Owned<ibv_cq>(completions, {library_.destroy_cq});
  ibv_cq* bootstrap =
      library_.create_cq(context_.get(), static_cast<int>(sizes_.datagram_entries), nullptr, channel, 0);
  if (bootstrap == nullptr) return fail("ibv_create_cq", errno);
  bootstrap_completions_ = Owned<ibv_cq>(bootstrap, {library_.destroy_cq});

  // Receives are shared by all connections, so that their number follows from the credits granted, not from the number of peers.
  // Messages and immediates have a queue each: an immediate takes a receive, but no buffer.
  for (Owned<ibv_srq>* queue : {&message_receives_, &immediate_receives_}) {
    ibv_srq_init_attr attributes{};
    attributes.attr.max_wr = sizes_.receives;
    attributes.attr.max_sge = 1;
    ibv_srq* made = library_.create_srq(domain_.get(), &attributes);
    if (made == nullptr) return fail("ibv_create_srq", errno);
    *queue = Owned<ibv_srq>(made, {library_.destroy_srq});
  }
  find_inline_bytes();
  prepare_chain();
  immediates_missing_ = sizes_.receives;
  refill_immediates();
  if (immediates_missing_ > 0) return fail("ibv_post_srq_recv", ENOMEM);
  return {};
}

// How much a request may carry inside is only told by trying.
void Nic::find_inline_bytes() {
  for (inline_bytes_ = kMostInline; inline_bytes_ > 0; inline_bytes_ /= 2) {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = attributes.recv_cq = completions_.get();
    attributes.srq = immediate_receives_.get();
    attributes.cap.max_send_wr = sizes_.sends;
    attributes.cap.max_send_sge = 1;
    attributes.cap.max_inline_data = inline_bytes_;
    ibv_qp* pair = library_.create_qp(domain_.get(), &attributes);
    if (pair == nullptr) continue;
    library_.destroy_qp(pair);
    return;
  }
}

void Nic::describe_capabilities() {
  Capabilities& c = capabilities_;
  c.max_write_bytes =
      std::min<uint64_t>(port_attributes_.max_msg_sz == 0 ? kLongestWrite : port_attributes_.max_msg_sz, kLongestWrite);
  c.max_send_bytes = static_cast<uint32_t>(std::min<uint64_t>(c.max_write_bytes, kSendBytes));
  if (options_.chunk_bytes != 0) c.max_write_bytes = std::min(c.max_write_bytes, options_.chunk_bytes);
  c.nic_depth = sizes_.sends - 1;
  c.receive_depth = sizes_.receives;
  c.completion_depth = sizes_.granted;
  // InfiniBand 9.7.3: requests of one queue pair are executed in the order of their sequence numbers, and an immediate is reported
  // after the bytes of its own and of all earlier requests. The acknowledgement that completes a write says that the
  // responder has taken it, not that it has reached memory (9.7.5); a read behind it proves that.
  c.ordered_writes = c.ordered_sends = c.completion_orders = true;
  c.delivery_complete = false;
  c.keys_enforced = true;
  c.device_memory = true;  // whether this device takes a dma-buf, or the address, is what registration finds out
  c.reads = true;
  c.connected_paths = true;
  c.immediate_consumes_receive = true;
  c.reports_dead_peer = true;
}

// --- paths -----------------------------------------------------------------------------------------------------------------------

Error Nic::open_path(const te_nic_address& remote, uint64_t generation, PathId* path) {
  NicAddress address;
  if (!decode(remote, &address))
    return Error(Status::kDescriptor,
                 format("NIC %s: the peer's address is not one of transport cx7", description_.name.c_str()));
  if (address.ethernet != own_.ethernet) {
    return Error(Status::kPeerUnreachable,
                 format("NIC %s speaks %s, the peer's %s: they cannot be connected", description_.name.c_str(),
                        own_.ethernet ? "RoCE" : "InfiniBand", address.ethernet ? "RoCE" : "InfiniBand"));
  }
  uint32_t connection = kNone;
  if (Error error = switchboard_->open(address, generation, now_ns(), &connection)) return error;
  *path = connection;
  return {};
}

void Nic::close_path(PathId path) {
  if (path < connections_.size()) switchboard_->close(static_cast<uint32_t>(path));
}

Error Nic::reset_path(PathId path) {
  if (path >= connections_.size()) return Error(Status::kArgument, "no such path");
  switchboard_->fail(static_cast<uint32_t>(path));
  return {};
}

}  // namespace te::cx7
#endif
