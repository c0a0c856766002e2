// Endpoints: set-up and tear-down.
#include <algorithm>
#include <cstring>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

// Endpoint options that older headers lack: the values are ABI (fi_endpoint.h and fi_ext.h of 2.6).
constexpr int kSharedMemoryPermitted = 11, kMaxMessageSize = 12, kMaxRmaSize = 14;
constexpr int kEmulatedWrite = -(0xefa << 16) + 2;

// Whatever is in flight ends without a completion; what of it was on the wire may still land.
void abandon(Fabric& f, Endpoint& endpoint) {
  while (!endpoint.posted.empty()) {
    Request* request = endpoint.posted.back();
    const bool rung = std::find(endpoint.held.begin(), endpoint.held.end(), request) == endpoint.held.end();
    if (rung && f.random.chance(f.options.ghosts)) land_as_ghost(f, *request);
    drop(f, request);
  }
  std::erase_if(f.claims, [&](const auto& each) { return each.second.endpoint == &endpoint; });
  for (Queue* queue : {endpoint.transmit, endpoint.receive})
    if (queue != nullptr)
      std::erase_if(queue->entries, [&](const Entry& entry) { return entry.endpoint == &endpoint; });
}

int close_endpoint(fid* handle) {
  Locked f;
  auto& endpoint = behind<Endpoint, fid_ep>(handle);
  abandon(*f, endpoint);
  if (endpoint.enabled) endpoint.device->endpoints.erase(endpoint.address.number);
  std::erase(f->endpoints, &endpoint);
  if (endpoint.vector != nullptr) --endpoint.vector->uses;
  for (Queue* queue : {endpoint.transmit, endpoint.receive})
    if (queue != nullptr) --queue->uses;
  --endpoint.domain->uses;
  --f->objects;
  delete &endpoint;
  return 0;
}

int bind(fid* handle, fid* other, uint64_t flags) {
  Locked f;
  auto& endpoint = behind<Endpoint, fid_ep>(handle);
  if (endpoint.enabled) {
    violate("fi_ep_bind after fi_enable");
    return -FI_EOPBADSTATE;
  }
  if (other->fclass == FI_CLASS_AV && endpoint.vector == nullptr) {
    endpoint.vector = &behind<Vector, fid_av>(other);
    ++endpoint.vector->uses;
    return 0;
  }
  if (other->fclass != FI_CLASS_CQ || (flags & ~(FI_TRANSMIT | FI_RECV)) != 0) {
    violate("fi_ep_bind: not what this endpoint can be bound to, or bound twice, or with flags it does not take");
    return -FI_EINVAL;
  }
  auto& queue = behind<Queue, fid_cq>(other);
  if ((flags & FI_TRANSMIT) != 0) endpoint.transmit = &queue, ++queue.uses;
  if ((flags & FI_RECV) != 0) endpoint.receive = &queue, ++queue.uses;
  return 0;
}

// The lowest queue pair number that is free, so numbers come again; keys do not.
void give_address(Fabric& f, Endpoint& endpoint) {
  Address& address = endpoint.address;
  address.gid[0] = 0xfe;
  address.gid[1] = 0x80;
  address.gid[15] = static_cast<uint8_t>(endpoint.device->index + 1);
  address.number = 1;
  while (endpoint.device->endpoints.contains(address.number)) ++address.number;
  address.key = f.random.word() & 0x7fffffff;
  endpoint.device->endpoints.emplace(address.number, &endpoint);
}

int control(fid* handle, int command, void*) {
  Locked f;
  auto& endpoint = behind<Endpoint, fid_ep>(handle);
  if (command != FI_ENABLE) return -FI_ENOSYS;
  if (endpoint.enabled) return -FI_EOPBADSTATE;
  if (endpoint.vector == nullptr) return -FI_ENOAV;
  if (endpoint.transmit == nullptr || endpoint.receive == nullptr) return -FI_ENOCQ;
  if (endpoint.device->lost) return -FI_ENODEV;
  give_address(*f, endpoint);
  endpoint.enabled = true;
  f->endpoints.push_back(&endpoint);
  return 0;
}

