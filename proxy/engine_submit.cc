// Submission: what the caller's thread does before the worker sees an operation. Everything that can be refused is refused here, with the
// values that were wrong, before anything is posted.
#include <sched.h>
#include <sys/mman.h>

#include <cinttypes>
#include <cstdlib>
#include <cstring>

#include "proxy/engine.h"

namespace te {
namespace {

using ull = unsigned long long;

constexpr int64_t kSubmitSlice = 50'000'000;  // longest wait for a slot inside one call

Error out_of_region(const char* which, uint64_t offset, uint64_t length, uint64_t limit) {
  return Error(Status::kRange,
               format("%s range [%llu, %llu + %llu) leaves its region of %llu bytes", which, static_cast<ull>(offset),
                      static_cast<ull>(offset), static_cast<ull>(length), static_cast<ull>(limit)));
}

// The largest index whose page still lies inside; false when not even index 0 does.
bool largest_index(uint64_t offset, uint64_t stride, uint64_t page_bytes, uint64_t limit, uint64_t* index) {
  if (!range_fits(offset, page_bytes, limit)) return false;
  *index = stride == 0 ? UINT64_MAX >> 1 : (limit - offset - page_bytes) / stride;
  return true;
}

// Copies and checks in one pass. Negative indices become huge unsigned ones and fail the same comparison.
template <typename T>
bool copy_checked(const void* from, uint8_t* to, uint64_t count, uint64_t largest) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto bound = static_cast<Unsigned>(
      largest > std::numeric_limits<Unsigned>::max() >> 1 ? std::numeric_limits<Unsigned>::max() >> 1 : largest);
  const auto* source = static_cast<const uint8_t*>(from);
  Unsigned bad = 0;
  for (uint64_t i = 0; i < count; ++i) {
    Unsigned value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    bad |= static_cast<Unsigned>(value > bound);
  }
  return bad == 0;
}

int64_t index_at(const void* from, uint32_t width, uint64_t i) {
  if (width == 4) {
    int32_t value;
    std::memcpy(&value, static_cast<const uint8_t*>(from) + 4 * i, 4);
    return value;
  }
  int64_t value;
  std::memcpy(&value, static_cast<const uint8_t*>(from) + 8 * i, 8);
  return value;
}

Error bad_index(const char* which, const void* from, uint32_t width, uint64_t count, uint64_t largest) {
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t value = index_at(from, width, i);
    if (value < 0 || static_cast<uint64_t>(value) > largest)
      return Error(Status::kRange,
                   format("%s index %lld at position %llu: the region holds pages 0 to %llu", which,
                          static_cast<long long>(value), static_cast<ull>(i), static_cast<ull>(largest)));
  }
  return Error(Status::kRange, format("%s indices changed while they were read", which));
}

// To be freed with std::free.
void* allocate_block(uint64_t bytes) {
  constexpr uint64_t kHugePage = 2u << 20;
  if (bytes < 2 * kHugePage) return std::malloc(bytes);
  void* memory = std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) & ~(kHugePage - 1));
  if (memory != nullptr) static_cast<void>(madvise(memory, bytes, MADV_HUGEPAGE));
  return memory;
}

}  // namespace

// --- slots -----------------------------------------------------------------------------------------------------------------------

Operation* Engine::try_operation(Peer* peer) {
  const uint32_t cap = settings_.values.operations_per_peer;
  if (peer != nullptr && peer->operations.load(std::memory_order_relaxed) >= cap) return nullptr;
  const uint32_t index = free_operations_.pop();
  if (index == FreeList::kNone) return nullptr;
  if (peer != nullptr) peer->operations.fetch_add(1, std::memory_order_relaxed);
  operations_in_use_.fetch_add(1, std::memory_order_relaxed);
  return &slab_[index];
}

