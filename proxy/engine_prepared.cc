// Prepared transfers: what was checked and copied once is submitted as often as wanted, from any thread.
#include <utility>

#include "proxy/engine.h"

namespace te {

// Both ends are kept from being given up until it is closed.
template <typename F>
Error Engine::keep_prepared(te_handle* handle, F&& fill) {
  Prepared* prepared = prepared_.add([&](Prepared& p) {
    p.pages = nullptr;
    p.member = Member{};
    fill(p);
    p.born();
  });
  if (prepared == nullptr)
    return Error(Status::kExhausted, format("%u transfers are prepared; close some first", prepared_.capacity()));
  const te_handle made = prepared->handle.load(std::memory_order_relaxed);
  if (prepared->kind != OperationKind::kScatter) {
    if (Error e = tell_worker(OperationKind::kClaimTarget, nullptr, prepared)) {
      static_cast<void>(close_prepared(made));
      return e;
    }
  }
  *handle = made;
  return {};
}

// `check` fills the operation in, and enters its region.
template <typename F>
Error Engine::prepare(te_handle region, te_handle* handle, F&& check) {
  Operation op;
  Error error = check(&op);
  if (!error) {
    error = keep_prepared(handle, [&](Prepared& p) {
      p.kind = op.kind;
      p.region_handle = region;
      p.region = op.region;
      p.member = {op.peer, op.remote, op.counter, op.remote_handle, op.counter_handle, op.remote->length, false, false};
      p.flush = op.flush;
      p.source_offset = op.source_offset;
      p.target_offset = op.target_offset;
      p.length = op.length;
      p.page_count = op.page_count;
      p.pages = std::exchange(op.pages, nullptr);
    });
  }
  if (op.region != nullptr) op.region->leave();
  if (op.pages != nullptr) retire_page_list(op.pages);
  return error;
}

Error Engine::prepare_write(const te_write_args& args, te_handle* handle) {
  return prepare(args.region, handle, [&](Operation* op) { return check_write(args, op); });
}

Error Engine::prepare_pages(const te_page_args& args, te_handle* handle) {
  return prepare(args.region, handle, [&](Operation* op) { return check_pages(args, op); });
}

Error Engine::prepare_scatter(const te_scatter_args& args, te_handle* handle) {
  Target* target = enter_target(args.target);
  if (target == nullptr) return Error(Status::kStale, "the target is closed");
  const uint32_t count = target->count;
  Error error = check_scatter(args, *target);
  if (!error) {
    const auto copy = [count](const int64_t* from, std::vector<int64_t>* to) {
      if (from == nullptr) to->clear();
      else to->assign(from, from + count);
    };
    error = keep_prepared(handle, [&](Prepared& p) {
      p.kind = OperationKind::kScatter;
      p.region_handle = args.region;
      p.target = args.target;
      p.shard = args.shard;
      p.flush = (args.flags & TE_FLAG_FLUSH) != 0;
      copy(args.source_offsets, &p.source_offsets);
      copy(args.lengths, &p.lengths);
      copy(args.target_offsets, &p.target_offsets);
    });
  }
  if (target->leave()) recycle(target);
  return error;
}

void Engine::recycle(Prepared* prepared) {
  if (prepared->pages != nullptr) retire_page_list(prepared->pages);
  prepared->pages = nullptr;
  prepared_.recycle(prepared);
}

Prepared* Engine::enter_prepared(te_handle handle) {
  Prepared* prepared = prepared_.peek(handle);
  bool last = false;
  if (prepared != nullptr && prepared->enter(handle, &last)) return prepared;
  if (last) recycle(prepared);
  return nullptr;
}

te_transfer* Engine::post(te_handle handle, int64_t timeout_ns, Error* error) {
  Prepared* prepared = enter_prepared(handle);
  if (prepared == nullptr) {
    *error = Error(Status::kStale, "the prepared transfer is closed");
    return nullptr;
  }
  te_transfer* transfer = nullptr;
  if (prepared->kind == OperationKind::kScatter) {
    const auto array = [](const std::vector<int64_t>& from) { return from.empty() ? nullptr : from.data(); };
    transfer = scatter(
        {prepared->target, prepared->region_handle, prepared->flush ? uint32_t{TE_FLAG_FLUSH} : 0u, prepared->shard,
         array(prepared->source_offsets), array(prepared->lengths), array(prepared->target_offsets)},
        timeout_ns, error);
  } else {
    transfer = post_prepared(*prepared, timeout_ns, error);
  }
  if (prepared->leave()) recycle(prepared);
  return transfer;
}

te_transfer* Engine::post_prepared(Prepared& p, int64_t timeout_ns, Error* error) {
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Peer* peer = p.member.peer;
  Operation* op = take_operation(peer, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = p.kind;
  op->peer = peer;
  op->deadline_ns = deadline;
  if (p.region->buffer_id != 0 && p.region->open.load(std::memory_order_acquire))
    *error = check_device_memory(*p.region);
  if (*error || (*error = fill_prepared(p, op))) {
    give_back_operation(op);
    return nullptr;
  }
  return submit(op, error);
}

// On success the region is entered and the operation has its own hold on what was prepared.
Error Engine::fill_prepared(Prepared& p, Operation* op) {
  if (!p.region->enter(p.region_handle)) return Error(Status::kRegionClosed, "the source region is closed");
  op->region = p.region;
  op->remote = p.member.remote;
  op->counter = p.member.counter;
  op->remote_handle = p.member.remote_handle;
  op->counter_handle = p.member.counter_handle;
  op->flush = p.flush;
  op->source_offset = p.source_offset;
  op->target_offset = p.target_offset;
  op->length = p.length;
  op->page_count = p.page_count;
  op->pages = p.pages;
  op->prepared = &p;
  p.stay();
  return {};
}

void Engine::retire_pages(Operation* op) {
  if (op->prepared != nullptr) {
    if (op->prepared->leave()) recycle(op->prepared);
  } else if (op->pages != nullptr) {
    retire_page_list(op->pages);
  }
  op->prepared = nullptr;
  op->pages = nullptr;
}

Error Engine::close_prepared(te_handle handle) {
  Prepared* prepared = enter_prepared(handle);
  if (prepared == nullptr) return {};
  Error error;
  if (prepared->open.exchange(false, std::memory_order_acq_rel)) {
    if (prepared->kind != OperationKind::kScatter)
      error = tell_worker(OperationKind::kReleaseTarget, nullptr, prepared);
    static_cast<void>(prepared->leave());  // born's; we are still inside
  }
  if (prepared->leave()) recycle(prepared);
  return error;
}

}  // namespace te
