// What the devices do with posted work: a step of one request at a time.
#include <algorithm>
#include <bit>
#include <cstring>

#include "tests/fabric/fabric.h"

namespace srd {
namespace {

Device* device_of(Fabric& f, const Address& address) {
  const uint32_t index = address.gid[15] - 1u;
  return address.gid[0] == 0xfe && index < f.devices.size() ? f.devices[index].get() : nullptr;
}

bool cut(const Fabric& f, const Device& one, const Device& other) {
  return one.lost || other.lost || f.faults.cuts.contains(std::minmax(one.index, other.index));
}

// Asked again later; when that was often enough, it ends.
void retry(Fabric& f, Request* request, uint64_t most, uint64_t ticks, uint32_t status) {
  if (request->tries >= most) return end(f, request, status);
  ++request->tries;
  f.wait(request, ticks);
}

// The endpoint that the request is for; null: the request has been dealt with.
Endpoint* reach(Fabric& f, Request* request) {
  Device* device = device_of(f, request->target);
  if (device == nullptr) return end(f, request, kUnreachable), nullptr;
  const auto found = device->endpoints.find(request->target.number);
  const bool silent = found != device->endpoints.end() && found->second->silent;
  if (silent || cut(f, *request->endpoint->device, *device)) {
    ++f.counts.retries;
    retry(f, request, f.options.retries, f.options.retry_ticks, kUnresponsive);
    return nullptr;
  }
  if (found == device->endpoints.end() || found->second->address.key != request->target.key)
    return end(f, request, kBadQueuePair), nullptr;
  return found->second;
}

// A device places what an RDMA request carries only for a peer that it knows.
bool known(Fabric& f, const Request& request, const Endpoint& target) {
  if (!target.direct || target.vector->known.contains(request.endpoint->address)) return true;
  ++f.counts.unknown_peer;
  return false;
}

bool take_receive(Fabric& f, Endpoint& target, Receive* out) {
  if (target.receives.empty()) {
    ++f.counts.rnr;
    return false;
  }
  *out = target.receives.front();
  target.receives.pop_front();
  return true;
}

void complete_receive(Fabric& f, Endpoint& target, const Receive& receive, uint64_t flags, uint64_t length,
                      uint32_t status) {
  Entry entry;
  entry.public_part.op_context = receive.context;
  entry.public_part.flags = flags;
  entry.public_part.len = length;
  entry.public_part.prov_errno = static_cast<int>(status);
  entry.public_part.err = error_of(status);
  entry.endpoint = &target;
  entry.used_receive = true;
  push(f, *target.receive, entry);
}

// False: there was no receive for it.
bool deliver_immediate(Fabric& f, const Request& request, Endpoint& target) {
  Entry entry;
  if (!target.unsolicited) {
    Receive receive;
    if (!take_receive(f, target, &receive)) return false;
    entry.public_part.op_context = receive.context;
    entry.used_receive = true;
  }
  entry.public_part.flags = FI_REMOTE_CQ_DATA | FI_RMA | FI_REMOTE_WRITE;
  entry.public_part.len = request.length;
  entry.public_part.data = request.immediate;
  entry.endpoint = &target;
  push(f, *target.receive, entry);
  ++f.counts.immediates;
  return true;
}

// One of the pieces that are missing.
uint32_t choose_piece(Fabric& f, const Request& request) {
  uint32_t left = request.missing;
  const bool any = f.options.reorder != 0;
  for (uint64_t skip = any ? f.random.below(static_cast<uint64_t>(std::popcount(left))) : 0; skip > 0; --skip)
    left &= left - 1;
  return static_cast<uint32_t>(std::countr_zero(left));
}

// kDone: the bytes were moved, or there are none.
uint32_t move_piece(Fabric& f, const Request& request, const Endpoint& target, uint32_t piece) {
  const uint64_t from = request.length * piece / request.pieces, to = request.length * (piece + 1) / request.pieces;
  if (from == to) return kDone;
  const bool write = request.kind == Kind::kWrite;
  uint8_t* local = request.local + from;
  const uint64_t remote = request.remote + from;
  if (local_region(f, request.endpoint->domain, request.descriptor, local, to - from, write ? FI_WRITE : FI_READ) ==
          nullptr &&
      request.endpoint->direct)
    return kBadLocalKey;
  if (remote_region(f, target.domain, request.key, remote, to - from, write ? FI_REMOTE_WRITE : FI_REMOTE_READ) ==
      nullptr)
    return kBadRemoteAddress;
  auto* far = reinterpret_cast<uint8_t*>(remote);
  std::memmove(write ? far : local, write ? local : far, to - from);
  f.counts.bytes += to - from;
  return kDone;
}

void step_rdma(Fabric& f, Request* request, Endpoint& target) {
  if (!known(f, *request, target)) return end(f, request, kUnknownPeer);
  if (request->missing != 0) {
    const uint32_t piece = choose_piece(f, *request);
    if (const uint32_t status = move_piece(f, *request, target, piece); status != kDone) return end(f, request, status);
    request->missing &= ~(1u << piece);
    if (request->missing != 0) return;
  }
  if (request->with_immediate && !deliver_immediate(f, *request, target))
    return retry(f, request, f.options.rnr_retries, f.options.rnr_ticks, kNoReceive);
  request->placed = true;
}

// The fabric `efa` delivers the sends of one endpoint to another in order.
bool is_next_send(const Request& request) {
  if (request.endpoint->direct) return true;
  for (const Request* earlier : request.endpoint->posted) {
    if (earlier == &request) return true;
    if (earlier->kind == Kind::kSend && !earlier->placed && earlier->target == request.target) return false;
  }
  return true;
}

void step_send(Fabric& f, Request* request, Endpoint& target) {
  if (!is_next_send(*request)) return;
  if (request->endpoint->direct && request->length > 0 &&
      local_region(f, request->endpoint->domain, request->descriptor, request->local, request->length, FI_SEND) ==
          nullptr)
    return end(f, request, kBadLocalKey);
  Receive receive;
  if (!take_receive(f, target, &receive))
    return retry(f, request, f.options.rnr_retries, f.options.rnr_ticks, kNoReceive);
  if (target.direct &&
      local_region(f, target.domain, receive.descriptor, receive.buffer, receive.length, FI_RECV) == nullptr) {
    complete_receive(f, target, receive, FI_MSG | FI_RECV, 0, kBadLocalKey);
    return end(f, request, kRemoteAbort);
  }
  if (request->length > receive.length) {
    complete_receive(f, target, receive, FI_MSG | FI_RECV, 0, kBadLocalLength);
    return end(f, request, kBadRemoteLength);
  }
  if (request->length > 0) std::memcpy(receive.buffer, request->local, request->length);
  f.counts.bytes += request->length;
  complete_receive(f, target, receive, FI_MSG | FI_RECV, request->length, kDone);
  request->placed = true;
}

}  // namespace

void step(Fabric& f, Request* request) {
  if (f.options.reorder == 0)  // as if the device did one after the other
    for (Request* each : request->endpoint->posted)
      if (each->place != SIZE_MAX) {
        request = each;
        break;
      }
  if (request->placed) return end(f, request, request->injected);
  if (request->injected != kDone && !request->landed) return end(f, request, request->injected);
  Endpoint* target = reach(f, request);
  if (target == nullptr) return;
  if (request->kind == Kind::kSend) step_send(f, request, *target);
  else step_rdma(f, request, *target);
}

void end(Fabric& f, Request* request, uint32_t status) {
  constexpr uint64_t kFlags[] = {FI_RMA | FI_WRITE, FI_RMA | FI_READ, FI_MSG | FI_SEND};
  Entry entry;
  entry.public_part.op_context = request->context;
  entry.public_part.flags = kFlags[static_cast<size_t>(request->kind)];
  entry.public_part.prov_errno = static_cast<int>(status);
  entry.public_part.err = error_of(status);
  entry.endpoint = request->endpoint;
  entry.transmit = true;
  Queue& queue = *request->endpoint->transmit;
  drop(f, request);
  push(f, queue, entry);
}

void drop(Fabric& f, Request* request) {
  f.forget(request);
  std::deque<Request*>& posted = request->endpoint->posted;
  posted.erase(std::find(posted.begin(), posted.end(), request));
  delete request;
}

void land_as_ghost(Fabric& f, const Request& request) {
  if (request.kind != Kind::kWrite || request.length == 0 || request.placed) return;
  Device* device = device_of(f, request.target);
  if (device == nullptr || cut(f, *request.endpoint->device, *device)) return;
  const auto found = device->endpoints.find(request.target.number);
  if (found == device->endpoints.end() || found->second->address.key != request.target.key) return;
  if (!known(f, request, *found->second)) return;
  for (uint32_t piece = 0; piece < request.pieces; ++piece)
    if (move_piece(f, request, *found->second, piece) != kDone) return;
  ++f.counts.ghosts;
}

}  // namespace srd
