// Exported: asynchronous events.
#include <cerrno>

#include "tests/verbs/completions.h"

using namespace standin;

namespace standin {
namespace {

struct Tally {
  uint64_t* taken = nullptr;
  uint64_t* acknowledged = nullptr;
};

// The counts of the object that an event is about; none for ports and devices.
Tally tally(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_CQ_ERR: {
      auto& queue = *static_cast<Cq*>(event.element.cq);
      return {&queue.async_taken, &queue.async_acknowledged};
    }
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED: {
      auto& queue = *static_cast<Srq*>(event.element.srq);
      return {&queue.async_taken, &queue.async_acknowledged};
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED: {
      auto& pair = *static_cast<Qp*>(event.element.qp);
      return {&pair.async_taken, &pair.async_acknowledged};
    }
    default:
      return {};
  }
}

}  // namespace
}  // namespace standin

extern "C" {

int ibv_get_async_event(ibv_context* handle, ibv_async_event* event) {
  for (;;) {
    if (!await(handle->async_fd)) {
      errno = EAGAIN;
      return -1;
    }
    Locked f;
    Context& context = *context_of(handle);
    if (context.events.empty()) continue;  // another thread was faster
    *event = context.events.front();
    context.events.pop_front();
    if (context.events.empty()) lower(handle->async_fd);
    if (const Tally counts = tally(*event); counts.taken != nullptr) ++*counts.taken;
    return 0;
  }
}

void ibv_ack_async_event(ibv_async_event* event) {
  Locked f;
  const Tally counts = tally(*event);
  if (counts.taken == nullptr) return;
  if (++*counts.acknowledged > *counts.taken) violate("ibv_ack_async_event: the event was not taken");
}

}  // extern "C"