Operation* Engine::take_operation(Peer* peer, int64_t deadline_ns, Error* error) {
  const uint32_t cap = settings_.values.operations_per_peer;
  const int64_t slice_end = deadline_after(now_ns(), kSubmitSlice);
  for (int spin = 0;; ++spin) {
    if (Operation* op = try_operation(peer)) return op;
    if (closing_.load(std::memory_order_relaxed)) {
      *error = Error(Status::kClosed, "the engine is closed");
      return nullptr;
    }
    if (spin % 16 == 15) {
      const int64_t now = now_ns();
      if (now < deadline_ns && now >= slice_end) {
        *error = Error(Status::kAgain, "");
        return nullptr;
      }
      if (now >= deadline_ns) {
        *error = Error(
            Status::kTimeout,
            peer != nullptr && peer->operations.load(std::memory_order_relaxed) >= cap
                ? format("%u operations towards this peer are unfinished, which is the cap (operations_per_peer)", cap)
                : format("all %u operation slots are in use (setting operations)", settings_.values.operations));
        return nullptr;
      }
      sched_yield();
    } else {
      cpu_relax();
    }
  }
}

Operation* Engine::take_operation_patiently(int64_t deadline_ns, Error* error) {
  for (;;) {
    *error = Error();
    Operation* op = take_operation(nullptr, deadline_ns, error);
    if (op != nullptr || error->status() != Status::kAgain) return op;
  }
}

void Engine::give_back_operation(Operation* op) {
  if (op->peer != nullptr &&
      (op->kind == OperationKind::kWrite || op->kind == OperationKind::kPages || op->kind == OperationKind::kMessage))
    op->peer->operations.fetch_sub(1, std::memory_order_relaxed);
  operations_in_use_.fetch_sub(1, std::memory_order_relaxed);
  const uint32_t index = op->slab_index;
  op->reset();
  free_operations_.push(index);
}

// Hands over. On failure the operation has been given back.
te_transfer* Engine::submit(Operation* op, Error* error) {
  uint32_t operations = 1;
  if (op->kind == OperationKind::kBatch) operations = op->chain->block->remaining;
  if (op->kind == OperationKind::kScatter) operations = op->flight->target->count + 1;  // and their posting
  te_transfer* transfer = acquire_transfer(this, operations);
  submitting_.fetch_add(1, std::memory_order_seq_cst);
  const bool closed = closing_.load(std::memory_order_seq_cst);
  if (transfer == nullptr || closed) {
    submitting_.fetch_sub(1, std::memory_order_release);
    if (transfer != nullptr) {
      release_transfer(transfer);
      release_transfer(transfer);
    }
    drop_claims(op);
    *error =
        closed ? Error(Status::kClosed, "the engine is closed") : Error(Status::kExhausted, "no memory for a transfer");
    return nullptr;
  }
  op->transfer = transfer;
  for (Operation* entry = op->kind == OperationKind::kBatch ? op->chain : nullptr; entry != nullptr;
       entry = entry->chain)
    entry->transfer = transfer;
  transfer->peer = op->peer == nullptr ? -1 : op->peer->index;
  // The ring holds as many as there are slots, so this succeeds; a producer that was preempted inside it can make it look full.
  while (!commands_.push(op)) sched_yield();
  submitting_.fetch_sub(1, std::memory_order_release);
  submitted_.fetch_add(1, std::memory_order_relaxed);
  doorbell_.ring();
  return transfer;
}

// Undoes what checking and filling in took, and gives the slot back.
void Engine::drop_claims(Operation* op) {
  const auto drop = [this](Operation& entry) {
    if (entry.region != nullptr) entry.region->leave();
    retire_pages(&entry);
    entry.region = nullptr;
  };
  if (op->kind == OperationKind::kBatch && op->chain != nullptr) {
    BatchBlock* block = op->chain->block;
    for (Operation* entry = op->chain; entry != nullptr; entry = entry->chain) drop(*entry);
    delete block;
    op->chain = nullptr;
  } else if (op->kind == OperationKind::kScatter) {
    Target* target = op->flight->target;
    target->under_way.fetch_sub(1, std::memory_order_relaxed);
    op->flight->region->leave();
    give_back_flight(op->flight);
    if (target->leave()) recycle(target);
  } else if (op->kind == OperationKind::kWrite || op->kind == OperationKind::kPages) {
    drop(*op);
  }
  give_back_operation(op);
}

