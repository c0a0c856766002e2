// Posting and polling: no allocation, no lock of ours, no look-up but the path's slot.
#include <algorithm>
#include <cstring>

#include "efa/classify.h"
#include "efa/nic.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {

// The flags of fi_writemsg are explicit: `net` 1.17 ignores tx_attr->op_flags in fi_write and fi_writedata, so that
// asking for delivery completion there is in vain, and its fi_write builds the same message inside. Injects are not
// used: they give no completion.
ssize_t Nic::post_one(const WorkRequest& request, Path& path) {
  void* descriptor = reinterpret_cast<void*>(request.local_key);
  iovec local{request.local, request.length};
  if (descriptor == nullptr && empty_descriptor_ != nullptr && request.length == 0) [[unlikely]] {
    descriptor = empty_descriptor_;
    local.iov_base = no_bytes_;
  }
  switch (request.opcode) {
    case Opcode::kWrite:
    case Opcode::kWriteImmediate: {
      const fi_rma_iov remote{request.remote_address, request.length, request.remote_key};
      fi_msg_rma message{};
      message.msg_iov = &local;
      message.desc = &descriptor;
      message.iov_count = 1;
      message.addr = path.address;
      message.rma_iov = &remote;
      message.rma_iov_count = 1;
      message.context = request.context;
      message.data = request.immediate;
      uint64_t flags = write_flags_;
      if (request.opcode == Opcode::kWriteImmediate) flags |= FI_REMOTE_CQ_DATA;
      // FI_MORE holds the doorbell back until a request comes without it, so it may only be given when the next request
      // is sure to be taken: when the queue has a place left for it.
      if (flush_more_ && request.more && in_flight_ + 2 <= capabilities_.nic_depth) flags |= FI_MORE;
      return fi_writemsg(endpoint_, &message, flags);
    }
    case Opcode::kRead:
      return fi_read(endpoint_, local.iov_base, request.length, descriptor, path.address, request.remote_address,
                     request.remote_key, request.context);
    case Opcode::kSend: {
      fi_msg message{};
      message.msg_iov = &local;
      message.desc = &descriptor;
      message.iov_count = 1;
      message.addr = path.address;
      message.context = request.context;
      return fi_sendmsg(endpoint_, &message, send_flags_);
    }
  }
  return -FI_EINVAL;
}

// Which path a completion belongs to is written where it comes back: in the scratch memory, if libfabric leaves it to us.
void Nic::remember_post(const WorkRequest& request, Path& path) {
  ++in_flight_;
  if (!scratch_is_ours_) return;
  const auto index = static_cast<uint32_t>(request.path);
  std::memcpy(request.context->scratch, &index, sizeof index);
  ++path.in_flight;
}

// Work, or an attempt that the peer may have to answer (shm's first post makes the peer map us), wants the doorbell.
void Nic::touch(Path& path) {
  if (path.bell == nullptr || path.dirty) return;
  path.dirty = true;
  dirty_.push_back(static_cast<uint32_t>(&path - paths_.data()));  // reserved by open_path
}

PostResult Nic::post(std::span<const WorkRequest> requests) {
  const Passage passage(gate_);
  PostResult result;
  for (const WorkRequest& request : requests) {
    if (request.path >= paths_.size() || !paths_[request.path].open) [[unlikely]] {
      result.provider_status = EINVAL;
      break;
    }
    Path& path = paths_[request.path];
    if (path.bell != nullptr) {
      if (path.bell->closed()) [[unlikely]] {
        result.provider_status = ENOTCONN;
        break;
      }
      touch(path);
    }
    const ssize_t status = post_one(request, path);
    if (status != 0) [[unlikely]] {
      if (status == -FI_EAGAIN) result.busy = true;
      else result.provider_status = static_cast<int>(-status);
      break;
    }
    remember_post(request, path);
    ++result.posted;
  }
  ++activity_;
  refused_ = result.busy;
  if (refused_) ring_doorbells();  // the peer may have to wake up to make room
  return result;
}

PostResult Nic::post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context) {
  const Passage passage(gate_);
  PostResult result;
  if (receives_ != nullptr) {
    if (receives_->add(buffer, length, context)) result.posted = 1;
    else result.busy = true;
    return result;
  }
  const ssize_t status =
      fi_recv(endpoint_, buffer, length, reinterpret_cast<void*>(local_key), FI_ADDR_UNSPEC, context);
  if (status == 0) result.posted = 1;
  else if (status == -FI_EAGAIN) result.busy = true;
  else result.provider_status = static_cast<int>(-status);
  return result;
}

