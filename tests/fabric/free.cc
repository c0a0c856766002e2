// Endpoints that cost next to nothing: a write costs its note in the completion queue. What is not a write goes the
// ordinary way.
#include <algorithm>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

ssize_t write_message(fid_ep* handle, const fi_msg_rma* message, uint64_t) {
  FreeQueue& queue = static_cast<Endpoint*>(handle)->transmit->free;
  if (queue.tail - queue.head > queue.mask) return -FI_EAGAIN;
  queue.ring[queue.tail++ & queue.mask] = message->context;
  return 0;
}

}  // namespace

ssize_t read_free_queue(fid_cq* handle, void* buffer, size_t count) {
  constexpr uint32_t kLookEvery = 64;
  auto& queue = *static_cast<Queue*>(handle);
  FreeQueue& free = queue.free;
  const size_t taken = std::min<uint64_t>(count, free.tail - free.head);
  // fi_cq_data_entry: the only format that is wanted here.
  auto* entries = static_cast<fi_cq_data_entry*>(buffer);
  for (size_t i = 0; i < taken; ++i)
    entries[i] = {free.ring[free.head++ & free.mask], FI_RMA | FI_WRITE, 0, nullptr, 0};
  if (taken > 0) return static_cast<ssize_t>(taken);
  const bool look = ++free.polls % kLookEvery == 0 || Fabric::get().attention.load(std::memory_order_relaxed) != 0;
  return look ? read_queue(handle, buffer, count) : -FI_EAGAIN;
}

fi_ops_rma free_rma_ops = [] {
  fi_ops_rma made = rma_ops;
  made.writemsg = write_message;
  return made;
}();

}  // namespace srd
