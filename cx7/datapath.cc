// Posting and polling: no allocation, no lock, no look-up but the path's slot.
//
// A completion entry must tell what ended even when it is an error, and then only wr_id is valid. So wr_id has all of it:
//   kSent       queue << 34 | position << 2           (position: 32 bits, wraps)
//   kMessage    the engine's context, a multiple of 64
//   kImmediate  nothing: such a receive has no buffer
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "cx7/classify.h"
#include "cx7/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {
namespace {

enum Mark : uint64_t { kSent = 0, kMessage = 1, kImmediate = 2, kMarkBits = 3 };

// At least every so many requests, or bytes, one is signalled. More entries cost more than they tell; fewer would hold back the ends
// of transfers: a 400 Gb/s port sends 256 KiB in 5 us.
constexpr uint32_t kSignalEvery = 16;
constexpr uint64_t kSignalBytes = 256u << 10;
constexpr int64_t kServeEvery = 1'000'000;
constexpr uint32_t kPollsPerService = 64;

constexpr uint64_t sent_id(uint32_t queue, uint32_t position) {
  return uint64_t{queue} << 34 | uint64_t{position} << 2 | kSent;
}

// By te::Opcode.
constexpr ibv_wr_opcode kOpcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_SEND};
static_assert(static_cast<int>(Opcode::kWrite) == 0 && static_cast<int>(Opcode::kWriteImmediate) == 1 &&
              static_cast<int>(Opcode::kRead) == 2 && static_cast<int>(Opcode::kSend) == 3);

uint8_t queue_kind(Opcode opcode) { return opcode == Opcode::kSend ? kMessages : kWrites; }

}  // namespace

// --- posting ---------------------------------------------------------------------------------------------------------------------

Nic::Queue* Nic::queue_for(const WorkRequest& request, PostResult* result) {
  if (request.path >= connections_.size()) [[unlikely]] {
    result->provider_status = EINVAL;
    return nullptr;
  }
  const auto connection = static_cast<uint32_t>(request.path);
  if (!switchboard_->is_up(connection)) [[unlikely]] {
    if (switchboard_->is_coming(connection)) result->busy = true;
    else result->provider_status = ENOTCONN;
    return nullptr;
  }
  return queues_[connections_[connection].queues[queue_kind(request.opcode)]].get();
}

PostResult Nic::post(std::span<const WorkRequest> requests) {
  PostResult result;
  while (result.posted < requests.size()) {
    const std::span<const WorkRequest> rest = requests.subspan(result.posted);
    Queue* queue = queue_for(rest.front(), &result);
    if (queue == nullptr) break;
    const uint32_t id = connections_[rest.front().path].queues[queue_kind(rest.front().opcode)];
    const uint32_t count = build(*queue, id, rest);
    if (count == 0) {
      result.busy = true;
      break;
    }
    if (post_chain(*queue, count, &result) < count) {
      if (queue->marker_due && std::find(markers_due_.begin(), markers_due_.end(), id) == markers_due_.end())
        markers_due_.push_back(id);
      break;
    }
  }
  return result;
}

// Chains as many of the first requests as belong to one queue and fit it. The chain itself was linked once (see prepare_chain):
// here only what differs is written. Everything that the loop reads is in locals, since the compiler must assume that what it
// writes may be any member.
uint32_t Nic::build(Queue& queue, uint32_t id, std::span<const WorkRequest> requests) {
  const uint32_t room = queue.depth - (queue.tail - queue.head);
  const uint32_t most = std::min({room, kBatch, static_cast<uint32_t>(requests.size())});
  const WorkRequest* from = requests.data();
  const PathId path = from->path;
  const bool messages = from->opcode == Opcode::kSend;
  const uint64_t inline_bytes = queue.inline_bytes;
  WorkContext** const contexts = queue.contexts.get();
  const uint32_t mask = queue.mask;
  uint32_t tail = queue.tail;
  uint32_t unsignalled = 0;
  uint64_t unsignalled_bytes = 0;
  uint32_t count = 0;
  for (; count < most; ++count, ++from) {
    if (from->path != path || (from->opcode == Opcode::kSend) != messages) break;
    const uint64_t length = from->length;
    ibv_sge& piece = pieces_[count];
    piece.addr = reinterpret_cast<uint64_t>(from->local);
    piece.length = static_cast<uint32_t>(length);
    piece.lkey = static_cast<uint32_t>(from->local_key);
    ibv_send_wr& to = requests_[count];
    to.wr_id = sent_id(id, tail);
    to.num_sge = length != 0;
    to.opcode = kOpcodes[static_cast<size_t>(from->opcode)];
    to.imm_data = htonl(from->immediate);
    to.wr.rdma.remote_addr = from->remote_address;
    to.wr.rdma.rkey = static_cast<uint32_t>(from->remote_key);
    // Far memory counts as longer than anything that is copied.
    unsigned flags = (length | (from->local_key & kFarMemory)) <= inline_bytes && from->opcode != Opcode::kRead
                         ? IBV_SEND_INLINE
                         : 0;
    unsignalled_bytes += length;
    if (++unsignalled == kSignalEvery || unsignalled_bytes >= kSignalBytes) {
      flags |= IBV_SEND_SIGNALED;
      unsignalled = 0;
      unsignalled_bytes = 0;
    }
    to.send_flags = flags;
    contexts[tail++ & mask] = from->context;
  }
  if (count == 0) return 0;
  queue.tail = tail;
  requests_[count - 1].send_flags |= IBV_SEND_SIGNALED;
  return count;
}

