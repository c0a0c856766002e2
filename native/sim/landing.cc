// What an operation does at its target: the decision on its fate, keys and bounds, pieces, receives.
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "native/sim/nic.h"

namespace te::sim {
namespace {

// Larger dead regions have no shadow: what would land there is only counted.
constexpr uint64_t kMaxShadow = 64 << 20;

bool inside(uint64_t begin, uint64_t length, uint64_t size) { return begin <= size && length <= size - begin; }

}  // namespace

// --- leaving --------------------------------------------------------------------------------------------------------

Fate Nic::choose_fate() {
  Host& host = host_;
  const bool counting = host.fail_after.value_or(0) > 0;
  if (counting) --*host.fail_after;
  if (!counting && host.errors_due > 0) {
    --host.errors_due;
    if (host.errors_fate != Fate::kGood) return host.errors_fate;
  } else if (!host.random.chance(host.options.error)) {
    return Fate::kGood;
  }
  constexpr Fate kFates[] = {Fate::kClean, Fate::kUnknown, Fate::kPartial, Fate::kLanded, Fate::kLate};
  return kFates[host.random.below(std::size(kFates))];
}

// False: nothing more happens in this poll.
bool Nic::depart(Operation& op) {
  op.departed = true;
  const WorkRequest& request = op.request;
  const uint64_t mtu = host_.options.mtu;
  const bool whole = request.opcode == Opcode::kSend || request.length <= mtu;
  op.pieces = whole ? 1 : static_cast<uint32_t>(std::min<uint64_t>(kMaxPieces, (request.length - 1) / mtu + 1));
  if (op.is_write()) op.fate = choose_fate();
  if (op.fate == Fate::kClean || op.fate == Fate::kUnknown || (op.fate == Fate::kPartial && op.pieces == 1)) {
    fail(op, Status::kTransport, op.fate != Fate::kClean, EIO);
    return false;
  }
  const bool early = op.fate == Fate::kLate || (op.fate == Fate::kGood && request.opcode != Opcode::kRead &&
                                                !host_.capabilities.delivery_complete);
  if (early) leave_early(op);
  return !early;
}

// The completion comes now, the landing later: from a copy, as the source may be reused.
void Nic::leave_early(Operation& op) {
  if (!covers(op.request.local_key, op.request.local, op.request.length))
    return fail(op, Status::kTransport, false, EFAULT);
  if (op.request.length > 0) {
    const auto* bytes = static_cast<const std::byte*>(op.request.local);
    op.snapshot.assign(bytes, bytes + op.request.length);
  }
  op.due = tick_ + 1 + host_.random.below(host_.options.delay + 1);
  if (op.fate == Fate::kLate) {
    report(op, Status::kTransport, true, EIO);
    break_path(op);
  } else {
    report(op, Status::kOk, false, 0);
  }
  schedule(op);
}

// Null: the memory is no longer registered here, and must not be touched.
const std::byte* Nic::source(const Operation& op) const {
  if (op.reported) return op.snapshot.data();
  const WorkRequest& request = op.request;
  return covers(request.local_key, request.local, request.length) ? static_cast<const std::byte*>(request.local)
                                                                  : nullptr;
}

// --- landing --------------------------------------------------------------------------------------------------------

void Nic::land(Operation& op, Nic& target) {
  if (op.request.opcode == Opcode::kSend) return deliver(op, target);
  // efa-direct: the target must hold the initiator in its address vector before an RMA arrives.
  if (target.host_.options.require_peer && !target.known_.contains(endpoint_.get()))
    return fail(op, Status::kTransport, false, EHOSTUNREACH);
  land_piece(op, target);
}

void Nic::land_piece(Operation& op, Nic& target) {
  const WorkRequest& request = op.request;
  std::byte* remote = nullptr;
  const Placed placed = locate(op, target, &remote);
  if (placed == Placed::kRefused) return fail(op, Status::kRemoteAccess, op.begun(), EACCES);
  if (placed == Placed::kVanished) return landed(op);
  if (request.length > 0) {
    const std::byte* local = source(op);
    if (local == nullptr) return fail(op, Status::kTransport, op.begun(), EFAULT);
    const uint32_t piece = next_piece(op);
    const uint64_t begin = request.length * piece / op.pieces;
    const uint64_t length = request.length * (piece + 1) / op.pieces - begin;
    op.landed_mask |= 1u << piece;
    if (remote != nullptr) copy_piece(op, local, remote, begin, length);
  }
  ++op.landed_count;
  if (op.fate == Fate::kPartial) return fail(op, Status::kTransport, true, EIO);
  if (op.landed_count < op.pieces) {
    op.due = tick_ + 1;
    return schedule(op);
  }
  if (request.opcode == Opcode::kWriteImmediate) {
    Completion arrival;
    arrival.kind = CompletionKind::kImmediate;
    arrival.immediate = request.immediate;
    arrival.length = request.length;
    if (!target.queue(arrival)) return fail(op, Status::kTransport, true, EIO);
    ++host_.counts.immediates;
  }
  landed(op);
}

// Packets of one write keep their order on ordered paths only.
uint32_t Nic::next_piece(const Operation& op) {
  if (ordered_) return op.landed_count;
  uint64_t skip = host_.random.below(op.pieces - op.landed_count);
  uint32_t piece = 0;
  while ((op.landed_mask >> piece & 1) != 0 || skip-- > 0) ++piece;
  return piece;
}

void Nic::copy_piece(const Operation& op, const std::byte* local, std::byte* remote, uint64_t begin, uint64_t length) {
  // memmove: an engine may write to itself.
  if (op.request.opcode == Opcode::kRead) {
    std::memmove(static_cast<std::byte*>(op.request.local) + begin, remote + begin, length);
    return;
  }
  std::memmove(remote + begin, local + begin, length);
  if (host_.flips_due == 0) return;
  --host_.flips_due;
  ++host_.counts.flipped;
  const uint64_t bit = host_.random.below(length * 8);
  remote[begin + bit / 8] ^= std::byte{1} << (bit % 8);
}

// A send takes the oldest receive, or waits until there is one.
void Nic::deliver(Operation& op, Nic& target) {
  const WorkRequest& request = op.request;
  if (target.receives_.empty()) {
    ++host_.counts.not_ready;
    return stall(op);
  }
  const std::byte* local = source(op);
  if (local == nullptr && request.length > 0) return fail(op, Status::kTransport, false, EFAULT);
  const Receive receive = target.receives_.front();
  Completion arrival;
  arrival.kind = CompletionKind::kReceived;
  arrival.context = receive.context;
  arrival.length = request.length;
  if (!target.covers(receive.local_key, receive.buffer, receive.length)) {
    arrival.status = Status::kTransport;
    arrival.provider_status = EFAULT;
  } else if (request.length > receive.length) {
    arrival.status = Status::kTransport;
    arrival.provider_status = EMSGSIZE;
  } else if (request.length > 0) {
    std::memcpy(receive.buffer, local, request.length);
  }
  if (!target.queue(arrival)) return fail(op, Status::kTransport, true, EIO);
  target.receives_.pop_front();
  landed(op);
}

void Nic::landed(Operation& op) {
  Counts& counts = host_.counts;
  ++(op.is_write() ? counts.writes : op.request.opcode == Opcode::kRead ? counts.reads : counts.sends);
  if (op.fate == Fate::kLanded) return fail(op, Status::kTransport, true, EIO);
  if (op.reported) return retire(op);
  op.stage = Stage::kLanded;
  Path& path = *op.path;
  op.due = tick_ + host_.random.below(host_.options.delay + 1);
  if (ordered_) op.due = path.last_completion_due = std::max(op.due, path.last_completion_due);
  schedule(op);
  if (ordered_) start_next(path, op.next);
}

// --- keys -----------------------------------------------------------------------------------------------------------

Nic::Placed Nic::locate(const Operation& op, Nic& target, std::byte** memory) {
  const WorkRequest& request = op.request;
  if (request.length == 0) return Placed::kYes;  // as on InfiniBand: nothing is touched, no key is checked
  const bool enforced = target.host_.options.keys_enforced;
  const bool lands = target.host_.options.stale_keys_land;
  const auto entry = request.remote_key >> 32 != 0
                         ? target.registrations_.end()
                         : target.registrations_.find(static_cast<uint32_t>(request.remote_key));
  const bool known = entry != target.registrations_.end();
  if (known && entry->second.live) {
    Registration& registration = entry->second;
    if (request.remote_address < registration.base) return Placed::kRefused;
    const uint64_t offset = request.remote_address - registration.base;
    if (!inside(offset, request.length, registration.length)) return Placed::kRefused;
    *memory = registration.address + offset;
    return Placed::kYes;
  }
  if (enforced || (lands && !known) || (!lands && request.opcode == Opcode::kRead)) return Placed::kRefused;
  if (lands) return locate_stale(op, target, entry->second, memory);
  ++host_.counts.stale_lost;
  return Placed::kVanished;
}

// The key is dead, but nothing enforces that. Memory that is registered again, under whatever key, is there to be hit.
// Other memory may have been freed: a shadow takes the bytes in its place.
Nic::Placed Nic::locate_stale(const Operation& op, Nic& target, Registration& dead, std::byte** memory) {
  const WorkRequest& request = op.request;
  if (request.remote_address < dead.base) return Placed::kRefused;
  const uint64_t offset = request.remote_address - dead.base;
  if (!inside(offset, request.length, dead.length)) return Placed::kRefused;
  std::byte* const address = dead.address + offset;
  for (const auto& [key, registration] : target.registrations_) {
    if (!registration.live || address < registration.address) continue;
    if (!inside(static_cast<uint64_t>(address - registration.address), request.length, registration.length)) continue;
    *memory = address;
    if (op.landed_count == 0) ++host_.counts.stale_live;
    return Placed::kYes;
  }
  if (dead.length > kMaxShadow && request.opcode == Opcode::kRead) return Placed::kRefused;
  if (dead.length <= kMaxShadow) {
    dead.shadow.resize(dead.length);
    *memory = dead.shadow.data() + offset;
  }
  if (op.landed_count == 0) ++host_.counts.stale_shadow;
  return Placed::kYes;
}

// --- connecting -----------------------------------------------------------------------------------------------------

void Nic::finish_connecting(Operation& op) {
  Path& path = *op.path;
  op.incarnation = path.endpoint->incarnation;
  const Reach reached = up() ? reach(op) : Reach::kDown;
  if (reached == Reach::kSilent) return stall(op);
  path.up = reached == Reach::kOpen;
  path.down_told = !path.up;
  Completion event;
  event.kind = path.up ? CompletionKind::kPathUp : CompletionKind::kPathDown;
  event.status = path.up ? Status::kOk : reached == Reach::kLost ? Status::kPeerLost : Status::kTransport;
  event.path = path.id;
  queue_event(event);
  unlink(op);
  recycle(&op);
}

}  // namespace te::sim
