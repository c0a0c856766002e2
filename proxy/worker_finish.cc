// How operations end: what the caller is told, and when the slot and everything it held go back.
#include <algorithm>

#include "proxy/worker.h"

namespace te {

// Why the operation will not end well. The first reason stands.
void Worker::note(Operation& op, Status status, int provider_status, int nic, const char* detail) {
  if (op.failure != Status::kOk) return;
  op.failure = status;
  const int peer = op.peer == nullptr ? -1 : op.peer->index;
  note_failure(op.transfer, status, provider_status, nic, peer, detail);
  if (op.member != Operation::kNoMember)
    note_member(op.transfer, op.member, status, provider_status, nic, peer, now_, detail);
}

void Worker::report(Operation* op, Status status, int provider_status, int nic, const char* detail) {
  if (op->reported) return;
  op->reported = true;
  te_transfer* t = op->transfer;
  if (status != Status::kOk) {
    note(*op, status, provider_status, nic, detail);
    if (op->peer != nullptr) bump(op->peer->statistics.errors);
  }
  if (--t->unfinished == 0) end_transfer(t);
}

void Worker::end_transfer(te_transfer* t) {
  t->finished_ns = now_ns();
  bump(completed_);
  if (t->under_way != nullptr) t->under_way->fetch_sub(1, std::memory_order_relaxed);
  if (t->status != Status::kOk) bump(failed_);
  if (t->trigger != nullptr) [[unlikely]]
    firing_ended(*t);
  const uint32_t bits = te_transfer::kDone | (t->undrained == 0 ? te_transfer::kQuiesced : 0u);
  const uint32_t old = t->state.fetch_or(bits, std::memory_order_acq_rel);
  if ((old & te_transfer::kSleeper) != 0) futex_wake_all(&t->state);
  if ((old & te_transfer::kNotify) != 0) engine_.events_.push(t);
}

void Worker::finish(Operation* op) {
  te_transfer* t = op->transfer;
  if (t != nullptr) {
    --t->undrained;
    if (!op->reported) report(op, Status::kOk, 0, -1, "");
    settle_quiesced(t);
  }
  release_operation(op);
}

// When the last operation of a transfer has both been reported and drained, the engine has no more to say about it.
void Worker::settle_quiesced(te_transfer* t) {
  if (t->undrained > 0 || t->unfinished > 0) return;
  if ((t->state.load(std::memory_order_relaxed) & te_transfer::kQuiesced) == 0) {
    const uint32_t old = t->state.fetch_or(te_transfer::kQuiesced, std::memory_order_acq_rel);
    if ((old & te_transfer::kSleeper) != 0) futex_wake_all(&t->state);
  }
  release_transfer(t);
}

// Ends the operation for the caller at once. What is in flight drains later; until then the transfer is not quiesced.
void Worker::fail(Operation* op, Status status, const char* detail, int provider_status, int nic) {
  op->stopped = true;
  if (op->queue != Queue::kNone) leave_queue(op);
  if (op->local_counter != nullptr && op->kind == OperationKind::kCounterReached) {
    std::erase(op->local_counter->armed, op);
    if (status == Status::kTimeout) {
      char why[96];
      std::snprintf(why, sizeof why, "counter at %llu/%llu when the deadline passed",
                    static_cast<unsigned long long>(op->local_counter->value.load(std::memory_order_relaxed)),
                    static_cast<unsigned long long>(op->threshold));
      report(op, status, 0, -1, why);
    }
  }
  if (op->peer != nullptr) {
    std::erase(op->peer->connects, op);
    std::erase(op->peer->disconnects, op);
  }
  forget_closing(op);
  report(op, status, provider_status, nic, detail);
  if (op->in_flight > 0) {
    fences_wanted_ = true;
    return;
  }
  if (op->has_slot) retire_slot(*op);
  finish(op);
}

// Before the caller is told: it may use the object for something else at once.
void Worker::forget_closing(Operation* op) {
  std::erase(closings_, op);
  if (op->kind == OperationKind::kCloseRegion) op->region->closing = nullptr;
  if (op->kind == OperationKind::kCloseCounter) op->local_counter->closing = nullptr;
}

void Worker::release_operation(Operation* op) {
  active_.remove(op);
  if (op->admitted) unclaim(op);
  if (op->flight != nullptr) return leave_flight(*op->flight);
  if (op->region != nullptr && op->kind != OperationKind::kCloseRegion) op->region->leave();
  engine_.retire_pages(op);
  if (op->block != nullptr) {
    BatchBlock* block = op->block;
    if (--block->remaining == 0) delete block;
    return;
  }
  engine_.give_back_operation(op);
}

// The provider may never complete what this operation has in flight (its peer died). Callers get another slot instead, so that the dead do not
// eat the slab; the reserve is as large as the slab itself.
void Worker::replace_zombie(Operation* op) {
  if (op->slab_index == Operation::kNoSlab || spare_operations_ >= 2 * settings_.operations) return;
  engine_.free_operations_.push(spare_operations_++);
}

}  // namespace te