// --- checks ------------------------------------------------------------------------------------------------------------------------

Error Engine::stale(const Remote* entry, te_handle handle, const char* what) {
  if (entry == nullptr)
    return Error(Status::kArgument, format("no %s has the handle %llu", what, static_cast<unsigned long long>(handle)));
  const bool former = entry->former_handle.load(std::memory_order_acquire) == handle;
  const Peer* peer = former ? entry->former_peer.load(std::memory_order_relaxed) : nullptr;
  if (peer != nullptr) {
    if (Error fate = check_fate(*peer)) return fate;
    if (entry->former_closed.load(std::memory_order_relaxed))
      return Error(Status::kRegionClosed, format("the %s was closed by its owner", what)).about_peer(peer->index);
  }
  return Error(Status::kStale, format("the handle of the %s was given up: ask for it again", what));
}

Error Engine::check_usable(const Remote& remote, const char* what) {
  if (remote.state.load(std::memory_order_acquire) != Attachment::kRevoked) return {};
  return Error(Status::kRegionClosed, format("the %s was closed by its owner", what)).about_peer(remote.peer->index);
}

// Both ends and the counter exist, are open and belong together. On success the region is entered.
Error Engine::check_ends(te_handle region_handle, te_handle remote_handle, te_handle counter_handle, Operation* op,
                         uint64_t* source_length, uint64_t* target_length) {
  RemoteRegion* remote = remote_regions_.get(remote_handle);
  if (remote == nullptr) return stale(remote_regions_.peek(remote_handle), remote_handle, "target region");
  if (Error e = check_usable(*remote, "target region")) return e;
  RemoteCounter* counter = nullptr;
  if (counter_handle != TE_NONE) {
    counter = remote_counters_.get(counter_handle);
    if (counter == nullptr) return stale(remote_counters_.peek(counter_handle), counter_handle, "counter to notify");
    if (Error e = check_usable(*counter, "counter to notify")) return e;
    if (counter->peer != remote->peer)
      return Error(Status::kArgument, "the counter to notify belongs to another engine than the target region");
  }
  Region* region = regions_.get(region_handle);
  if (region == nullptr || !region->enter(region_handle))
    return Error(Status::kRegionClosed, "the source region is closed");
  op->region = region;
  op->remote = remote;
  op->counter = counter;
  op->remote_handle = remote_handle;
  op->counter_handle = counter_handle;
  op->peer = remote->peer;
  *source_length = region->span.length;
  *target_length = remote->length;
  return region->buffer_id == 0 ? Error() : check_device_memory(*region);
}

Error Engine::check_write(const te_write_args& a, Operation* op) {
  if ((a.flags & ~static_cast<uint32_t>(TE_FLAG_FLUSH)) != 0)
    return Error(Status::kArgument, format("unknown flags 0x%x", a.flags));
  uint64_t source_length = 0, target_length = 0;
  if (Error e = check_ends(a.region, a.remote, a.counter, op, &source_length, &target_length)) return e;
  if (!range_fits(a.source_offset, a.length, source_length))
    return out_of_region("source", a.source_offset, a.length, source_length);
  if (!range_fits(a.target_offset, a.length, target_length))
    return out_of_region("target", a.target_offset, a.length, target_length);
  op->kind = OperationKind::kWrite;
  op->flush = (a.flags & TE_FLAG_FLUSH) != 0;
  op->source_offset = a.source_offset;
  op->target_offset = a.target_offset;
  op->length = a.length;
  return {};
}

