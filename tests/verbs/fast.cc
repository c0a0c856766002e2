// Fast queue pairs: a write costs its note in the completion queue, nothing else. What is not a write, and what is posted while the
// queue pair is not ready, goes the ordinary way.
#include "tests/verbs/completions.h"
#include "tests/verbs/fabric.h"
#include "tests/verbs/operations.h"

namespace standin {
namespace {

void add(std::atomic<uint64_t>& counter, uint64_t n) {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

void wake(FastQueue& queue, Qp& pair) {
  if (!queue.armed.load(std::memory_order_relaxed)) return;
  Locked f;
  if (queue.armed) notify(*f, *static_cast<Cq*>(pair.send_cq));
}

}  // namespace

int post_send_fast(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
  Qp& pair = *static_cast<Qp*>(handle);
  FastPair& fast = pair.fast;
  if (!fast.usable.load(std::memory_order_relaxed)) return post_send(handle, request, bad);
  FastQueue& queue = *fast.queue;
  uint64_t posted = 0, signalled = 0, inlined = 0;
  for (; request != nullptr; request = request->next) {
    if (request->opcode > fast.last_swallowed) break;
    ++posted;
    inlined += (request->send_flags & IBV_SEND_INLINE) != 0;
    if ((request->send_flags & IBV_SEND_SIGNALED) == 0 && !pair.signal_all) continue;
    ++signalled;
    FastCompletion& entry = queue.ring[queue.tail++ & queue.mask];
    entry.id = request->wr_id;
    entry.number = pair.qp_num;
    entry.opcode = IBV_WC_RDMA_WRITE;
  }
  add(fast.calls, request == nullptr);  // else the ordinary way counts it
  add(fast.posted, posted);
  add(fast.signalled, signalled);
  add(fast.inlined, inlined);
  if (signalled > 0) wake(queue, pair);
  return request == nullptr ? 0 : post_send(handle, request, bad);
}

}  // namespace standin
