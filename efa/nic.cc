// Set-up and tear-down of a NIC.
#include "efa/nic.h"

#ifdef TE_HAVE_LIBFABRIC
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace te::efa {
namespace {

// Endpoint options that the headers of 1.17 lack (fi_endpoint.h and fi_ext.h of 2.6: the values are ABI).
constexpr int kOptSharedMemoryPermitted = 11;             // bool, since 1.21
constexpr int kOptMaxMessageSize = 12;                    // size_t, since 1.22
constexpr int kOptMaxRmaSize = 14;                        // size_t, since 1.22
constexpr int kOptEfaEmulatedWrite = -(0xefa << 16) + 2;  // bool, since 1.18

constexpr uint64_t kSoftwareWriteBytes = 4 << 20;  // a longer copy in one piece would look like death to the peer
constexpr uint64_t kDeviceWriteBytes = 1 << 30;
constexpr uint32_t kSoftwareSendBytes = 64 << 10;
constexpr uint32_t kDeviceSendBytes = 8 << 10;  // efa-direct sends at most one MTU, and max_msg_size does not tell
constexpr uint32_t kDefaultDepth = 512;
constexpr uint32_t kMaxReceives = 4096;
constexpr size_t kPooledReceives = 1024;

bool is_wildcard(const te_nic_address& address) {
  sockaddr_storage storage{};
  std::memcpy(&storage, address.bytes, std::min<size_t>(address.length, sizeof storage));
  if (storage.ss_family == AF_INET) {
    const auto& ip = reinterpret_cast<const sockaddr_in&>(storage);
    return ip.sin_addr.s_addr == htonl(INADDR_ANY) || ip.sin_port == 0;
  }
  if (storage.ss_family == AF_INET6) {
    const auto& ip = reinterpret_cast<const sockaddr_in6&>(storage);
    return IN6_IS_ADDR_UNSPECIFIED(&ip.sin6_addr) || ip.sin6_port == 0;
  }
  return true;
}

template <typename Value>
bool get_option(fid_ep* endpoint, int name, Value* value) {
  Value found{};
  size_t length = sizeof found;
  if (fi_getopt(&endpoint->fid, FI_OPT_ENDPOINT, name, &found, &length) != 0) return false;
  *value = found;
  return true;
}

}  // namespace

Nic::Nic(const Library& library, Kind kind, Selected selected, const ProviderOptions& options)
    : library_(library),
      kind_(kind),
      options_(options),
      node_(std::move(selected.node)),
      may_emulate_(selected.emulated),
      info_(std::move(selected.info)) {
  description_.name = std::move(selected.nic);
  if (kind == Kind::kTcp) gate_.enable();
}

Nic::~Nic() {
  objects_.memory.clear();
  if (receives_ != nullptr) objects_.endpoint.reset();  // before the buffers it may still fill
  if (shm_name_.empty()) return;
  doorbell_.reset();  // peers see that it is closed before the endpoint goes
  unlink(("/dev/shm/" + std::string(segment_name(address_text()))).c_str());
  local_endpoints::close(shm_name_, std::move(objects_));
}

Error Nic::fail(const char* what, int64_t status) const {
  return Error(Status::kTransport,
               format("%s on NIC %s (%s): %s", what, description_.name.c_str(), info_->fabric_attr->prov_name,
                      library_.describe(status).c_str()),
               static_cast<int>(status < 0 ? -status : status));
}

Error Nic::open(const Library& library, Kind kind, Selected selected, const ProviderOptions& options,
                std::unique_ptr<Nic>* out) {
  std::unique_ptr<Nic> nic(new Nic(library, kind, std::move(selected), options));
  if (Error error = nic->open_domain()) return error;
  const bool layered = nic->provider_name().find(';') != std::string::npos;
  const bool wait_object = kind == Kind::kEfa || (kind == Kind::kTcp && layered);
  if (Error error = nic->open_queue(options.want_wait_fd && wait_object)) return error;
  if (Error error = nic->open_endpoint()) return error;
  if (Error error = nic->read_address()) return error;
  if (Error error = nic->describe_capabilities()) return error;
  if (Error error = nic->open_receives()) return error;
  if (Error error = nic->open_empty_range()) return error;
  if (kind == Kind::kTcp && options.want_wait_fd && !layered)
    nic->wait_fd_ = find_progress_fd(nic->description_.address);
  if (kind == Kind::kShm) {  // the page also tells who we are, so it is there even if we never sleep
    nic->shm_name_ = endpoint_name(nic->address_text());
    local_endpoints::add(nic->shm_name_);
    if (Error error = Doorbell::open(nic->shm_name_, &nic->doorbell_)) return error;
    if (options.want_wait_fd) nic->wait_fd_ = nic->doorbell_->fd();
  }
  *out = std::move(nic);
  return {};
}

Error Nic::open_domain() {
  fid_fabric* fabric = nullptr;
  if (const int status = library_.fabric(info_->fabric_attr, &fabric, nullptr); status != 0)
    return fail("fi_fabric", status);
  objects_.fabric.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int status = fi_domain(fabric, info_.get(), &domain, nullptr); status != 0)
    return fail("fi_domain", status);
  objects_.domain.reset(domain);
  fi_av_attr attributes{};
  attributes.type = info_->domain_attr->av_type != FI_AV_UNSPEC ? info_->domain_attr->av_type : FI_AV_TABLE;
  attributes.count = 64;
  fid_av* addresses = nullptr;
  if (const int status = fi_av_open(domain, &attributes, &addresses, nullptr); status != 0)
    return fail("fi_av_open", status);
  objects_.addresses.reset(addresses);
  return {};
}

