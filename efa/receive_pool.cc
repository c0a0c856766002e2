#include "efa/receive_pool.h"

#ifdef TE_HAVE_LIBFABRIC
#include <algorithm>
#include <cerrno>
#include <cstring>

namespace te::efa {

Error ReceivePool::open(const Library& library, const Objects& objects, size_t count, size_t bytes, bool local_keys,
                        std::unique_ptr<ReceivePool>* out) {
  std::unique_ptr<ReceivePool> pool(new ReceivePool);
  pool->endpoint_ = objects.endpoint.get();
  pool->bytes_ = bytes;
  pool->memory_ = std::make_unique<uint8_t[]>(count * bytes);
  if (local_keys) {
    fid_mr* registration = nullptr;
    const int status =
        fi_mr_reg(objects.domain.get(), pool->memory_.get(), count * bytes, FI_RECV, 0, 0, 0, &registration, nullptr);
    if (status != 0) {
      return Error(Status::kRegistration,
                   format("cannot register %zu receive buffers: %s", count, library.describe(status).c_str()), -status);
    }
    pool->registration_.reset(registration);
    pool->descriptor_ = fi_mr_desc(registration);
  }
  pool->slots_ = std::vector<Slot>(count);
  pool->idle_.items.resize(count);
  pool->messages_.items.resize(count);
  pool->wanted_.items.resize(count);
  for (size_t i = 0; i < count; ++i) {
    pool->slots_[i].buffer = pool->memory_.get() + i * bytes;
    pool->idle_.push(&pool->slots_[i]);
  }
  pool->post_idle();
  *out = std::move(pool);
  return {};
}

bool ReceivePool::add(void* buffer, uint64_t length, WorkContext* context) {
  if (wanted_.full()) return false;
  wanted_.push({buffer, length, context});
  return true;
}

void ReceivePool::consumed(void* op_context) {
  if (op_context == nullptr) return;
  idle_.push(reinterpret_cast<Slot*>(op_context));  // the context is the slot's first member
  post_idle();
}

void ReceivePool::arrived(void* op_context, uint64_t length) {
  auto* slot = reinterpret_cast<Slot*>(op_context);
  slot->length = length;
  messages_.push(slot);
}

bool ReceivePool::next(Completion* out) {
  if (!idle_.empty()) [[unlikely]]
    post_idle();
  if (messages_.empty() || wanted_.empty()) return false;
  Slot* slot = messages_.pop();
  const Wanted wanted = wanted_.pop();
  *out = Completion{};
  out->kind = CompletionKind::kReceived;
  out->context = wanted.context;
  out->length = slot->length;
  if (slot->length > wanted.length) {
    out->status = Status::kTransport;
    out->provider_status = EMSGSIZE;
    out->length = wanted.length;
  }
  if (out->length > 0) std::memcpy(wanted.buffer, slot->buffer, out->length);
  idle_.push(slot);
  post_idle();
  return true;
}

// What the queue refuses stays idle and is offered again at the next poll.
void ReceivePool::post_idle() {
  while (!idle_.empty()) {
    Slot* slot = idle_.front();
    if (fi_recv(endpoint_, slot->buffer, bytes_, descriptor_, FI_ADDR_UNSPEC, &slot->context) != 0) return;
    idle_.pop();
  }
}

}  // namespace te::efa
#endif
