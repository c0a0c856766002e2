// The Provider of a transport whose NICs know nothing of each other: a row of them, each call handed to the one it names. `Nic` is the
// transport's own class, so a call costs the Provider's virtual one and no other. It has the methods used here; what only
// some transports can do (reset_path, death_of, ring_doorbells) is overridden by them.
//
// Threads: as native/provider.h has it. Nothing here locks.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "native/provider.h"

namespace te {

// Leaves what both can do: the shorter limits, and a promise only where both make it.
inline void restrict_to(Capabilities* all, const Capabilities& one) {
  all->max_write_bytes = std::min(all->max_write_bytes, one.max_write_bytes);
  all->max_send_bytes = std::min(all->max_send_bytes, one.max_send_bytes);
  all->nic_depth = std::min(all->nic_depth, one.nic_depth);
  all->receive_depth = std::min(all->receive_depth, one.receive_depth);
  // 0 means that it cannot overrun.
  if (all->completion_depth == 0) all->completion_depth = one.completion_depth;
  else if (one.completion_depth != 0) all->completion_depth = std::min(all->completion_depth, one.completion_depth);
  all->ordered_writes = all->ordered_writes && one.ordered_writes;
  all->ordered_sends = all->ordered_sends && one.ordered_sends;
  all->delivery_complete = all->delivery_complete && one.delivery_complete;
  all->completion_orders = all->completion_orders && one.completion_orders;
  all->keys_enforced = all->keys_enforced && one.keys_enforced;
  all->reads = all->reads && one.reads;
  all->device_memory = all->device_memory && one.device_memory;
  all->immediate_consumes_receive = all->immediate_consumes_receive || one.immediate_consumes_receive;
  all->reports_dead_peer = all->reports_dead_peer && one.reports_dead_peer;
}

template <typename Nic>
class NicRow : public Provider {
 public:
  NicRow(std::string library, std::vector<std::unique_ptr<Nic>> nics)
      : library_(std::move(library)), nics_(std::move(nics)), capabilities_(nics_.front()->capabilities()) {
    for (const auto& nic : nics_) restrict_to(&capabilities_, nic->capabilities());
  }

  // A forked child has inherited the objects; the sockets, files and kernel objects behind them are the parent's, so it leaves them alone.
  ~NicRow() override {
    if (getpid() == owner_) return;
    for (auto& nic : nics_) static_cast<void>(nic.release());
  }

  const Capabilities& capabilities() const final { return capabilities_; }
  std::string provider_name() const final { return nics_.front()->provider_name(); }
  std::string library_name() const final { return library_; }
  uint32_t nic_count() const final { return static_cast<uint32_t>(nics_.size()); }
  NicInfo nic(uint32_t nic) const final { return nics_[nic]->info(); }

  Error register_memory(uint32_t nic, const MemorySpan& span, MemoryKey* key) final {
    return nics_[nic]->register_memory(span, key);
  }
  Error deregister_memory(uint32_t nic, const MemoryKey& key) final { return nics_[nic]->deregister_memory(key); }

  Error open_path(uint32_t nic, const te_nic_address& remote, uint64_t generation, PathId* path) final {
    return nics_[nic]->open_path(remote, generation, path);
  }
  void close_path(uint32_t nic, PathId path) final { nics_[nic]->close_path(path); }

  PostResult post(uint32_t nic, std::span<const WorkRequest> requests) final { return nics_[nic]->post(requests); }
  PostResult post_receive(uint32_t nic, void* buffer, uint64_t length, uint64_t local_key, WorkContext* context) final {
    return nics_[nic]->post_receive(buffer, length, local_key, context);
  }
  uint32_t poll(uint32_t nic, std::span<Completion> out) final { return nics_[nic]->poll(out); }

  int wait_fd(uint32_t nic) const final { return nics_[nic]->wait_fd(); }
  bool arm(uint32_t nic) final { return nics_[nic]->arm(); }

  Error inject(std::string_view) final {
    return Error(Status::kUnsupported, "only the simulated fabric takes commands");
  }

 protected:
  const std::vector<std::unique_ptr<Nic>>& nics() const { return nics_; }

 private:
  const std::string library_;
  std::vector<std::unique_ptr<Nic>> nics_;
  Capabilities capabilities_;
  const pid_t owner_ = getpid();
};

// Opens a NIC for each choice, by open(choice, &nic). An error carries the index of the NIC that could not be opened.
template <typename Nic, typename Choices, typename Open>
Error open_row(Choices&& choices, const Open& open, std::vector<std::unique_ptr<Nic>>* out) {
  std::vector<std::unique_ptr<Nic>> nics;
  for (auto& choice : choices) {
    std::unique_ptr<Nic> nic;
    if (Error error = open(choice, &nic))
      return Error(error.status(), error.message(), error.provider_status(), static_cast<int>(nics.size()));
    nics.push_back(std::move(nic));
  }
  *out = std::move(nics);
  return {};
}

}  // namespace te
