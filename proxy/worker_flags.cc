// What callers order about flags, watchers and triggers, and the flags that rise with counters.
//
// Order. A flag rises after its counter's value, and both with release: who sees the epoch sees the value, and every byte that it counts.
#include <algorithm>

#include "proxy/worker.h"

namespace te {
namespace {

bool lost(const Peer* peer) {
  const uint32_t state = peer == nullptr ? uint32_t{TE_PEER_LOST} : peer->state.load(std::memory_order_relaxed);
  return state == TE_PEER_LOST || state == TE_PEER_CLOSED;
}

}  // namespace

bool Worker::take_orders(bool for_good) {
  PendingOrder* next = engine_.coordination_.orders.take(for_good);
  const bool any = next != nullptr;
  while (next != nullptr) {
    PendingOrder* pending = next;
    next = pending->next;
    carry_out(*pending);
    const Order order = pending->order;
    pending->done.store(1, std::memory_order_release);
    futex_wake_all(&pending->done);
    pending->leave();
    if (order.binding != nullptr) engine_.leave_shared(order.binding);
    if (order.watcher != nullptr) engine_.leave_shared(order.watcher);
    if (order.trigger != nullptr) engine_.leave_shared(order.trigger);
  }
  return any;
}

void Worker::carry_out(PendingOrder& pending) {
  const Order& order = pending.order;
  const auto refuse = [&](const char* why) {
    pending.outcome = Status::kClosed;
    pending.why = why;
  };
  switch (order.kind) {
    case Order::Kind::kBind:
      if (!bind(*order.binding)) refuse("the counter is closed");
      return;
    case Order::Kind::kUnbind:
      return unbind(*order.binding);
    case Order::Kind::kNotify:
      return notify(*order.watcher, order.on);
    case Order::Kind::kForgetWatcher:
      return forget(*order.watcher);
    case Order::Kind::kArm:
      if (!arm(*order.watcher, *order.trigger)) refuse("the watcher is closed");
      return;
    case Order::Kind::kCancel:
      return disarm(*order.trigger);
  }
}

// --- bindings --------------------------------------------------------------------------------------------------------------------

bool Worker::bind(Binding& binding) {
  Counter* counter = engine_.counters_.get(binding.counter_handle);
  if (counter == nullptr || !counter->open.load(std::memory_order_relaxed)) return false;
  if (!binding.open.load(std::memory_order_relaxed)) return true;  // the caller has given up waiting
  binding.stay();
  binding.counter = counter;
  counter->bindings.push_back(&binding);
  if (!binding.peers.empty()) bound_to_peers_.push_back(&binding);
  if (const uint64_t due = binding.due(counter->value.load(std::memory_order_relaxed)); due > 0)
    binding.flag->raise(due);
  for (const int32_t index : binding.peers)
    if (lost(engine_.peer_at(index))) binding.flag->abort(TE_ABORT_PEER_LOST, index);
  return true;
}

void Worker::unbind(Binding& binding) {
  if (binding.counter == nullptr) return;
  std::erase(binding.counter->bindings, &binding);
  bound_to_peers_.remove(&binding);
  binding.counter = nullptr;
  engine_.leave_shared(&binding);
}

void Worker::unbind_all(Counter& counter) {
  while (!counter.bindings.empty()) unbind(*counter.bindings.back());
}

void Worker::raise_bound(Counter& counter, uint64_t value) {
  for (Binding* binding : counter.bindings)
    if (const uint64_t due = binding->due(value); due > 0) binding->flag->raise(due);
}

void Worker::abort_bound(const Peer& peer) {
  for (Binding* binding = bound_to_peers_.front(); binding != nullptr; binding = bound_to_peers_.next(binding))
    if (std::find(binding->peers.begin(), binding->peers.end(), peer.index) != binding->peers.end())
      binding->flag->abort(TE_ABORT_PEER_LOST, peer.index);
}

}  // namespace te