void Nic::prepare_chain() {
  for (uint32_t i = 0; i < kBatch; ++i) {
    requests_[i] = ibv_send_wr{};
    requests_[i].next = i + 1 < kBatch ? &requests_[i + 1] : nullptr;
    requests_[i].sg_list = &pieces_[i];
  }
}

// What the device took of a chain stands before bad_wr. If the last of that is not signalled, nothing might ever tell its end: a marker
// follows as soon as there is room.
uint32_t Nic::post_chain(Queue& queue, uint32_t count, PostResult* result) {
  ibv_send_wr* bad = nullptr;
  ibv_send_wr& last = requests_[count - 1];
  ibv_send_wr* const next = std::exchange(last.next, nullptr);
  const int status = ibv_post_send(queue.pair.get(), requests_, &bad);
  last.next = next;
  if (status == 0) [[likely]] {
    result->posted += count;
    queue.marker_due = false;
    return count;
  }
  const auto taken = bad == nullptr ? 0 : static_cast<uint32_t>(bad - requests_);
  queue.tail -= count - taken;
  result->posted += taken;
  if (status == ENOMEM || status == EAGAIN) result->busy = true;
  else result->provider_status = status;
  if (taken > 0) queue.marker_due = (requests_[taken - 1].send_flags & IBV_SEND_SIGNALED) == 0;
  return taken;
}

// A write of no bytes that tells that all before it has ended.
void Nic::post_marker(Queue& queue, uint32_t id) {
  ibv_send_wr request{}, *bad = nullptr;
  request.wr_id = sent_id(id, queue.tail);
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  if (ibv_post_send(queue.pair.get(), &request, &bad) != 0) return;
  queue.contexts[queue.tail++ & queue.mask] = nullptr;
  queue.marker_due = false;
}

PostResult Nic::post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context) {
  PostResult result;
  if (receives_posted_ == capabilities_.receive_depth) {
    result.busy = true;
    return result;
  }
  ibv_sge piece{};
  piece.addr = reinterpret_cast<uint64_t>(buffer);
  piece.length = static_cast<uint32_t>(length);
  piece.lkey = static_cast<uint32_t>(local_key);
  ibv_recv_wr request{}, *bad = nullptr;
  request.wr_id = reinterpret_cast<uint64_t>(context) | kMessage;
  request.sg_list = &piece;
  request.num_sge = 1;
  const int status = ibv_post_srq_recv(message_receives_.get(), &request, &bad);
  if (status == 0) {
    ++receives_posted_;
    result.posted = 1;
  } else if (status == ENOMEM || status == EAGAIN) {
    result.busy = true;
  } else {
    result.provider_status = status;
  }
  return result;
}

void Nic::refill_immediates() {
  constexpr uint32_t kChain = 64;
  static const struct Chain {
    ibv_recv_wr requests[kChain] = {};
    Chain() {
      for (uint32_t i = 0; i < kChain; ++i) {
        requests[i].wr_id = kImmediate;
        requests[i].next = i + 1 < kChain ? &requests[i + 1] : nullptr;
      }
    }
  } chain;
  while (immediates_missing_ > 0) {
    // The tail of the constant chain has the length that is missing.
    const uint32_t count = std::min(immediates_missing_, kChain);
    auto* first = const_cast<ibv_recv_wr*>(&chain.requests[kChain - count]);
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_srq_recv(immediate_receives_.get(), first, &bad) == 0) {
      immediates_missing_ -= count;
      continue;
    }
    immediates_missing_ -= bad == nullptr ? 0 : static_cast<uint32_t>(bad - first);
    return;  // and again at the next poll
  }
}

