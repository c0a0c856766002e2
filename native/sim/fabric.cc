#include "native/sim/fabric.h"

#include <utility>

#include "native/sim/host.h"
#include "native/sim/nic.h"
#include "native/system.h"

namespace te::sim {

Fabric& Fabric::instance() {
  static Fabric* const fabric = [] {
    auto* made = new Fabric;
    hold_across_forks(&made->mutex);
    return made;
  }();  // never destroyed: engines may outlive static destructors
  return *fabric;
}

std::shared_ptr<Endpoint> Fabric::endpoint(const std::string& address) {
  std::shared_ptr<Endpoint>& slot = endpoints_[address];
  if (slot == nullptr) {
    slot = std::make_shared<Endpoint>();
    slot->address = address;
  }
  return slot;
}

void Fabric::release(std::shared_ptr<Endpoint>* endpoint) {
  const auto entry = endpoints_.find((*endpoint)->address);
  endpoint->reset();
  if (entry != endpoints_.end() && entry->second.use_count() == 1) endpoints_.erase(entry);
}

void Fabric::attach(Endpoint& endpoint, Nic& nic) {
  endpoint.nic = &nic;
  ++endpoint.incarnation;
  nics_.emplace(nic.serial(), &nic);
  wake(endpoint);
}

void Fabric::detach(Endpoint& endpoint, Nic& nic, End end) {
  nics_.erase(nic.serial());
  if (endpoint.nic != &nic) return;  // killed before, and perhaps replaced
  endpoint.nic = nullptr;
  if (end != End::kClosed) endpoint.killed_through = endpoint.incarnation;
  if (end == End::kKilledSilently) endpoint.silent_through = endpoint.incarnation;
  wake(endpoint);
}

void Fabric::wake(Endpoint& endpoint) {
  const std::vector<Endpoint::Waiter> waiters = std::exchange(endpoint.waiters, {});
  for (const Endpoint::Waiter& waiter : waiters) {
    const auto nic = nics_.find(waiter.nic_serial);
    if (nic != nics_.end()) nic->second->wake(waiter.path);
  }
}

void Fabric::add(Host& host) { hosts_.push_back(&host); }

void Fabric::remove(Host& host) {
  std::erase(hosts_, &host);
  std::erase_if(partitions_, [&](const auto& pair) { return pair.first == host.identity; });
  resume_all();
}

void Fabric::resume_all() {
  for (Host* host : hosts_)
    for (const auto& nic : host->nics) nic->resume_all();
}

void Fabric::heal(const Identity& engine) {
  std::erase_if(partitions_, [&](const auto& pair) { return pair.first == engine || pair.second == engine; });
  resume_all();
}

void Fabric::heal(const Identity& a, const Identity& b) {
  partitions_.erase({a, b});
  partitions_.erase({b, a});
  resume_all();
}

}  // namespace te::sim
