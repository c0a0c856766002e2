// Posting, and the rules that a program must keep.
#include <algorithm>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

constexpr uint64_t kFlags = FI_COMPLETION | FI_MORE | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE | FI_REMOTE_CQ_DATA;

bool usable(const Endpoint& endpoint, const char* function) {
  if (endpoint.enabled) return true;
  violate("%s: the endpoint was not enabled", function);
  return false;
}

// Null, or which rule a message breaks.
const char* wrong_flags(uint64_t flags) {
  if ((flags & FI_INJECT) != 0) return "FI_INJECT is not for efa-direct's RMA";
  return (flags & ~kFlags) != 0 ? "with flags that the device does not know" : nullptr;
}

const char* wrong_rma(const Fabric& f, const Endpoint& endpoint, const fi_msg_rma& message, uint64_t flags) {
  if (const char* wrong = wrong_flags(flags)) return wrong;
  if (message.iov_count != 1 || message.rma_iov_count != 1) return "with other than one local and one remote range";
  const size_t length = message.msg_iov->iov_len;
  if (length != message.rma_iov->len) return "whose ranges are not of one length";
  if (endpoint.direct && length > f.options.max_rma) return "longer than FI_OPT_MAX_RMA_SIZE";
  if (message.rma_iov->key >> 32 != 0) return "with a key of more than 4 bytes";
  if ((flags & FI_REMOTE_CQ_DATA) != 0 && message.data >> 32 != 0) return "with an immediate of more than 4 bytes";
  return nullptr;
}

const char* wrong_send(const Fabric& f, const Endpoint& endpoint, const fi_msg& message, uint64_t flags) {
  if (const char* wrong = wrong_flags(flags)) return wrong;
  if ((flags & FI_REMOTE_CQ_DATA) != 0) return "with an immediate, which is not made here";
  if (message.iov_count != 1) return "with other than one range";
  if (endpoint.direct && message.msg_iov->iov_len > f.options.max_msg) return "longer than FI_OPT_MAX_MSG_SIZE";
  return nullptr;
}

// FI_MR_LOCAL: a descriptor with every range, even an empty one, of a region that holds all of it.
bool described(Fabric& f, const Endpoint& endpoint, void* const* descriptors, const void* from, size_t length,
               uint64_t access, const char* function) {
  if (!endpoint.direct) return true;
  const uint64_t descriptor = descriptors != nullptr ? reinterpret_cast<uint64_t>(descriptors[0]) : 0;
  if (descriptor != 0 && local_region(f, endpoint.domain, descriptor, from, length, access) != nullptr) return true;
  violate("%s: FI_MR_LOCAL demands the descriptor of a region that covers the %zu bytes at %p", function, length, from);
  return false;
}

const Address* address_of(const Endpoint& endpoint, fi_addr_t number, const char* function) {
  const auto& entries = endpoint.vector->entries;
  if (number < entries.size() && entries[number] != nullptr) return entries[number];
  violate("%s: the address %llu is not in the address vector", function, static_cast<unsigned long long>(number));
  return nullptr;
}

// 0: there is room for one more.
ssize_t full(Fabric& f, const Endpoint& endpoint) {
  if (endpoint.device->lost) return -FI_EIO;
  if (f.faults.refusals > 0 && endpoint.held.empty()) {
    --f.faults.refusals;
    ++f.counts.refused;
    return -FI_EAGAIN;
  }
  if (endpoint.transmits >= endpoint.transmit_size) {
    // A device library takes back all that it held then, although it had said yes to it.
    if (!endpoint.held.empty()) violate("the queue was full with requests held back by FI_MORE: they are lost");
    ++f.counts.refused;
    return -FI_EAGAIN;
  }
  // Where there is room, what follows FI_MORE is taken.
  if (endpoint.held.empty() && f.random.chance(f.options.eagain)) {
    ++f.counts.refused;
    return -FI_EAGAIN;
  }
  return 0;
}

void inject_error(Fabric& f, Request* request) {
  const auto& every = f.options.error_every;
  if (every != 0 && f.counts.posted % every == 0) request->injected = static_cast<uint32_t>(f.options.error_status);
  if (f.faults.error_in == 0 || --f.faults.error_in != 0) return;
  request->injected = f.faults.error_status;
  request->landed = f.faults.error_landed;
}