Error Nic::open_queue(bool want_wait_fd) {
  fi_cq_attr attributes{};
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.size = std::max<size_t>(options_.completion_depth, info_->tx_attr->size + info_->rx_attr->size);
  attributes.wait_obj = want_wait_fd ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  int status = fi_cq_open(objects_.domain.get(), &attributes, &queue, nullptr);
  if (status != 0 && want_wait_fd) {  // no wait object: the engine polls
    want_wait_fd = false;
    attributes.wait_obj = FI_WAIT_NONE;
    status = fi_cq_open(objects_.domain.get(), &attributes, &queue, nullptr);
  }
  if (status != 0) return fail("fi_cq_open", status);
  objects_.queue.reset(queue);
  queue_ = queue;
  // The queues of tcp and shm grow as needed. ofi_rxm's does not: immediates beyond its size are lost (measured).
  const bool grows = kind_ != Kind::kEfa && provider_name().find(';') == std::string::npos;
  capabilities_.completion_depth = grows ? 0 : static_cast<uint32_t>(attributes.size);
  waits_on_queue_ = want_wait_fd && fi_control(&queue->fid, FI_GETWAIT, &wait_fd_) == 0;
  if (!waits_on_queue_) wait_fd_ = -1;
  return {};
}

Error Nic::open_endpoint() {
  if (kind_ != Kind::kTcp || options_.port_low == 0) {
    return try_endpoint(InfoPtr(library_.dupinfo(info_.get()), FreeInfo{&library_}));
  }
  Error last;
  for (uint32_t port = options_.port_low; port <= options_.port_high; ++port) {
    InfoPtr info(nullptr, FreeInfo{&library_});
    if (Error error = select_tcp(library_, node_, static_cast<uint16_t>(port), &info)) return error;
    last = try_endpoint(std::move(info));
    if (last.ok()) return {};
    if (last.provider_status() != FI_EADDRINUSE && last.provider_status() != FI_EBUSY) return last;
  }
  return Error(Status::kConfig, format("NIC %s: no free port between %u and %u: %s", description_.name.c_str(),
                                       options_.port_low, options_.port_high, last.message().c_str()));
}

Error Nic::try_endpoint(InfoPtr info) {
  if (info == nullptr) return Error(Status::kTransport, "out of memory");
  fid_ep* endpoint = nullptr;
  if (const int status = fi_endpoint(objects_.domain.get(), info.get(), &endpoint, nullptr); status != 0)
    return fail("fi_endpoint", status);
  FidPtr<fid_ep> owner(endpoint);
  if (const int status = fi_ep_bind(endpoint, &objects_.addresses->fid, 0); status != 0)
    return fail("fi_ep_bind", status);
  if (const int status = fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV); status != 0)
    return fail("fi_ep_bind", status);
  if (kind_ == Kind::kEfa) {
    // Between processes of one host `efa` would go through shm: a second code path with other rules. Refused where
    // unknown, which is where the path does not exist.
    const bool permitted = false;
    (void)fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, kOptSharedMemoryPermitted, &permitted, sizeof permitted);
    if ((info->caps & FI_HMEM) != 0) {
      const int required = FI_HMEM_P2P_REQUIRED;  // rather fail than bounce through the host
      (void)fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &required, sizeof required);
    }
  }
  if (const int status = fi_enable(endpoint); status != 0) return fail("fi_enable", status);
  objects_.endpoint = std::move(owner);
  endpoint_ = endpoint;
  info_ = std::move(info);
  return {};
}

Error Nic::read_address() {
  uint8_t bytes[512];
  size_t length = sizeof bytes;
  if (const int status = fi_getname(&endpoint_->fid, bytes, &length); status != 0) return fail("fi_getname", status);
  if (length == 0 || length > sizeof description_.address.bytes) {
    return Error(Status::kTransport, format("NIC %s: an address of %zu bytes, at most %zu can be carried",
                                            description_.name.c_str(), length, sizeof description_.address.bytes));
  }
  description_.address.length = static_cast<uint32_t>(length);
  std::memcpy(description_.address.bytes, bytes, length);
  if (kind_ == Kind::kTcp && is_wildcard(description_.address)) {
    return Error(Status::kTransport, format("NIC %s: %s did not tell the address it is bound to",
                                            description_.name.c_str(), info_->fabric_attr->prov_name));
  }
  return {};
}