Error Engine::check_pages(const te_page_args& a, Operation* op) {
  if ((a.flags & ~static_cast<uint32_t>(TE_FLAG_FLUSH)) != 0)
    return Error(Status::kArgument, format("unknown flags 0x%x", a.flags));
  const auto width_ok = [](uint32_t width) { return width == 4 || width == 8; };
  if (!width_ok(a.source_index_bytes) || !width_ok(a.target_index_bytes))
    return Error(Status::kArgument, "index_bytes must be 4 (int32) or 8 (int64)");
  if (a.count > 0 && (a.source == nullptr || a.target == nullptr))
    return Error(Status::kArgument, "index arrays are missing");
  if (a.count >= uint64_t{1} << 32)
    return Error(Status::kArgument, format("%llu pages in one list; at most 2^32 - 1", static_cast<ull>(a.count)));
  uint64_t source_length = 0, target_length = 0;
  if (Error e = check_ends(a.region, a.remote, a.counter, op, &source_length, &target_length)) return e;
  op->kind = OperationKind::kPages;
  op->flush = (a.flags & TE_FLAG_FLUSH) != 0;
  op->source_offset = a.source_offset;
  op->target_offset = a.target_offset;
  op->length = a.page_bytes;
  op->page_count = a.count;
  return copy_indices(a, op, source_length, target_length);
}

Error Engine::copy_indices(const te_page_args& a, Operation* op, uint64_t source_length, uint64_t target_length) {
  if (a.count == 0) return {};
  uint64_t source_largest = 0, target_largest = 0;
  if (!largest_index(a.source_offset, a.source_stride, a.page_bytes, source_length, &source_largest))
    return out_of_region("source page 0", a.source_offset, a.page_bytes, source_length);
  if (!largest_index(a.target_offset, a.target_stride, a.page_bytes, target_length, &target_largest))
    return out_of_region("target page 0", a.target_offset, a.page_bytes, target_length);
  const uint64_t source_bytes = (a.count * a.source_index_bytes + 7) & ~uint64_t{7};
  PageList* list = take_page_list(source_bytes + a.count * a.target_index_bytes);
  if (list == nullptr)
    return Error(Status::kExhausted, format("no memory for %llu page indices", static_cast<ull>(a.count)));
  op->pages = list;
  list->source_stride = a.source_stride;
  list->target_stride = a.target_stride;
  list->source_index_bytes = static_cast<uint8_t>(a.source_index_bytes);
  list->target_index_bytes = static_cast<uint8_t>(a.target_index_bytes);
  list->target_begin = source_bytes;
  const auto copy = [&](const void* from, uint8_t* to, uint32_t width, uint64_t largest) {
    return width == 4 ? copy_checked<int32_t>(from, to, a.count, largest)
                      : copy_checked<int64_t>(from, to, a.count, largest);
  };
  if (!copy(a.source, list->data(), a.source_index_bytes, source_largest))
    return bad_index("source", a.source, a.source_index_bytes, a.count, source_largest);
  if (!copy(a.target, list->data() + source_bytes, a.target_index_bytes, target_largest))
    return bad_index("target", a.target, a.target_index_bytes, a.count, target_largest);
  return {};
}

// Blocks that the worker has retired serve again: a large fresh block costs a page fault every 4 KiB, or every 2 MiB where the kernel
// gives huge pages to those who ask.
PageList* Engine::take_page_list(uint64_t bytes) {
  const std::lock_guard lock(page_lists_mutex_);
  PageList* retired = retired_pages_.exchange(nullptr, std::memory_order_acquire);
  while (retired != nullptr) {
    PageList* next = retired->next;
    retired->next = spare_pages_;
    spare_pages_ = retired;
    retired = next;
  }
  constexpr int kLookAt = 8;
  int looked = 0;
  for (PageList** at = &spare_pages_; *at != nullptr && looked < kLookAt; at = &(*at)->next, ++looked) {
    PageList* list = *at;
    if (list->capacity < bytes || list->capacity > 4 * bytes + 4096) continue;
    *at = list->next;
    return list;
  }
  while (looked-- > 0 && spare_pages_ != nullptr && looked >= kLookAt / 2) {  // none fits: do not hoard the others
    PageList* next = spare_pages_->next;
    std::free(spare_pages_);
    spare_pages_ = next;
  }
  const uint64_t capacity = std::max<uint64_t>(bytes, 256);
  void* memory = allocate_block(sizeof(PageList) + capacity);
  if (memory == nullptr) return nullptr;
  auto* list = new (memory) PageList;
  list->capacity = capacity;
  return list;
}