uint32_t Nic::poll(std::span<Completion> out) {
  if (doorbell_ != nullptr) doorbell_->disarm();
  if (stash_count_ > 0) [[unlikely]] {
    const uint32_t count = std::min<uint32_t>(stash_count_, static_cast<uint32_t>(out.size()));
    std::copy_n(stash_ + stash_next_, count, out.begin());
    stash_next_ += count;
    stash_count_ -= count;
    return count;
  }
  const uint32_t count = read_queue(out);
  if (doorbell_ != nullptr && count == 0 && in_flight_ > 0) ring_stalled();
  return count;
}

uint32_t Nic::read_queue(std::span<Completion> out) {
  const Passage passage(gate_);
  uint32_t count = 0;
  if (receives_ != nullptr) {
    while (count < out.size() && receives_->next(&out[count])) ++count;
    if (count > 0) return count;
  }
  fi_cq_data_entry entries[kBatch];
  const ssize_t got = fi_cq_read(queue_, entries, std::min(kBatch, out.size()));
  if (got > 0) {
    for (ssize_t i = 0; i < got; ++i) count += translate(entries[i], &out[count]);
    activity_ += static_cast<uint64_t>(got);
    return count;
  }
  if (got == -FI_EAVAIL && !out.empty()) [[unlikely]]
    return read_error(&out[0]);
  if (got < 0 && got != -FI_EAGAIN && got != -FI_EAVAIL) [[unlikely]]
    up_.store(false, std::memory_order_relaxed);
  return 0;
}

// A target's immediate is known by FI_REMOTE_WRITE: `len` is 0 and FI_RMA missing on tcp 1.17. FI_REMOTE_CQ_DATA alone says
// so only where there is no context, since sockets sets it on the initiator's own completion, too.
// False: nothing for the engine.
bool Nic::translate(const fi_cq_data_entry& entry, Completion* out) {
  *out = Completion{};
  // Requests of ours always have a context. What has none is the peer's (seen with shm of libfabric 2.1).
  const bool foreign = entry.op_context == nullptr;
  if (foreign && (entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) == 0) return false;
  if ((entry.flags & FI_REMOTE_WRITE) != 0 || foreign) {
    out->kind = CompletionKind::kImmediate;
    out->immediate = static_cast<uint32_t>(entry.data);
    out->length = entry.len;
    if (receives_ != nullptr) receives_->consumed(entry.op_context);
    return true;
  }
  out->context = static_cast<WorkContext*>(entry.op_context);
  if ((entry.flags & FI_RECV) != 0) {
    if (receives_ != nullptr) {
      receives_->arrived(entry.op_context, entry.len);
      return receives_->next(out);
    }
    out->kind = CompletionKind::kReceived;
    out->length = entry.len;
    return true;
  }
  account(out);
  return true;
}

// One of ours has ended.
void Nic::account(Completion* out) {
  out->kind = CompletionKind::kSent;
  if (!scratch_is_ours_) {
    --in_flight_;
    return;
  }
  uint32_t index = kNoIndex;
  std::memcpy(&index, out->context->scratch, sizeof index);
  Path& path = paths_[index];
  out->path = index;
  --path.in_flight;
  if (path.open) --in_flight_;
  else if (path.in_flight == 0) free_paths_.push_back(index);
}

// 1 when the error belongs to one of our requests or receives. The target of a bad write may get one too, with nothing
// of ours in it.
uint32_t Nic::read_error(Completion* out) {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(queue_, &error, 0) <= 0) return 0;
  ++activity_;
  if (error.op_context == nullptr) return 0;
  if ((error.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ)) != 0) {
    if (receives_ != nullptr) receives_->consumed(error.op_context);  // a peer's bad write may have used it up
    return 0;
  }
  if (receives_ != nullptr && (error.flags & FI_RECV) != 0) {
    receives_->consumed(error.op_context);
    return 0;
  }
  *out = Completion{};
  out->context = static_cast<WorkContext*>(error.op_context);
  if ((error.flags & FI_RECV) != 0) out->kind = CompletionKind::kReceived;
  else account(out);
  const Outcome outcome = classify(kind_, error);
  out->status = outcome.status;
  out->landed_unknown = outcome.landed_unknown;
  out->provider_status = outcome.provider_status;
  return 1;
}

}  // namespace te::efa
#endif
