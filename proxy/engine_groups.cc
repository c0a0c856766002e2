// Peer groups from the caller's side: targets and scatters. What the worker does with them: worker_scatter.cc.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "proxy/engine.h"

namespace te {
namespace {

using ull = unsigned long long;

constexpr uint32_t kMaxMembers = 1u << 16;
constexpr uint32_t kMaxFlights = 64;  // of one target, under way at a time
constexpr int64_t kSlice = 50'000'000;

GroupKey key_of(const te_address& address) {
  GroupKey key;
  std::memcpy(key.data(), address.identity, 16);
  for (int i = 0; i < 8; ++i) key[16 + i] = static_cast<uint8_t>(address.generation >> (56 - 8 * i));
  return key;
}

Error bad_range(uint32_t member, const char* which, int64_t offset, int64_t length, uint64_t limit) {
  if (length < 0)
    return Error(Status::kRange, format("member %u: a length of %lld bytes", member, static_cast<long long>(length)));
  return Error(Status::kRange, format("member %u: %s range [%lld, %lld + %lld) leaves its region of %llu bytes", member,
                                      which, static_cast<long long>(offset), static_cast<long long>(offset),
                                      static_cast<long long>(length), static_cast<ull>(limit)));
}

constexpr bool fits(int64_t offset, int64_t length, uint64_t limit) {
  return offset >= 0 && length >= 0 && range_fits(static_cast<uint64_t>(offset), static_cast<uint64_t>(length), limit);
}

Error check_options(const te_scatter_args& a) {
  if ((a.flags & ~static_cast<uint32_t>(TE_FLAG_FLUSH)) == 0 && a.shard <= TE_SHARD_BYTES) return {};
  return Error(Status::kArgument, format("unknown flags 0x%x or way of sharding %u", a.flags, a.shard));
}

Error check_part(uint32_t member, int64_t source, int64_t destination, int64_t length, uint64_t source_length,
                 const Member& to) {
  if (!fits(source, length, source_length)) [[unlikely]]
    return bad_range(member, "source", source, length, source_length);
  if (to.only_notified && length > 0) [[unlikely]]
    return Error(Status::kRange,
                 format("member %u: %lld bytes, but the target has no region of it: it is only notified", member,
                        static_cast<long long>(length)));
  if (to.peer != nullptr && !fits(destination, length, to.length)) [[unlikely]]
    return bad_range(member, "target", destination, length, to.length);
  return {};
}

int64_t at(const int64_t* array, uint32_t index) { return array == nullptr ? 0 : array[index]; }

}  // namespace

// --- targets ------------------------------------------------------------------------------------------------------------------------

// A member that is only notified is written no bytes, at a region that every engine has.
Error Engine::check_member(const te_target_member& value, Member* out) {
  te_handle remote = value.remote;
  if (remote == TE_NONE) {
    const Peer* peer = peer_at(value.peer);
    if (peer == nullptr) return no_peer(value.peer);
    remote = find_region(peer->index, kNoticeSerial, 0);
    if (remote == TE_NONE) {
      sweep(false);
      remote = find_region(peer->index, kNoticeSerial, 0);
    }
    if (remote == TE_NONE)
      return Error(Status::kExhausted, format("%u remote regions are in use, which is all that max_regions allows",
                                              remote_regions_.capacity()));
  }
  RemoteRegion* region = remote_regions_.get(remote);
  if (region == nullptr) return stale(remote_regions_.peek(remote), remote, "target region");
  RemoteCounter* counter = nullptr;
  if (value.counter != TE_NONE) {
    counter = remote_counters_.get(value.counter);
    if (counter == nullptr) return stale(remote_counters_.peek(value.counter), value.counter, "counter to notify");
    if (counter->peer != region->peer)
      return Error(Status::kArgument, "the counter to notify belongs to another engine than the target region");
  }
  *out = {region->peer, region, counter, remote, value.counter, region->length, false, value.remote == TE_NONE};
  return {};
}

Error Engine::open_target(std::span<const te_target_member> members, int32_t place, te_handle* handle) {
  if (members.size() > kMaxMembers)
    return Error(Status::kArgument, format("%zu members in one target; at most %u", members.size(), kMaxMembers));
  const auto count = static_cast<uint32_t>(members.size());
  if (place >= 0 && static_cast<uint32_t>(place) >= std::max(count, 1u))
    return Error(Status::kArgument, format("place %d is not among the %u members", place, count));
  std::vector<Member> found(count);
  std::vector<GroupKey> keys(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (Error e = check_member(members[i], &found[i]))
      return Error(e.status(), format("member %u: %s", i, e.message().c_str())).about_peer(e.peer());
    keys[i] = key_of(found[i].peer->address);
  }
  std::vector<uint32_t> order = posting_order(keys, key_of(address_), place);
  std::vector<Member> placed(count);
  for (uint32_t position = 0; position < count; ++position) placed[position] = found[order[position]];
  Target* target = targets_.add([&](Target& t) {
    t.count = count;
    t.order = std::move(order);
    t.members = placed;
    t.claimed.assign(count, Member{});
    t.templates.assign(count, Template{});
    t.requests.assign(size_t{count} * nic_count_, WorkRequest{});
    t.round = 0;
    t.born();
  });
  if (target == nullptr)
    return Error(Status::kExhausted, format("%u targets are open; close some first", targets_.capacity()));
  const te_handle opened = target->handle.load(std::memory_order_relaxed);
  if (Error e = tell_worker(OperationKind::kClaimTarget, target, nullptr)) {
    target->open.store(false, std::memory_order_release);
    if (target->leave()) recycle(target);
    return e;
  }
  *handle = opened;
  return {};
}

// The worker takes over what it must know. Whoever lets something go need not wait for that.
Error Engine::tell_worker(OperationKind kind, Target* target, Prepared* prepared) {
  const int64_t deadline = deadline_after(now_ns(), settings_.values.default_timeout_ns);
  Error error;
  Operation* op = take_operation_patiently(deadline, &error);
  if (op == nullptr) return error;
  op->kind = kind;
  op->target = target;
  op->prepared = prepared;
  op->deadline_ns = deadline;
  if (target != nullptr) target->stay();
  if (prepared != nullptr) prepared->stay();
  te_transfer* transfer = submit(op, &error);
  if (transfer == nullptr) {  // the caller is inside, too: these are not the last
    if (target != nullptr) target->leave();
    if (prepared != nullptr) prepared->leave();
    return error;
  }
  if (kind == OperationKind::kReleaseTarget) return release_transfer(transfer), Error();
  return wait_operation(transfer, settings_.values.default_timeout_ns);
}

Target* Engine::enter_target(te_handle handle) {
  Target* target = targets_.peek(handle);
  bool last = false;
  if (target == nullptr || !target->enter(handle, &last)) {
    if (last) recycle(target);
    return nullptr;
  }
  return target;
}

// Nobody uses it any more.
void Engine::recycle(Target* target) {
  target->flights.clear();
  target->spare = nullptr;
  target->returned.store(nullptr, std::memory_order_relaxed);
  targets_.recycle(target);
}

Error Engine::replace_member(te_handle handle, uint32_t member, const te_target_member* value) {
  Target* target = enter_target(handle);
  if (target == nullptr) return Error(Status::kStale, "the target is closed");
  Error error;
  Member found;
  if (member >= target->count)
    error = Error(Status::kArgument, format("member %u of a target with %u", member, target->count));
  else if (value != nullptr) error = check_member(*value, &found);
  if (!error) {
    const auto position =
        static_cast<size_t>(std::find(target->order.begin(), target->order.end(), member) - target->order.begin());
    {
      const std::lock_guard lock(target->mutex);
      target->members[position] = found;
    }
    error = tell_worker(OperationKind::kClaimTarget, target, nullptr);
  }
  if (target->leave()) recycle(target);
  return error;
}

Error Engine::close_target(te_handle handle) {
  Target* target = enter_target(handle);
  if (target == nullptr) return {};
  Error error;
  if (target->open.exchange(false, std::memory_order_acq_rel)) {
    error = tell_worker(OperationKind::kReleaseTarget, target, nullptr);
    static_cast<void>(target->leave());  // born's; we are still inside
  }
  if (target->leave()) recycle(target);
  return error;
}

// --- scatters ------------------------------------------------------------------------------------------------------------------------

// With target->mutex held. Null when as many are under way as may be.
Flight* Engine::take_flight(Target& target) {
  if (target.spare == nullptr) target.spare = target.returned.exchange(nullptr, std::memory_order_acquire);
  if (target.under_way.load(std::memory_order_relaxed) >= kMaxFlights) return nullptr;
  target.under_way.fetch_add(1, std::memory_order_relaxed);
  if (target.spare == nullptr) {
    auto made = std::make_unique<Flight>();
    made->target = &target;
    made->entries.reset(new Operation[target.count]);
    if (nic_count_ > 1) made->parts.reset(new Part[size_t{target.count} * nic_count_]);
    for (uint32_t i = 0; i < target.count; ++i) {
      Operation& op = made->entries[i];
      op.kind = OperationKind::kWrite;
      op.flight = made.get();
      op.member = target.order[i];
      if (nic_count_ > 1) op.part = &made->parts[size_t{i} * nic_count_];
    }
    target.flights.push_back(std::move(made));
    return target.flights.back().get();
  }
  Flight* flight = target.spare;
  target.spare = flight->next;
  return flight;
}

// Everything that can be refused is: before the first byte goes.
Error Engine::fill_flight(const te_scatter_args& a, const Target& target, uint64_t source_length, Flight* flight) {
  uint64_t total = 0;
  for (uint32_t position = 0; position < target.count; ++position) {
    const uint32_t member = target.order[position];
    const Member& to = target.members[position];
    const int64_t source = at(a.source_offsets, member), length = at(a.lengths, member);
    const int64_t destination = at(a.target_offsets, member);
    if (Error e = check_part(member, source, destination, length, source_length, to)) return e;
    Operation& op = flight->entries[position];
    op.rewind();
    op.peer = to.peer;
    op.remote = to.remote;
    op.counter = to.counter;
    op.remote_handle = to.remote_handle;
    op.counter_handle = to.counter_handle;
    op.source_offset = static_cast<uint64_t>(source);
    op.target_offset = static_cast<uint64_t>(destination);
    op.length = static_cast<uint64_t>(length);
    total += op.length;
  }
  flight->cut_above = a.shard == TE_SHARD_PEERS   ? UINT64_MAX
                      : a.shard == TE_SHARD_BYTES ? 0
                                                  : cut_above(total, nic_count_);
  return {};
}

te_transfer* Engine::finished_transfer(Error* error) {
  te_transfer* done = acquire_transfer(this, 0);
  if (done == nullptr) {
    *error = Error(Status::kExhausted, "no memory for a transfer");
    return nullptr;
  }
  done->finished_ns = done->submitted_ns;
  done->state.store(te_transfer::kDone | te_transfer::kQuiesced, std::memory_order_release);
  release_transfer(done);
  return done;
}

te_transfer* Engine::scatter(const te_scatter_args& args, int64_t timeout_ns, Error* error) {
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  if ((*error = check_options(args))) return nullptr;
  Target* target = enter_target(args.target);
  if (target == nullptr) {
    *error = Error(Status::kStale, "the target is closed");
    return nullptr;
  }
  te_transfer* transfer = scatter_on(args, *target, deadline, error);
  // A flight has its own hold on the target, so this is the last only if that has ended, too.
  if (target->leave()) recycle(target);
  return transfer;
}

te_transfer* Engine::scatter_on(const te_scatter_args& args, Target& target, int64_t deadline, Error* error) {
  Region* region = args.region == TE_NONE ? notice_region_ : regions_.get(args.region);
  const te_handle handle = args.region == TE_NONE ? notice_handle_ : args.region;
  if (region == nullptr || !region->enter(handle)) {
    *error = Error(Status::kRegionClosed, "the source region is closed");
    return nullptr;
  }
  if (region->buffer_id != 0) {
    if (Error e = check_device_memory(*region)) {
      region->leave();
      *error = e;
      return nullptr;
    }
  }
  if (target.count == 0) {
    region->leave();
    return finished_transfer(error);
  }
  Operation* op = take_operation(nullptr, deadline, error);
  Flight* flight = op == nullptr ? nullptr : take_flight_patiently(target, deadline, error);
  if (flight != nullptr) {
    flight->region = region;
    flight->deadline_ns = deadline;
    flight->flush = (args.flags & TE_FLAG_FLUSH) != 0;
    {
      const std::lock_guard lock(target.mutex);
      *error = fill_flight(args, target, region->span.length, flight);
    }
    if (!*error) {
      op->kind = OperationKind::kScatter;
      op->flight = flight;
      op->deadline_ns = deadline;
      target.stay();
      return submit(op, error);  // on failure drop_claims gives all of it back
    }
    target.under_way.fetch_sub(1, std::memory_order_relaxed);
    give_back_flight(flight);
  }
  region->leave();
  if (op != nullptr) give_back_operation(op);
  return nullptr;
}

Flight* Engine::take_flight_patiently(Target& target, int64_t deadline_ns, Error* error) {
  constexpr int kYields = 64;
  const int64_t slice_end = deadline_after(now_ns(), kSlice);
  for (int spin = 0;; ++spin) {
    {
      const std::lock_guard lock(target.mutex);
      if (Flight* flight = take_flight(target)) return flight;
    }
    const int64_t now = now_ns();
    if (closing_.load(std::memory_order_relaxed)) {
      *error = Error(Status::kClosed, kClosedEngine);
      return nullptr;
    }
    if (now >= deadline_ns || now >= slice_end) {
      *error = Error(now >= deadline_ns ? Status::kTimeout : Status::kAgain,
                     format("%u scatters of this target are under way, which is the most", kMaxFlights));
      return nullptr;
    }
    if (spin < kYields) sched_yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Any thread.
void Engine::give_back_flight(Flight* flight) {
  std::atomic<Flight*>& stack = flight->target->returned;
  Flight* head = stack.load(std::memory_order_relaxed);
  do {
    flight->next = head;
  } while (!stack.compare_exchange_weak(head, flight, std::memory_order_release, std::memory_order_relaxed));
}

// What fill_flight would refuse.
Error Engine::check_scatter(const te_scatter_args& a, Target& target) {
  if (Error e = check_options(a)) return e;
  const Region* region = a.region == TE_NONE ? notice_region_ : regions_.get(a.region);
  if (region == nullptr) return Error(Status::kRegionClosed, "the source region is closed");
  const uint64_t limit = region->span.length;
  const std::lock_guard lock(target.mutex);
  for (uint32_t position = 0; position < target.count; ++position) {
    const uint32_t member = target.order[position];
    const int64_t source = at(a.source_offsets, member), length = at(a.lengths, member);
    if (Error e = check_part(member, source, at(a.target_offsets, member), length, limit, target.members[position]))
      return e;
  }
  return {};
}

}  // namespace te
