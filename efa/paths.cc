// Paths: which peers a NIC can post to.
#include "efa/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {
namespace {

// libfabric's shm has 256 places for peers, without a check in release builds: the 257th would overwrite another one.
// Peers that we have not opened a path to take places too.
constexpr size_t kMaxShmPeers = 128;

std::string_view text_of(const te_nic_address& address) {
  return {reinterpret_cast<const char*>(address.bytes), address.length};
}

}  // namespace

std::string_view Nic::address_text() const { return text_of(description_.address); }

Error Nic::insert_address(const te_nic_address& remote, fi_addr_t* handle) {
  const Passage passage(gate_);
  const int count = fi_av_insert(objects_.addresses.get(), remote.bytes, 1, handle, 0, nullptr);
  if (count == 1) return {};
  return Error(Status::kPeerUnreachable, format("fi_av_insert on NIC %s: %s", description_.name.c_str(),
                                                library_.describe(count < 0 ? count : FI_EINVAL).c_str()));
}

Error Nic::share_address(const te_nic_address& remote, fi_addr_t* handle) {
  Known& known = known_[std::string(text_of(remote))];
  if (known.paths == 0) {
    if (Error error = insert_address(remote, &known.address)) {
      known_.erase(known_.find(text_of(remote)));
      return error;
    }
  }
  ++known.paths;
  *handle = known.address;
  return {};
}

void Nic::leave_address(const te_nic_address& remote) {
  const auto found = known_.find(text_of(remote));
  if (--found->second.paths > 0) return;
  (void)fi_av_remove(objects_.addresses.get(), &found->second.address, 1, 0);
  known_.erase(found);
}

Error Nic::insert_shm(const te_nic_address& remote, Path* path) {
  te_nic_address address = remote;
  address.bytes[sizeof address.bytes - 1] = 0;  // libfabric reads it as a string
  const std::string_view name = endpoint_name({reinterpret_cast<const char*>(address.bytes), address.length});
  if (name.empty()) return Error(Status::kPeerUnreachable, "this is not the address of an shm endpoint of ours");
  if (local_endpoints::ended(std::string(name)))
    return Error(Status::kPeerUnreachable, "this shm endpoint was of this process and has closed");
  auto found = shm_peers_.find(name);
  if (found == shm_peers_.end()) {
    if (shm_peers_.size() >= kMaxShmPeers) forget_dead_shm_peers();
    if (shm_peers_.size() >= kMaxShmPeers) {
      return Error(Status::kExhausted, format("shm reaches at most %zu peers from one NIC", kMaxShmPeers));
    }
    ShmPeer peer;
    if (Error error = insert_address(address, &peer.address)) return error;
    peer.bell = std::make_unique<PeerDoorbell>(name);
    local_endpoints::relate(shm_name_, std::string(name));
    found = shm_peers_.emplace(name, std::move(peer)).first;
  }
  ++found->second.paths;
  path->address = found->second.address;
  path->bell = found->second.bell.get();
  return {};
}

// What a dead peer had put into our queue is taken out first, so that nothing refers to its place any more.
void Nic::forget_dead_shm_peers() {
  if (stash_count_ == 0) {
    stash_next_ = 0;
    stash_count_ = read_queue(stash_);
  }
  std::erase_if(shm_peers_, [&](const auto& entry) {
    const ShmPeer& peer = entry.second;
    if (peer.paths > 0 || !peer.bell->proven_dead()) return false;
    fi_addr_t address = peer.address;
    (void)fi_av_remove(objects_.addresses.get(), &address, 1, 0);
    return true;
  });
}

// libfabric keeps no connection that could outlive a peer: a restarted one answers under a new process id (tcp), name (shm) or queue
// pair number (efa), so the generation has nothing to tell.
Error Nic::open_path(const te_nic_address& remote, uint64_t, PathId* path) {
  if (remote.length == 0 || remote.length > sizeof remote.bytes ||
      (kind_ == Kind::kTcp && remote.length != description_.address.length)) {
    return Error(Status::kPeerUnreachable,
                 format("an address of %u bytes is none of %s's", remote.length, info_->fabric_attr->prov_name));
  }
  Path opened;
  opened.open = true;
  opened.remote = remote;
  if (Error error = kind_ == Kind::kShm ? insert_shm(remote, &opened) : share_address(remote, &opened.address))
    return error;
  if (free_paths_.empty()) {
    free_paths_.push_back(static_cast<uint32_t>(paths_.size()));
    paths_.emplace_back();
    dirty_.reserve(paths_.size());
    free_paths_.reserve(paths_.size());
  }
  const uint32_t index = free_paths_.back();
  free_paths_.pop_back();
  opened.dirty = paths_[index].dirty;  // it may still stand in dirty_
  paths_[index] = std::move(opened);
  *path = index;
  return {};
}

// A slot is used again once all completions that name it have come.
void Nic::close_path(PathId path) {
  if (path >= paths_.size() || !paths_[path].open) return;
  Path& slot = paths_[path];
  slot.open = false;
  in_flight_ -= slot.in_flight;
  if (kind_ == Kind::kShm) {
    for (auto& [name, peer] : shm_peers_) {
      if (peer.bell.get() == slot.bell) --peer.paths;
    }
    slot.bell = nullptr;
  } else {
    leave_address(slot.remote);
  }
  if (slot.in_flight == 0) free_paths_.push_back(static_cast<uint32_t>(path));
}

Death Nic::death_of(PathId id) {
  if (id >= paths_.size() || !paths_[id].open) return Death::kNotProven;
  Path& path = paths_[id];
  if (kind_ == Kind::kTcp) return path.probe.ask(path.remote, now_ns());
  return path.bell != nullptr && path.bell->proven_dead() ? Death::kProven : Death::kNotProven;
}

}  // namespace te::efa
#endif
