// Exported: completion channels, completion queues, shared receive queues; polling and arming.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "tests/verbs/completions.h"
#include "tests/verbs/fabric.h"
#include "tests/verbs/operations.h"

using namespace standin;

namespace standin {
namespace {

template <typename Pointer = std::nullptr_t>
Pointer refused(int code) {
  errno = code;
  return nullptr;
}

Context* living(ibv_context* handle, const char* function) {
  return alive<Context>(static_cast<verbs_context*>(context_of(handle)), function);
}

uint32_t take_fast(FastQueue& fast, int most, ibv_wc* out) {
  uint32_t count = 0;
  for (; fast.head != fast.tail && count < static_cast<uint32_t>(most); ++fast.head, ++count) {
    const FastCompletion& entry = fast.ring[fast.head & fast.mask];
    ibv_wc& wc = out[count];
    wc.wr_id = entry.id;
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = static_cast<ibv_wc_opcode>(entry.opcode);
    wc.vendor_err = 0;
    wc.qp_num = entry.number;
    wc.wc_flags = 0;
  }
  return count;
}

}  // namespace

int poll_cq(ibv_cq* handle, int most, ibv_wc* out) {
  Cq& queue = *static_cast<Cq*>(handle);
  FastQueue& fast = queue.fast;
  Fabric& fabric = Fabric::get();
  if (fast.used) {
    const auto count = static_cast<int>(take_fast(fast, most, out));
    const bool look = count == 0 || ++fast.polls % 16 == 0;
    if (!look || count == most || fabric.attention.load(std::memory_order_relaxed) == 0) return count;
    Locked f;
    return count + poll(*f, queue, most - count, out + count);
  }
  Locked f;
  if (!queue.alive) return violate("ibv_poll_cq: the queue was destroyed"), -1;
  return poll(*f, queue, most, out);
}

int req_notify_cq(ibv_cq* handle, int solicited_only) {
  Locked f;
  Cq* queue = alive<Cq>(handle, "ibv_req_notify_cq");
  if (queue == nullptr) return EINVAL;
  if (queue->channel == nullptr) violate("ibv_req_notify_cq: the queue has no channel");
  ++f->counts.armed;
  f->pass(1);
  queue->armed_solicited = solicited_only != 0;
  queue->fast.armed = true;
  f->execute_all();
  return 0;
}

}  // namespace standin

