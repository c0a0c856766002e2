// Regions and counters of this engine, and handles for those of others.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "native/gpu/memory.h"
#include "proxy/engine.h"
#include "proxy/worker.h"

namespace te {
namespace {

std::string remote_key(int32_t peer, uint64_t serial) {
  std::string key(reinterpret_cast<const char*>(&peer), sizeof peer);
  key.append(reinterpret_cast<const char*>(&serial), sizeof serial);
  return key;
}

constexpr int64_t kWaitSlice = 50'000'000;  // a lost peer is noticed at least this often while waiting for a counter
constexpr int64_t kSweepPatience = 1'000'000'000;  // the worker sweeps within microseconds, unless it is held up

}  // namespace

// Providers refuse empty spans, but a region of no bytes may still be the target of writes that only notify: it has some bytes of the
// engine's own behind its keys, which no checked range can reach.
MemorySpan Engine::provider_span(const MemorySpan& span) {
  return span.length > 0 ? span : MemorySpan{placeholder_, sizeof placeholder_, TE_DEVICE_HOST, 0};
}

// --- regions -------------------------------------------------------------------------------------------------------------------------

Error Engine::register_region(MemorySpan span, te_handle* handle) {
  if (span.address == nullptr && span.length > 0)
    return Error(Status::kArgument, "a null pointer cannot be registered");
  if (span.length > 0 && reinterpret_cast<uint64_t>(span.address) > UINT64_MAX - span.length)
    return Error(Status::kRange, format("%llu bytes from %p wrap around the address space",
                                        static_cast<unsigned long long>(span.length), span.address));
  OwnedDescriptor dmabuf;
  gpu::DeviceRange range;
  Reach reach = span.dmabuf_fd >= 0 ? Reach::kDmabuf : Reach::kHost;
  if (span.device_kind != TE_DEVICE_HOST && span.dmabuf_fd < 0 && span.length > 0)
    if (Error e = reach_device(&span, &range, &dmabuf, &reach)) return e;
  if (span.dmabuf_fd >= 0 && dmabuf.fd() < 0) {
    dmabuf = OwnedDescriptor(fcntl(span.dmabuf_fd, F_DUPFD_CLOEXEC, 0));
    if (dmabuf.fd() < 0)
      return Error(Status::kArgument, format("descriptor %d: %s", span.dmabuf_fd, std::strerror(errno)), errno);
    span.dmabuf_fd = dmabuf.fd();
  }
  const std::shared_lock provider_lock(provider_mutex_);
  if (provider_ == nullptr) return Error(Status::kClosed, kClosedEngine);
  MemoryKey keys[TE_MAX_NICS];
  Error refused = register_everywhere(span, keys);
  if (refused && reach == Reach::kDmabuf && range.cuda != nullptr && refused.provider_status() == EOPNOTSUPP) {
    span.dmabuf_fd = -1;  // the NIC's driver knows no dma-buf; perhaps it knows the GPU's
    dmabuf = OwnedDescriptor();
    reach = Reach::kPeerMemory;
    if (register_everywhere(span, keys).ok()) refused = Error();
  }
  if (refused && reach != Reach::kHost)
    return Error(refused.status(), refused.message() + ": without that, register it with staging=True",
                 refused.provider_status(), refused.nic());
  if (refused) return refused;
  Error error = add_region(span, range, std::move(dmabuf), keys, reach, handle);
  for (uint32_t i = 0; error && i < nic_count_; ++i) static_cast<void>(provider_->deregister_memory(i, keys[i]).ok());
  return error;
}

// With all NICs, or none.
Error Engine::register_everywhere(const MemorySpan& span, MemoryKey* keys) {
  for (uint32_t i = 0; i < nic_count_; ++i) {
    Error e = provider_->register_memory(i, provider_span(span), &keys[i]);
    if (!e) continue;
    for (uint32_t k = 0; k < i; ++k) static_cast<void>(provider_->deregister_memory(k, keys[k]).ok());
    return e;
  }
  return {};
}

// `keys` null: the NICs do not know it.
Error Engine::add_region(const MemorySpan& span, const gpu::DeviceRange& range, OwnedDescriptor dmabuf,
                         const MemoryKey* keys, Reach reach, te_handle* handle) {
  Region* region = regions_.add([&](Region& r) {
    r.serial = next_serial_.fetch_add(1, std::memory_order_relaxed);
    r.span = span;
    r.dmabuf = std::move(dmabuf);
    r.reach = reach;
    r.buffer_id = range.buffer_id;
    r.cuda = range.cuda;
    for (uint32_t i = 0; i < TE_MAX_NICS; ++i) r.keys[i] = keys == nullptr ? MemoryKey{} : keys[i];
    r.holders.clear();
    r.waiting_holders.clear();
    r.fence_requesters.clear();
    r.rekeying = false;
    r.deregistered = keys == nullptr;
    r.arriving = 0;
    r.closing = nullptr;
    r.open.store(true, std::memory_order_seq_cst);
    const std::lock_guard lock(serials_mutex_);
    region_by_serial_[r.serial] = TE_NONE;
  });
  if (region == nullptr)
    return Error(Status::kExhausted, format("%u regions are registered, which is all that max_regions allows",
                                            settings_.values.max_regions));
  *handle = region->handle.load(std::memory_order_relaxed);
  const std::lock_guard lock(serials_mutex_);
  region_by_serial_[region->serial] = *handle;
  return {};
}

Error Engine::describe_region(te_handle handle, te_region_descriptor* out) {
  Region* region = regions_.get(handle);
  if (region == nullptr || !region->open.load(std::memory_order_acquire))
    return Error(Status::kRegionClosed, "the region is closed");
  if (region->buffer_id != 0)
    if (Error e = check_device_memory(*region)) return e;
  *out = te_region_descriptor{};
  out->address = address_;
  out->serial = region->serial;
  out->length = region->span.length;
  out->device_kind = region->span.device_kind;
  out->device_index = region->span.device_index;
  const std::lock_guard lock(region->mutex);
  for (uint32_t i = 0; i < nic_count_; ++i) {
    out->base[i] = region->keys[i].base;
    out->key[i] = region->keys[i].remote_key;
  }
  return {};
}

// The protocol half runs in the worker; deregistration, which may take long, in this thread.
Error Engine::close_region(te_handle handle, int64_t timeout_ns) {
  Region* region = regions_.get(handle);
  if (region == nullptr) return {};
  const std::lock_guard lock(region->close_mutex);
  if (regions_.get(handle) != region) return {};
  region->open.store(false, std::memory_order_seq_cst);
  const int64_t bound = timeout_or_default(timeout_ns);
  const int64_t deadline = deadline_after(now_ns(), bound);
  Error error;
  Operation* op = take_operation_patiently(deadline, &error);
  if (op == nullptr) return error;
  op->kind = OperationKind::kCloseRegion;
  op->region = region;
  op->deadline_ns = deadline;
  te_transfer* transfer = submit(op, &error);
  if (transfer == nullptr) return error;
  if (Error e = wait_operation(transfer, bound)) {
    if (e.status() != Status::kTimeout) return e;
    if (region->users.load(std::memory_order_relaxed) > 0)
      return Error(
          Status::kTimeout,
          "transfers that read from the region have not drained: some peer of theirs does not answer; the region "
          "stays refused to all and registered: close it again later");
    return Error(Status::kTimeout,
                 "a peer that holds the region has not confirmed that it drained; the region stays refused to all and "
                 "registered: close it again later");
  }
  const std::shared_lock provider_lock(provider_mutex_);
  for (uint32_t i = 0; i < nic_count_ && provider_ != nullptr && !region->deregistered; ++i)
    if (Error e = provider_->deregister_memory(i, region->keys[i])) error = e;
  region->deregistered = true;
  region->dmabuf = OwnedDescriptor();
  {
    const std::lock_guard serials(serials_mutex_);
    region_by_serial_.erase(region->serial);
  }
  regions_.recycle(region);
  return error;
}

Error Engine::wait_operation(te_transfer* transfer, int64_t timeout_ns) {
  // The operation has a deadline of its own; the slack only guards against a worker that is gone.
  wait_for_bits(transfer, te_transfer::kDone, deadline_after(10'000'000'000, timeout_ns));
  te_error result;
  if (!transfer->ended())
    return release_transfer(transfer), Error(Status::kTimeout, "the worker thread does not answer");
  export_result(*transfer, &result);
  release_transfer(transfer);
  return result.status == TE_OK
             ? Error()
             : Error(static_cast<Status>(result.status), result.message, result.provider_status, result.nic);
}

// TE_NONE when the table is full. (The worker recycles only after it took the key out, under the mutex: a handle found here is right.)
template <typename T, typename F>
te_handle Engine::find_or_add(Table<T>& table, std::unordered_map<std::string, te_handle>& known, int32_t peer,
                              uint64_t serial, F&& prepare) {
  const std::string key = remote_key(peer, serial);
  const std::lock_guard lock(remotes_mutex_);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  Peer* const owner = peer_at(peer);
  if (owner == nullptr) return TE_NONE;
  const T* remote = table.add([&](T& r) {
    r.peer = owner;
    r.serial = serial;
    r.in_flight = r.operations = 0;
    r.listed = r.revoke_pending = r.exhausted = false;
    prepare(r);
    r.state.store(Attachment::kNew, std::memory_order_release);
  });
  if (remote == nullptr) return TE_NONE;
  const te_handle handle = remote->handle.load(std::memory_order_relaxed);
  known.emplace(key, handle);
  return handle;
}

te_handle Engine::find_region(int32_t peer, uint64_t serial, uint64_t length) {
  return find_or_add(remote_regions_, remote_region_by_key_, peer, serial, [&](RemoteRegion& r) {
    r.length = length;
    r.slot_bytes = 0;
    r.fence = RemoteRegion::Fence::kNone;
  });
}

te_handle Engine::find_counter(int32_t peer, uint64_t serial) {
  return find_or_add(remote_counters_, remote_counter_by_key_, peer, serial, [](RemoteCounter&) {});
}

RemoteRegion* Engine::revive(const RemoteRegion& former, te_handle handle) {
  if (former.former_handle.load(std::memory_order_relaxed) != handle || former.former_closed) return nullptr;
  return remote_regions_.get(find_region(former.former_peer.load(std::memory_order_relaxed)->index,
                                         former.former_serial, former.former_length));
}

RemoteCounter* Engine::revive(const RemoteCounter& former, te_handle handle) {
  if (former.former_handle.load(std::memory_order_relaxed) != handle || former.former_closed) return nullptr;
  return remote_counters_.get(
      find_counter(former.former_peer.load(std::memory_order_relaxed)->index, former.former_serial));
}

// Asks the worker to give up what nobody can be using, and waits for it.
void Engine::sweep(bool peers) {
  const uint32_t before = sweeps_.load(std::memory_order_acquire);
  if (peers) sweep_peers_too_.store(true, std::memory_order_relaxed);
  sweep_requested_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
  const int64_t deadline = deadline_after(now_ns(), kSweepPatience);
  while (sweeps_.load(std::memory_order_acquire) == before && now_ns() < deadline &&
         !closing_.load(std::memory_order_relaxed))
    futex_wait(&sweeps_, before, kSweepPatience / 10);
}

// A full table is swept before it counts as full.
template <typename F>
Error Engine::patiently(const te_address& owner, uint32_t capacity, const char* what, const char* setting,
                        te_handle* handle, F&& find) {
  int32_t index = -1;
  if (Error e = peer(owner, &index)) return e;
  const Peer* known = peer_at(index);
  if (known == nullptr) return no_peer(index);
  if (Error e = check_fate(*known)) return e;
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (attempt > 0) sweep(false);
    const te_handle found = find(index);
    if (found == TE_NONE) continue;
    *handle = found;
    return {};
  }
  return Error(Status::kExhausted, format("%u %s are in use, which is all that %s allows", capacity, what, setting));
}

Error Engine::remote_region(const te_region_descriptor& d, te_handle* handle) {
  return patiently(d.address, remote_regions_.capacity(), "remote regions", "max_regions", handle,
                   [&](int32_t peer) { return find_region(peer, d.serial, d.length); });
}

Error Engine::remote_counter(const te_counter_descriptor& d, te_handle* handle) {
  return patiently(d.address, remote_counters_.capacity(), "remote counters", "max_counters", handle,
                   [&](int32_t peer) { return find_counter(peer, d.serial); });
}

Error Engine::check_fate(const Peer& peer) {
  switch (peer.fate.load(std::memory_order_relaxed)) {
    case Fate::kRestarted:
      return Error(Status::kPeerRestarted, kRestartedText).about_peer(peer.index);
    case Fate::kClosed:
      return Error(Status::kPeerLost, kClosedText).about_peer(peer.index);
    case Fate::kMayReturn:
      break;
  }
  return {};
}

Region* Engine::region_by_serial(uint64_t serial) {
  const std::lock_guard lock(serials_mutex_);
  const auto found = region_by_serial_.find(serial);
  return found == region_by_serial_.end() ? nullptr : regions_.get(found->second);
}

Counter* Engine::counter_by_serial(uint64_t serial) {
  const std::lock_guard lock(serials_mutex_);
  const auto found = counter_by_serial_.find(serial);
  return found == counter_by_serial_.end() ? nullptr : counters_.get(found->second);
}

// Whoever asks for it from now on gets another one.
void Engine::forget_remote(const Remote& remote, bool is_region) {
  const std::lock_guard lock(remotes_mutex_);
  auto& known = is_region ? remote_region_by_key_ : remote_counter_by_key_;
  const auto found = known.find(remote_key(remote.peer->index, remote.serial));
  if (found != known.end() && found->second == remote.handle.load(std::memory_order_relaxed)) known.erase(found);
}

// --- counters ------------------------------------------------------------------------------------------------------------------------

Error Engine::open_counter(te_handle* handle) {
  Counter* counter = counters_.add([&](Counter& c) {
    c.serial = next_serial_.fetch_add(1, std::memory_order_relaxed);
    c.value.store(0, std::memory_order_relaxed);
    c.wake_at.store(Counter::kNobody, std::memory_order_relaxed);
    c.holders.clear();
    c.armed.clear();
    c.closing = nullptr;
    c.open.store(true, std::memory_order_seq_cst);
  });
  if (counter == nullptr)
    return Error(Status::kExhausted,
                 format("%u counters are open, which is all that max_counters allows", counters_.capacity()));
  *handle = counter->handle.load(std::memory_order_relaxed);
  const std::lock_guard lock(serials_mutex_);
  counter_by_serial_[counter->serial] = *handle;
  return {};
}

Error Engine::describe_counter(te_handle handle, te_counter_descriptor* out) {
  const Counter* counter = counters_.get(handle);
  if (counter == nullptr || !counter->open.load(std::memory_order_acquire))
    return Error(Status::kClosed, "the counter is closed");
  *out = te_counter_descriptor{};
  out->address = address_;
  out->serial = counter->serial;
  return {};
}

Error Engine::counter_value(te_handle handle, uint64_t* value) {
  const Counter* counter = counters_.get(handle);
  if (counter == nullptr) return Error(Status::kClosed, "the counter is closed");
  *value = counter->value.load(std::memory_order_acquire);
  return {};
}

Error Engine::wait_counter(te_handle handle, uint64_t at_least, int64_t timeout_ns, std::span<const int32_t> peers) {
  Counter* counter = counters_.get(handle);
  if (counter == nullptr) return Error(Status::kClosed, "the counter is closed");
  const auto reached = [&] { return counter->value.load(std::memory_order_acquire) >= at_least; };
  if (reached() || (timeout_ns != 0 && spin_until(reached))) return {};
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Error outcome(Status::kAgain, "");
  for (;;) {
    const uint32_t epoch = counter->epoch.load(std::memory_order_acquire);
    counter->wait_for(at_least);
    if (counter->value.load(std::memory_order_seq_cst) >= at_least) {
      outcome = Error();
      break;
    }
    if (closing_.load(std::memory_order_relaxed) || !counter->open.load(std::memory_order_acquire) ||
        counters_.get(handle) != counter) {
      outcome = Error(Status::kClosed,
                      closing_.load(std::memory_order_relaxed) ? "the engine was closed" : "the counter was closed");
      break;
    }
    const int32_t* lost = std::find_if(peers.data(), peers.data() + peers.size(), [this](int32_t index) {
      const Peer* peer = peer_at(index);
      const uint32_t state = peer == nullptr ? uint32_t{TE_PEER_LOST} : peer->state.load(std::memory_order_acquire);
      return state == TE_PEER_LOST || state == TE_PEER_CLOSED;
    });
    if (lost != peers.data() + peers.size()) {
      outcome = Error(Status::kPeerLost,
                      format("counter at %llu/%llu when peer %d, on which it depends, was lost",
                             static_cast<unsigned long long>(counter->value.load(std::memory_order_acquire)),
                             static_cast<unsigned long long>(at_least), *lost))
                    .about_peer(*lost);
      break;
    }
    const int64_t left = deadline - now_ns();
    if (left <= 0) break;
    futex_wait(&counter->epoch, epoch, std::min(left, kWaitSlice));
  }
  return outcome;
}

te_transfer* Engine::counter_reached(te_handle handle, uint64_t at_least, int64_t timeout_ns,
                                     std::span<const int32_t> peers, Error* error) {
  Counter* counter = counters_.get(handle);
  if (counter == nullptr) {
    *error = Error(Status::kClosed, "the counter is closed");
    return nullptr;
  }
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Operation* op = take_operation(nullptr, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = OperationKind::kCounterReached;
  op->local_counter = counter;
  op->counter_handle = handle;
  op->threshold = at_least;
  op->watched.assign(peers.begin(), peers.end());
  op->deadline_ns = deadline;
  return submit(op, error);
}

Error Engine::close_counter(te_handle handle, int64_t timeout_ns) {
  Counter* counter = counters_.get(handle);
  if (counter == nullptr) return {};
  const std::lock_guard lock(counter->close_mutex);
  if (counters_.get(handle) != counter) return {};
  counter->open.store(false, std::memory_order_seq_cst);
  counter->wake();
  const int64_t bound = timeout_or_default(timeout_ns);
  const int64_t deadline = deadline_after(now_ns(), bound);
  Error error;
  Operation* op = take_operation_patiently(deadline, &error);
  if (op == nullptr) return error;
  op->kind = OperationKind::kCloseCounter;
  op->local_counter = counter;
  op->deadline_ns = deadline;
  te_transfer* transfer = submit(op, &error);
  if (transfer == nullptr) return error;
  if (Error e = wait_operation(transfer, bound)) return e;
  {
    const std::lock_guard serials(serials_mutex_);
    counter_by_serial_.erase(counter->serial);
  }
  counters_.recycle(counter);
  return {};
}

}  // namespace te