void accept(Fabric& f, Endpoint& endpoint, Request* request, uint64_t flags) {
  ++f.counts.posted;
  ++endpoint.transmits;
  request->endpoint = &endpoint;
  endpoint.posted.push_back(request);
  inject_error(f, request);
  const bool whole = request->length == 0 || request->kind == Kind::kSend;
  request->pieces =
      whole ? 1 : static_cast<uint32_t>(1 + f.random.below(std::clamp<uint64_t>(f.options.pieces, 1, 31)));
  request->missing = (1u << request->pieces) - 1;
  if ((flags & FI_MORE) != 0 && endpoint.direct) {
    ++f.counts.held;
    endpoint.held.push_back(request);
    return;
  }
  for (Request* each : endpoint.held) f.activate(each);
  endpoint.held.clear();
  f.activate(request);
}

ssize_t post_rma(fid_ep* handle, const fi_msg_rma* message, uint64_t flags, Kind kind, const char* function) {
  Locked f;
  auto& endpoint = *static_cast<Endpoint*>(handle);
  if (!usable(endpoint, function)) return -FI_EOPBADSTATE;
  if (const char* wrong = wrong_rma(*f, endpoint, *message, flags)) {
    violate("%s: %s", function, wrong);
    return -FI_EINVAL;
  }
  const iovec& local = *message->msg_iov;
  const uint64_t access = kind == Kind::kWrite ? FI_WRITE : FI_READ;
  if (!described(*f, endpoint, message->desc, local.iov_base, local.iov_len, access, function)) return -FI_EINVAL;
  const Address* address = address_of(endpoint, message->addr, function);
  if (address == nullptr) return -FI_EINVAL;
  if (const ssize_t status = full(*f, endpoint); status != 0) return status;
  if (!claim(*f, endpoint, message->context, function)) return -FI_EINVAL;
  auto* request = new Request;
  request->kind = kind;
  request->with_immediate = (flags & FI_REMOTE_CQ_DATA) != 0;
  request->immediate = static_cast<uint32_t>(message->data);
  request->target = *address;
  request->local = static_cast<uint8_t*>(local.iov_base);
  request->length = local.iov_len;
  request->descriptor = message->desc != nullptr ? reinterpret_cast<uint64_t>(message->desc[0]) : 0;
  request->remote = message->rma_iov->addr;
  request->key = message->rma_iov->key;
  request->context = message->context;
  ++(kind == Kind::kWrite ? f->counts.writes : f->counts.reads);
  accept(*f, endpoint, request, flags);
  return 0;
}

ssize_t write_message(fid_ep* endpoint, const fi_msg_rma* message, uint64_t flags) {
  return post_rma(endpoint, message, flags, Kind::kWrite, "fi_writemsg");
}

ssize_t read_message(fid_ep* endpoint, const fi_msg_rma* message, uint64_t flags) {
  return post_rma(endpoint, message, flags, Kind::kRead, "fi_readmsg");
}

ssize_t post_simple(fid_ep* endpoint, const void* buffer, size_t length, void* descriptor, uint64_t data,
                    fi_addr_t peer, uint64_t address, uint64_t key, void* context, uint64_t flags, Kind kind) {
  const iovec local{const_cast<void*>(buffer), length};
  const fi_rma_iov remote{address, length, key};
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = context;
  message.data = data;
  return post_rma(endpoint, &message, flags, kind, kind == Kind::kWrite ? "fi_write" : "fi_read");
}

ssize_t write_simple(fid_ep* endpoint, const void* buffer, size_t length, void* descriptor, fi_addr_t peer,
                     uint64_t address, uint64_t key, void* context) {
  return post_simple(endpoint, buffer, length, descriptor, 0, peer, address, key, context, 0, Kind::kWrite);
}

ssize_t write_data(fid_ep* endpoint, const void* buffer, size_t length, void* descriptor, uint64_t data, fi_addr_t peer,
                   uint64_t address, uint64_t key, void* context) {
  return post_simple(endpoint, buffer, length, descriptor, data, peer, address, key, context, FI_REMOTE_CQ_DATA,
                     Kind::kWrite);
}

ssize_t read_simple(fid_ep* endpoint, void* buffer, size_t length, void* descriptor, fi_addr_t peer, uint64_t address,
                    uint64_t key, void* context) {
  return post_simple(endpoint, buffer, length, descriptor, 0, peer, address, key, context, 0, Kind::kRead);
}