void Engine::retire_page_list(PageList* list) {
  PageList* head = retired_pages_.load(std::memory_order_relaxed);
  do {
    list->next = head;
  } while (!retired_pages_.compare_exchange_weak(head, list, std::memory_order_release, std::memory_order_relaxed));
}

// --- operations ----------------------------------------------------------------------------------------------------------------------

te_transfer* Engine::write(const te_write_args& args, int64_t timeout_ns, Error* error) {
  const RemoteRegion* remote = remote_regions_.get(args.remote);
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Operation* op = take_operation(remote == nullptr ? nullptr : remote->peer, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = OperationKind::kWrite;
  Peer* counted = remote == nullptr ? nullptr : remote->peer;
  op->peer = counted;
  op->deadline_ns = deadline;
  *error = check_write(args, op);
  if (*error) {
    op->peer = counted;
    drop_claims(op);
    return nullptr;
  }
  return submit(op, error);
}

te_transfer* Engine::write_pages(const te_page_args& args, int64_t timeout_ns, Error* error) {
  const RemoteRegion* remote = remote_regions_.get(args.remote);
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Peer* counted = remote == nullptr ? nullptr : remote->peer;
  Operation* op = take_operation(counted, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = OperationKind::kPages;
  op->peer = counted;
  op->deadline_ns = deadline;
  *error = check_pages(args, op);
  if (*error) {
    op->peer = counted;
    drop_claims(op);
    return nullptr;
  }
  return submit(op, error);
}

te_transfer* Engine::write_batch(std::span<const te_batch_entry> entries, int64_t timeout_ns, Error* error) {
  if (entries.size() > uint64_t{1} << 24) {
    *error = Error(Status::kArgument, format("%zu entries in one batch; at most 2^24", entries.size()));
    return nullptr;
  }
  if (entries.empty()) return finished_transfer(error);  // nothing to do is done
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Operation* head = take_operation(nullptr, deadline, error);
  if (head == nullptr) return nullptr;
  head->kind = OperationKind::kBatch;
  head->deadline_ns = deadline;
  auto* block = new BatchBlock;
  block->entries.reset(new Operation[entries.size()]);
  block->remaining = static_cast<uint32_t>(entries.size());
  if (nic_count_ > 1) block->parts.reset(new Part[entries.size() * nic_count_]);
  for (size_t i = 0; i < entries.size(); ++i) {
    Operation& op = block->entries[i];
    op.block = block;
    if (nic_count_ > 1) op.part = &block->parts[i * nic_count_];
    op.deadline_ns = deadline;
    op.chain = i + 1 < entries.size() ? &block->entries[i + 1] : nullptr;
  }
  head->chain = &block->entries[0];
  for (size_t i = 0; i < entries.size(); ++i) {
    Operation& op = block->entries[i];
    const Error failure =
        entries[i].is_pages != 0 ? check_pages(entries[i].pages, &op) : check_write(entries[i].write, &op);
    if (!failure) continue;
    *error = Error(failure.status(), format("entry %zu: %s", i, failure.message().c_str()));
    drop_claims(head);
    return nullptr;
  }
  return submit(head, error);
}

te_transfer* Engine::send(int32_t index, const void* data, uint64_t length, int64_t timeout_ns, Error* error) {
  Peer* peer = peer_at(index);
  if (peer == nullptr) {
    *error = no_peer(index);
    return nullptr;
  }
  if (length > settings_.values.max_message_bytes) {
    *error = Error(Status::kArgument, format("a message of %llu bytes; at most %u (setting max_message_bytes)",
                                             static_cast<ull>(length), settings_.values.max_message_bytes));
    return nullptr;
  }
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  Operation* op = take_operation(peer, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = OperationKind::kMessage;
  op->peer = peer;
  op->deadline_ns = deadline;
  op->length = length;
  if (length > 0) {
    op->message.reset(new uint8_t[length]);
    std::memcpy(op->message.get(), data, length);
  }
  return submit(op, error);
}

void Engine::request_cancel() {
  cancel_requested_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
}

}  // namespace te
