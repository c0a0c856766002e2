// Memory, paths and receives of a NIC, and its life on the fabric.
#include "native/sim/nic.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "native/mappings.h"

namespace te::sim {
namespace {

// Local keys differ from remote ones, so that a mix-up is refused.
constexpr uint64_t kLocalKeyTag = uint64_t{0x10CA1} << 32;
constexpr std::string_view kAddressPrefix = "sim:";

}  // namespace

Nic::Nic(Fabric& fabric, Host& host, uint32_t index, std::string name, std::shared_ptr<Endpoint> endpoint)
    : fabric_(fabric),
      host_(host),
      index_(index),
      name_(std::move(name)),
      endpoint_(std::move(endpoint)),
      serial_(fabric.next_nic_serial()),
      ordered_(!host.options.reorder) {
  if (host.options.wait_fd) wait_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  fabric_.attach(*endpoint_, *this);
}

Nic::~Nic() {
  detach(Fabric::End::kClosed);
  for (const auto& path : paths_)
    if (path != nullptr) fabric_.release(&path->endpoint);
  fabric_.release(&endpoint_);
  if (wait_fd_ >= 0) close(wait_fd_);
}

void Nic::detach(Fabric::End end) { fabric_.detach(*endpoint_, *this, end); }

NicInfo Nic::info() const {
  NicInfo info;
  info.name = name_;
  info.up = up() && !host_.killed;
  info.ordering_reason = "the simulated fabric has no PCIe";
  info.address.length = static_cast<uint32_t>(endpoint_->address.size());
  std::memcpy(info.address.bytes, endpoint_->address.data(), endpoint_->address.size());
  return info;
}

void Nic::set_down() {
  down_ = true;
  ++epoch_;  // fails all that is in flight, even if the NIC comes up again before its turn
  resume_all();
  fabric_.wake(*endpoint_);
}

void Nic::set_up() {
  down_ = false;
  resume_all();
  fabric_.wake(*endpoint_);
}

// --- memory ---------------------------------------------------------------------------------------------------------

Error Nic::register_memory(const MemorySpan& span, MemoryKey* key) {
  const auto nic = static_cast<int>(index_);
  if (span.device_kind != TE_DEVICE_HOST || span.dmabuf_fd >= 0)
    return Error(Status::kRegistration, "the simulated fabric registers host memory only", ENOSYS, nic);
  if (span.address == nullptr || span.length == 0)
    return Error(Status::kRegistration, "an empty span cannot be registered", EINVAL, nic);
  if (Error error = check_mapped(span)) return error;
  if (host_.registration_failures_due > 0) {
    --host_.registration_failures_due;
    return Error(Status::kRegistration, "registration refused by injection (register_fail)", ENOMEM, nic);
  }
  Registration registration;
  registration.address = static_cast<std::byte*>(span.address);
  registration.length = span.length;
  registration.base = host_.options.virtual_addresses ? reinterpret_cast<uint64_t>(span.address) : 0;
  const uint32_t number = fabric_.next_key();
  *key = MemoryKey{registration.base, number, kLocalKeyTag | number, nullptr};
  registrations_.emplace(number, std::move(registration));
  return {};
}

Error Nic::deregister_memory(const MemoryKey& key) {
  const auto entry = registrations_.find(static_cast<uint32_t>(key.remote_key));
  if (key.remote_key >> 32 != 0 || entry == registrations_.end() || !entry->second.live)
    return Error(Status::kRegistration, "this key is not registered (any more)", EINVAL, static_cast<int>(index_));
  if (host_.options.keys_enforced) registrations_.erase(entry);
  else entry->second.live = false;  // its span is still needed to judge writes with the dead key
  return {};
}

bool Nic::covers(uint64_t local_key, const void* address, uint64_t length) const {
  if (length == 0) return true;
  if ((local_key & ~uint64_t{0xFFFFFFFF}) != kLocalKeyTag) return false;
  const auto entry = registrations_.find(static_cast<uint32_t>(local_key));
  if (entry == registrations_.end() || !entry->second.live) return false;
  const Registration& registration = entry->second;
  const auto begin = reinterpret_cast<uint64_t>(address);
  const auto base = reinterpret_cast<uint64_t>(registration.address);
  return begin >= base && begin - base <= registration.length && length <= registration.length - (begin - base);
}

// --- paths ----------------------------------------------------------------------------------------------------------

Path* Nic::find(PathId id) const {
  const uint64_t slot = id & 0xFFFFFFFF;
  if (id >> 32 != index_ + 1 || slot >= paths_.size()) return nullptr;
  return paths_[slot].get();
}

// The address alone names the peer; nothing is kept between paths, so a restarted peer gets a fresh one whatever its
// generation.
Error Nic::open_path(const te_nic_address& remote, PathId* path) {
  const size_t length = std::min<size_t>(remote.length, sizeof remote.bytes);
  const std::string address(reinterpret_cast<const char*>(remote.bytes), length);
  if (!address.starts_with(kAddressPrefix))
    return Error(Status::kPeerUnreachable, "not an address of the simulated fabric", EADDRNOTAVAIL,
                 static_cast<int>(index_));
  auto opened = std::make_unique<Path>();
  // The NIC number sits in the upper half, so that a path used on another NIC is refused.
  opened->id = (uint64_t{index_} + 1) << 32 | paths_.size();
  opened->endpoint = fabric_.endpoint(address);
  opened->incarnation = opened->endpoint->incarnation;
  ++known_[opened->endpoint.get()];
  paths_.push_back(std::move(opened));
  if (host_.options.connected) connect(*paths_.back());
  *path = paths_.back()->id;
  return {};
}

void Nic::connect(Path& path) {
  path.up = false;
  path.down_told = false;
  Operation* op = allocate();
  op->stage = Stage::kConnecting;
  op->due = tick_ + host_.random.below(host_.options.delay + 1);
  link(path, *op);
  ++unfinished_;
  schedule(*op);
  activate();
}

void Nic::close_path(PathId id) {
  Path* path = find(id);
  if (path == nullptr) return;
  cancel(*path);
  const auto known = known_.find(path->endpoint.get());
  if (--known->second == 0) known_.erase(known);
  fabric_.release(&path->endpoint);
  paths_[id & 0xFFFFFFFF].reset();
}

bool Nic::proven_dead(PathId id) const {
  const Path* path = find(id);
  if (path == nullptr) return false;
  const Endpoint& endpoint = *path->endpoint;
  const bool nobody_since =
      endpoint.nic == nullptr && endpoint.incarnation > 0 && endpoint.killed_through == endpoint.incarnation;
  return nobody_since || (path->incarnation > 0 && path->incarnation <= endpoint.killed_through);
}

// --- receives -------------------------------------------------------------------------------------------------------

PostResult Nic::post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context) {
  PostResult result;
  if (context == nullptr || !covers(local_key, buffer, length)) {
    result.provider_status = EINVAL;
  } else if (host_.killed) {
    result.provider_status = ESHUTDOWN;
  } else if (overrun_) {
    result.provider_status = EIO;
  } else if (receives_.size() >= host_.capabilities.receive_depth) {
    result.busy = true;
  } else {
    receives_.push_back({buffer, length, local_key, context});
    result.posted = 1;
    if (receives_.size() == 1) fabric_.wake(*endpoint_);  // sends that found none may try again
  }
  return result;
}

}  // namespace te::sim