ssize_t refuse_inject(fid_ep*, const void*, size_t, fi_addr_t, uint64_t, uint64_t) {
  Locked f;
  violate("fi_inject_write: efa-direct injects no RMA");
  return -FI_ENOSYS;
}

ssize_t refuse_inject_data(fid_ep*, const void*, size_t, uint64_t, fi_addr_t, uint64_t, uint64_t) {
  Locked f;
  violate("fi_inject_writedata: efa-direct injects no RMA");
  return -FI_ENOSYS;
}

ssize_t send_message(fid_ep* handle, const fi_msg* message, uint64_t flags) {
  Locked f;
  auto& endpoint = *static_cast<Endpoint*>(handle);
  const char* function = "fi_sendmsg";
  if (!usable(endpoint, function)) return -FI_EOPBADSTATE;
  if (const char* wrong = wrong_send(*f, endpoint, *message, flags)) {
    violate("%s: %s", function, wrong);
    return -FI_EINVAL;
  }
  const iovec& local = *message->msg_iov;
  if (!described(*f, endpoint, message->desc, local.iov_base, local.iov_len, FI_SEND, function)) return -FI_EINVAL;
  const Address* address = address_of(endpoint, message->addr, function);
  if (address == nullptr) return -FI_EINVAL;
  if (const ssize_t status = full(*f, endpoint); status != 0) return status;
  if (!claim(*f, endpoint, message->context, function)) return -FI_EINVAL;
  auto* request = new Request;
  request->kind = Kind::kSend;
  request->target = *address;
  request->local = static_cast<uint8_t*>(local.iov_base);
  request->length = local.iov_len;
  request->descriptor = message->desc != nullptr ? reinterpret_cast<uint64_t>(message->desc[0]) : 0;
  request->context = message->context;
  ++f->counts.sends;
  accept(*f, endpoint, request, flags);
  return 0;
}

ssize_t send_simple(fid_ep* endpoint, const void* buffer, size_t length, void* descriptor, fi_addr_t peer,
                    void* context) {
  const iovec local{const_cast<void*>(buffer), length};
  fi_msg message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer;
  message.context = context;
  return send_message(endpoint, &message, 0);
}

ssize_t receive_simple(fid_ep* handle, void* buffer, size_t length, void* descriptor, fi_addr_t, void* context) {
  Locked f;
  auto& endpoint = *static_cast<Endpoint*>(handle);
  if (!usable(endpoint, "fi_recv")) return -FI_EOPBADSTATE;
  if (!described(*f, endpoint, &descriptor, buffer, length, FI_RECV, "fi_recv")) return -FI_EINVAL;
  if (endpoint.device->lost) return -FI_EIO;
  if (endpoint.receives_used >= endpoint.receive_size) {
    ++f->counts.refused;
    return -FI_EAGAIN;
  }
  if (!claim(*f, endpoint, context, "fi_recv")) return -FI_EINVAL;
  ++endpoint.receives_used;
  ++f->counts.receives;
  endpoint.receives.push_back({static_cast<uint8_t*>(buffer), length, reinterpret_cast<uint64_t>(descriptor), context});
  return 0;
}

ssize_t receive_message(fid_ep* endpoint, const fi_msg* message, uint64_t flags) {
  if (message->iov_count != 1 || flags != 0) {
    Locked f;
    violate("fi_recvmsg: with other than one range, or with flags");
    return -FI_EINVAL;
  }
  return receive_simple(endpoint, message->msg_iov->iov_base, message->msg_iov->iov_len,
                        message->desc != nullptr ? message->desc[0] : nullptr, message->addr, message->context);
}

}  // namespace

// What is not there is not called by anything that keeps to one range and posts no immediates with sends.
constinit fi_ops_msg message_ops = {.size = sizeof(fi_ops_msg),
                                    .recv = receive_simple,
                                    .recvv = nullptr,
                                    .recvmsg = receive_message,
                                    .send = send_simple,
                                    .sendv = nullptr,
                                    .sendmsg = send_message,
                                    .inject = nullptr,
                                    .senddata = nullptr,
                                    .injectdata = nullptr};
constinit fi_ops_rma rma_ops = {.size = sizeof(fi_ops_rma),
                                .read = read_simple,
                                .readv = nullptr,
                                .readmsg = read_message,
                                .write = write_simple,
                                .writev = nullptr,
                                .writemsg = write_message,
                                .inject = refuse_inject,
                                .writedata = write_data,
                                .injectdata = refuse_inject_data};

}  // namespace srd