int get_name(fid* handle, void* address, size_t* length) {
  Locked f;
  auto& endpoint = behind<Endpoint, fid_ep>(handle);
  if (!endpoint.enabled) return -FI_EOPBADSTATE;
  const size_t room = *length;
  *length = sizeof(Address);
  std::memcpy(address, &endpoint.address, std::min(room, sizeof(Address)));
  return room < sizeof(Address) ? -FI_ETOOSMALL : 0;
}

template <typename Value>
int give(const Value& value, void* out, size_t* length) {
  if (*length < sizeof value) return -FI_ETOOSMALL;
  std::memcpy(out, &value, sizeof value);
  *length = sizeof value;
  return 0;
}

int get_option(fid* handle, int level, int name, void* value, size_t* length) {
  Locked f;
  const auto& endpoint = behind<Endpoint, fid_ep>(handle);
  if (level != FI_OPT_ENDPOINT) return -FI_ENOPROTOOPT;
  const bool direct = endpoint.direct;
  switch (name) {
    case kMaxMessageSize:
      return give(direct ? size_t{f->options.max_msg} : SIZE_MAX, value, length);
    case kMaxRmaSize:
      return give(direct ? size_t{f->options.max_rma} : SIZE_MAX, value, length);
    case kEmulatedWrite:
      return give(!direct && f->options.emulated != 0, value, length);
    default:
      return -FI_ENOPROTOOPT;
  }
}

int set_option(fid* handle, int level, int name, const void* value, size_t length) {
  Locked f;
  const auto& endpoint = behind<Endpoint, fid_ep>(handle);
  if (level != FI_OPT_ENDPOINT) return -FI_ENOPROTOOPT;
  if (endpoint.enabled) {
    violate("fi_setopt(%d) after fi_enable", name);
    return -FI_EINVAL;
  }
  if (name == kSharedMemoryPermitted) return length == sizeof(bool) ? 0 : -FI_EINVAL;
  if (name == FI_OPT_FI_HMEM_P2P) {
    int wanted = -1;
    if (length != sizeof wanted) return -FI_EINVAL;
    std::memcpy(&wanted, value, sizeof wanted);
    return wanted == FI_HMEM_P2P_DISABLED || f->options.hmem == 0 ? -FI_EOPNOTSUPP : 0;
  }
  return -FI_ENOPROTOOPT;
}

ssize_t no_cancel(fid*, void*) { return -FI_ENOSYS; }

fi_ops_ep* endpoint_ops() {
  static fi_ops_ep ops = [] {
    fi_ops_ep made{};
    made.size = sizeof made;
    made.cancel = no_cancel;
    made.getopt = get_option;
    made.setopt = set_option;
    return made;
  }();
  return &ops;
}

fi_ops_cm* name_ops() {
  static fi_ops_cm ops = [] {
    fi_ops_cm made{};
    made.size = sizeof made;
    made.getname = get_name;
    return made;
  }();
  return &ops;
}

fi_ops* common_ops() {
  static fi_ops ops = [] {
    fi_ops made = *only_close<close_endpoint>();
    made.bind = bind;
    made.control = control;
    return made;
  }();
  return &ops;
}

}  // namespace

int open_endpoint(fid_domain* handle, fi_info* info, fid_ep** out, void* context) {
  Locked f;
  auto& domain = *static_cast<Domain*>(handle);
  const bool direct = domain.fabric->direct;
  if (direct && (info->mode & FI_CONTEXT2) == 0) {
    violate("fi_endpoint: an info without FI_CONTEXT2 is none of fi_getinfo's");
    return -FI_EINVAL;
  }
  auto* endpoint = new Endpoint;
  endpoint->fid = {FI_CLASS_EP, context, common_ops()};
  endpoint->ops = endpoint_ops();
  endpoint->cm = name_ops();
  endpoint->msg = &message_ops;
  endpoint->free = f->options.free != 0;
  endpoint->rma = endpoint->free ? &free_rma_ops : &rma_ops;
  endpoint->domain = &domain;
  endpoint->device = domain.device;
  endpoint->serial = f->endpoints_opened++;
  endpoint->direct = direct;
  endpoint->unsolicited = !direct || (info->mode & FI_RX_CQ_DATA) == 0;
  endpoint->transmit_size = info->tx_attr->size;
  endpoint->receive_size = info->rx_attr->size;
  ++domain.uses;
  ++f->objects;
  *out = endpoint;
  return 0;
}

}  // namespace srd