Error Nic::describe_capabilities() {
  const bool software = kind_ != Kind::kEfa;
  scratch_is_ours_ = (info_->mode & (FI_CONTEXT | FI_CONTEXT2)) == 0;
  flush_more_ = !software;
  // Without FI_DELIVERY_COMPLETE tcp completes when the kernel has the bytes. shm must not be asked for it: 1.17 then
  // sends small writes in segments, loses immediates (10,000 writes of 64 bytes: some hundred missing) and never
  // completes a write of 0 bytes. What shm completes early lies in the target's queue, which checks the key when it
  // takes it out: in the queue's order, hence before whatever is posted after the completion.
  capabilities_.delivery_complete = kind_ != Kind::kShm;
  capabilities_.completion_orders = true;
  write_flags_ = send_flags_ = FI_COMPLETION | (capabilities_.delivery_complete ? FI_DELIVERY_COMPLETE : 0);

  bool emulated = false;
  if (may_emulate_ && get_option(endpoint_, kOptEfaEmulatedWrite, &emulated) && emulated) {
    return Error(Status::kTransportUnavailable,
                 format("NIC %s: this device has no RDMA write, %s would emulate it in software",
                        description_.name.c_str(), library_.name.c_str()));
  }
  size_t longest_write = info_->ep_attr->max_msg_size, longest_send = longest_write;
  if (!software) {
    longest_write = std::min<size_t>(longest_write, kDeviceWriteBytes);
    longest_send = std::min<size_t>(longest_send, kDeviceSendBytes);
    (void)get_option(endpoint_, kOptMaxRmaSize, &longest_write);
    (void)get_option(endpoint_, kOptMaxMessageSize, &longest_send);
  }
  const uint64_t chunk = options_.chunk_bytes != 0 ? options_.chunk_bytes
                         : software                ? kSoftwareWriteBytes
                                                   : kDeviceWriteBytes;
  capabilities_.max_write_bytes = std::min<uint64_t>(chunk, longest_write);
  capabilities_.max_send_bytes =
      static_cast<uint32_t>(std::min<size_t>(software ? kSoftwareSendBytes : kDeviceSendBytes, longest_send));
  const auto transmit = static_cast<uint32_t>(info_->tx_attr->size);
  capabilities_.nic_depth = std::min(options_.nic_depth != 0 ? options_.nic_depth : kDefaultDepth, transmit);
  capabilities_.receive_depth = std::min(static_cast<uint32_t>(info_->rx_attr->size), kMaxReceives);
  const uint64_t order = info_->tx_attr->msg_order & info_->rx_attr->msg_order;
  // tcp: one stream per peer, which the target takes from the socket in order, straight into place; the immediate is
  // reported when the last byte of its write has been copied, so all earlier writes are in memory by then. shm keeps
  // the order of its queue only while it can copy in one piece (with process_vm_readv): without that privilege a large
  // write goes in segments, which later small ones may overtake. It could be told only per peer, so: not ordered.
  capabilities_.ordered_writes = kind_ == Kind::kTcp && (order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW)) != 0;
  capabilities_.ordered_sends = (order & FI_ORDER_SAS) != 0;
  // tcp checks the key when a write's header comes and then receives straight into place: closing the region refuses
  // later writes, but the rest of one that has begun still lands (1.17, measured: 36 KiB of 4 MiB).
  capabilities_.keys_enforced = kind_ == Kind::kEfa;
  capabilities_.reads = true;
  capabilities_.device_memory = !software && (info_->caps & FI_HMEM) != 0;
  // TE_POOL_RECEIVES lets the tests run the pool without such a device.
  capabilities_.immediate_consumes_receive =
      (info_->mode & FI_RX_CQ_DATA) != 0 || std::getenv("TE_POOL_RECEIVES") != nullptr;
  capabilities_.reports_dead_peer = kind_ == Kind::kEfa;
  return {};
}

Error Nic::open_receives() {
  if (!capabilities_.immediate_consumes_receive) return {};
  const size_t count = std::min<size_t>(info_->rx_attr->size, kPooledReceives);
  const bool local_keys = (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
  capabilities_.receive_depth = static_cast<uint32_t>(count);
  return ReceivePool::open(library_, objects_, count, capabilities_.max_send_bytes, local_keys, &receives_);
}

// efa-direct follows the descriptor of every range, whatever its length (libfabric 2.1, source).
Error Nic::open_empty_range() {
  if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return {};
  MemoryKey key;
  if (Error error = register_memory({no_bytes_, sizeof no_bytes_, TE_DEVICE_HOST, 0}, &key)) return error;
  empty_descriptor_ = reinterpret_cast<void*>(key.local_key);
  return {};
}

}  // namespace te::efa
#endif