// --- polling ---------------------------------------------------------------------------------------------------------------------

uint32_t Nic::poll(std::span<Completion> out) {
  uint32_t count = 0;
  for (;;) {
    while (entry_next_ < entry_count_ && translate(entries_[entry_next_], out, &count)) ++entry_next_;
    if (entry_next_ < entry_count_ || count == out.size()) break;
    entry_next_ = entry_count_ = 0;
    const int found = ibv_poll_cq(completions_.get(), kBatch, entries_);
    if (found <= 0) {
      ++empty_polls_;
      break;
    }
    entry_count_ = static_cast<uint32_t>(found);
  }
  if (immediates_missing_ >= kBatch || (count == 0 && immediates_missing_ > 0)) refill_immediates();
  if (count == 0 || ++polls_since_served_ >= kPollsPerService) {
    polls_since_served_ = 0;
    poll_bootstrap();
    if (const int64_t now = now_ns(); now - served_ns_ >= kServeEvery) serve(now);
  }
  // After the completions that were there when the path changed.
  while (!events_.empty() && count < out.size()) {
    out[count++] = events_.front();
    events_.pop_front();
  }
  return count;
}

void Nic::serve(int64_t now) {
  served_ns_ = now;
  switchboard_->tick(now);
  take_async_events();
  if (!dying_.empty()) reap(now);
  for (size_t i = 0; i < markers_due_.size();) {
    Queue& queue = *queues_[markers_due_[i]];
    if (queue.marker_due && !queue.failed) post_marker(queue, markers_due_[i]);
    if (queue.marker_due && !queue.failed) ++i;
    else markers_due_.erase(markers_due_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// False: `out` is full, and the entry comes again.
bool Nic::translate(const ibv_wc& entry, std::span<Completion> out, uint32_t* count) {
  if ((entry.wr_id & kMarkBits) == kSent) return translate_sent(entry, out, count);
  if (*count == out.size()) return false;
  *count += translate_received(entry, &out[*count]);
  return true;
}

// All requests up to the one that the entry names have ended, those before it well.
bool Nic::translate_sent(const ibv_wc& entry, std::span<Completion> out, uint32_t* count) {
  const auto id = static_cast<uint32_t>(entry.wr_id >> 34);
  const auto position = static_cast<uint32_t>(entry.wr_id >> 2);
  Queue& queue = *queues_[id];
  for (;;) {
    const bool last = queue.head == position;
    WorkContext* context = queue.contexts[queue.head & queue.mask];
    if (context != nullptr) {
      if (*count == out.size()) return false;
      Completion& completion = out[(*count)++];
      completion = Completion{};
      completion.context = context;
      if (last && entry.status != IBV_WC_SUCCESS) [[unlikely]] {
        const Outcome outcome = classify(entry.status);
        completion.status = outcome.status;
        completion.landed_unknown = outcome.landed_unknown;
        completion.provider_status = TE_STATUS_VERBS + static_cast<int>(entry.status);
      }
    }
    ++queue.head;
    if (last) break;
  }
  if (entry.status != IBV_WC_SUCCESS && !queue.failed) [[unlikely]] {
    queue.failed = true;
    if (queue.connection != kNone) switchboard_->fail(queue.connection);
  }
  return true;
}

// True: something for the engine.
bool Nic::translate_received(const ibv_wc& entry, Completion* out) {
  const bool immediate = (entry.wr_id & kMarkBits) == kImmediate;
  if (entry.status == IBV_WC_SUCCESS && switchboard_->busy()) note_traffic(entry.qp_num);
  if (immediate) {
    ++immediates_missing_;
    if (entry.status != IBV_WC_SUCCESS || entry.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return false;
    *out = Completion{};
    out->kind = CompletionKind::kImmediate;
    out->immediate = ntohl(entry.imm_data);
    return true;
  }
  --receives_posted_;
  *out = Completion{};
  out->context = reinterpret_cast<WorkContext*>(entry.wr_id & ~uint64_t{kMarkBits});
  if (entry.status != IBV_WC_SUCCESS || entry.opcode != IBV_WC_RECV) {  // the buffer comes back unused
    out->kind = CompletionKind::kSent;
    out->status = Status::kCancelled;
    return true;
  }
  out->kind = CompletionKind::kReceived;
  out->length = entry.byte_len;
  return true;
}

void Nic::note_traffic(uint32_t queue_pair) {
  const auto found = connection_by_pair_.find(queue_pair);
  if (found != connection_by_pair_.end()) switchboard_->heard(found->second);
}

}  // namespace te::cx7
#endif