extern "C" {

ibv_comp_channel* ibv_create_comp_channel(ibv_context* handle) {
  Locked f;
  Context* context = living(handle, "ibv_create_comp_channel");
  if (context == nullptr) return refused(EINVAL);
  auto* made = new Channel;
  made->context = handle;
  made->fd = make_descriptor();
  ++context->uses;
  ++f->objects;
  channel_opened();
  return made;
}

int ibv_destroy_comp_channel(ibv_comp_channel* handle) {
  {
    Locked f;
    Channel* channel = alive<Channel>(handle, "ibv_destroy_comp_channel");
    if (channel == nullptr) return EINVAL;
    if (channel->uses > 0) {
      violate("ibv_destroy_comp_channel: %u queues of it are left", channel->uses);
      return EBUSY;
    }
    --context_of(channel->context)->uses;
    close(channel->fd);
    channel->fd = -1;
    channel->context = tombstone();
    bury(channel);
  }
  channel_closed();
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* handle, int entries, void* user, ibv_comp_channel* channel, int vector) {
  Locked f;
  Context* context = living(handle, "ibv_create_cq");
  if (context == nullptr) return refused(EINVAL);
  if (context->owner->fatal) return refused(EIO);
  if (entries < 1 || static_cast<uint64_t>(entries) > f->options.max_cqe) return refused(EINVAL);
  if (vector < 0 || vector >= handle->num_comp_vectors) return refused(EINVAL);
  if (channel != nullptr && alive<Channel>(channel, "ibv_create_cq") == nullptr) return refused(EINVAL);
  auto* made = new Cq;
  made->context = handle;
  made->channel = channel;
  made->cq_context = user;
  made->cqe = entries;
  if (channel != nullptr) ++static_cast<Channel*>(channel)->uses;
  ++context->uses;
  ++f->objects;
  return made;
}

int ibv_destroy_cq(ibv_cq* handle) {
  Locked f;
  Cq* queue = alive<Cq>(handle, "ibv_destroy_cq");
  if (queue == nullptr) return EINVAL;
  if (queue->uses > 0) {
    violate("ibv_destroy_cq: %u queue pairs use it", queue->uses);
    return EBUSY;
  }
  // The library would wait for these for ever.
  if (queue->events_taken != queue->events_acknowledged || queue->async_taken != queue->async_acknowledged) {
    violate("ibv_destroy_cq: of %lu events taken %lu were acknowledged", queue->events_taken + queue->async_taken,
            queue->events_acknowledged + queue->async_acknowledged);
    return EBUSY;
  }
  if (queue->channel != nullptr) {
    auto& channel = *static_cast<Channel*>(queue->channel);
    std::erase(channel.events, queue);
    if (channel.events.empty()) lower(channel.fd);
    --channel.uses;
  }
  Context& context = *context_of(queue->context);
  drop_events(context, static_cast<ibv_cq*>(queue));
  --context.uses;
  f->queued -= queue->entries.size();
  queue->entries.clear();
  queue->fast.ring = {};
  queue->fast.used = false;
  queue->context = tombstone();
  bury(queue);
  return 0;
}

int ibv_resize_cq(ibv_cq*, int) { return EOPNOTSUPP; }

int ibv_get_cq_event(ibv_comp_channel* handle, ibv_cq** queue, void** user) {
  for (;;) {
    if (!await(handle->fd)) {
      errno = EAGAIN;
      return -1;
    }
    Locked f;
    Channel* channel = alive<Channel>(handle, "ibv_get_cq_event");
    if (channel == nullptr) return -1;
    if (channel->events.empty()) continue;  // another thread was faster
    Cq* from = channel->events.front();
    channel->events.pop_front();
    if (channel->events.empty()) lower(channel->fd);
    ++from->events_taken;
    *queue = from;
    *user = from->cq_context;
    return 0;
  }
}

void ibv_ack_cq_events(ibv_cq* handle, unsigned count) {
  Locked f;
  Cq* queue = alive<Cq>(handle, "ibv_ack_cq_events");
  if (queue == nullptr) return;
  queue->events_acknowledged += count;
  if (queue->events_acknowledged > queue->events_taken) violate("ibv_ack_cq_events: more than were taken");
}

ibv_srq* ibv_create_srq(ibv_pd* handle, ibv_srq_init_attr* attributes) {
  Locked f;
  Pd* domain = alive<Pd>(handle, "ibv_create_srq");
  if (domain == nullptr) return refused(EINVAL);
  if (context_of(domain->context)->owner->fatal) return refused(EIO);
  const ibv_srq_attr& wanted = attributes->attr;
  if (wanted.max_wr < 1 || wanted.max_wr > f->options.max_srq_wr) return refused(EINVAL);
  if (wanted.max_sge > std::min<uint64_t>(f->options.max_sge, kSges)) return refused(EINVAL);
  auto* made = new Srq;
  made->context = domain->context;
  made->srq_context = attributes->srq_context;
  made->pd = domain;
  made->attributes = wanted;
  made->attributes.srq_limit = 0;
  ++domain->uses;
  ++f->objects;
  return made;
}

int ibv_modify_srq(ibv_srq* handle, ibv_srq_attr* attributes, int mask) {
  Locked f;
  Srq* queue = alive<Srq>(handle, "ibv_modify_srq");
  if (queue == nullptr || mask != IBV_SRQ_LIMIT || attributes->srq_limit > queue->attributes.max_wr) return EINVAL;
  queue->attributes.srq_limit = attributes->srq_limit;
  return 0;
}

int ibv_query_srq(ibv_srq* handle, ibv_srq_attr* attributes) {
  Locked f;
  Srq* queue = alive<Srq>(handle, "ibv_query_srq");
  if (queue == nullptr) return EINVAL;
  *attributes = queue->attributes;
  return 0;
}

int ibv_destroy_srq(ibv_srq* handle) {
  Locked f;
  Srq* queue = alive<Srq>(handle, "ibv_destroy_srq");
  if (queue == nullptr) return EINVAL;
  if (queue->uses > 0) {
    violate("ibv_destroy_srq: %u queue pairs use it", queue->uses);
    return EBUSY;
  }
  if (queue->async_taken != queue->async_acknowledged) {
    violate("ibv_destroy_srq: events are not acknowledged");
    return EBUSY;
  }
  drop_events(*context_of(queue->context), static_cast<ibv_srq*>(queue));
  --static_cast<Pd*>(queue->pd)->uses;
  queue->queue.clear();
  queue->context = tombstone();
  bury(queue);
  return 0;
}

}  // extern "C"
