#include "tests/verbs/completions.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "tests/verbs/execution.h"

namespace standin {
namespace {

// What a device leaves in the fields that a completion does not have is anyone's guess; here it is.
void litter(Fabric& f, ibv_wc& wc) {
  wc.byte_len = f.random.word();
  wc.imm_data = f.random.word();
  wc.src_qp = f.random.word();
  wc.pkey_index = static_cast<uint16_t>(f.random.word());
  wc.slid = static_cast<uint16_t>(f.random.word());
  wc.sl = static_cast<uint8_t>(f.random.word());
  wc.dlid_path_bits = static_cast<uint8_t>(f.random.word());
}

void litter_more(Fabric& f, ibv_wc& wc) {
  constexpr ibv_wc_opcode kOpcodes[] = {IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_RECV,
                                        IBV_WC_RECV_RDMA_WITH_IMM};
  litter(f, wc);
  wc.opcode = kOpcodes[f.random.below(std::size(kOpcodes))];
  wc.wc_flags = f.random.word() & (IBV_WC_GRH | IBV_WC_WITH_IMM);
}

void overrun(Fabric& f, Cq& queue) {
  violate("completion queue of %d entries overran", queue.cqe);
  queue.overrun = true;
  emit(f, queue, IBV_EVENT_CQ_ERR);
  for (const auto& device : f.devices)
    for (const auto& [number, pair] : device->pairs)
      if ((pair->send_cq == &queue || pair->recv_cq == &queue) && pair->now != IBV_QPS_RESET) break_pair(f, *pair);
}

void push(Fabric& f, ibv_cq* target, Completion entry, bool solicited) {
  Cq& queue = *static_cast<Cq*>(target);
  if (queue.overrun) return;
  if (queue.entries.size() + (queue.fast.tail - queue.fast.head) >= static_cast<size_t>(queue.cqe))
    return overrun(f, queue);
  ++f.counts.completions;
  ++f.queued;
  const bool failed = entry.wc.status != IBV_WC_SUCCESS;
  if (failed) ++f.counts.error_completions;
  queue.entries.push_back(std::move(entry));
  if (queue.fast.armed && (!queue.armed_solicited || solicited || failed)) notify(f, queue);
}

ibv_wc_opcode opcode_of(ibv_wr_opcode opcode) {
  if (opcode == IBV_WR_RDMA_READ) return IBV_WC_RDMA_READ;
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;
}

void emit_to(Fabric& f, Context& context, const ibv_async_event& event) {
  ++f.counts.async_events;
  context.events.push_back(event);
  raise(context.context.async_fd);
}

const void* element_of(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_CQ_ERR:
      return event.element.cq;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return event.element.srq;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return event.element.qp;
    default:
      return nullptr;
  }
}

}  // namespace

void complete_send(Fabric& f, Qp& pair, const Send& work, ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && !work.signalled) return;
  Completion entry;
  entry.pair = &pair;
  entry.send = true;
  entry.index = work.index;
  ibv_wc& wc = entry.wc;
  if (status == IBV_WC_SUCCESS) {
    litter(f, wc);
    wc.opcode = opcode_of(work.opcode);
    if (work.opcode == IBV_WR_RDMA_READ) wc.byte_len = work.length;
  } else {
    litter_more(f, wc);
    wc.vendor_err = 0x50 + static_cast<uint32_t>(status);
  }
  wc.wr_id = work.id;
  wc.status = status;
  wc.qp_num = pair.qp_num;
  push(f, pair.send_cq, std::move(entry), false);
}

void complete_receive(Fabric& f, Qp& pair, uint64_t id, ibv_wc_status status, ibv_wc wc, bool solicited) {
  arrive(f, pair);
  if (status != IBV_WC_SUCCESS) {
    litter_more(f, wc);
    wc.vendor_err = 0x90 + static_cast<uint32_t>(status);
  }
  wc.wr_id = id;
  wc.status = status;
  wc.qp_num = pair.qp_num;
  Completion entry;
  entry.pair = &pair;
  entry.wc = wc;
  push(f, pair.recv_cq, std::move(entry), solicited);
}

void drop_completions(Fabric& f, Qp& pair) {
  for (ibv_cq* each : {pair.send_cq, pair.recv_cq}) {
    Cq& queue = *static_cast<Cq*>(each);
    f.queued -= std::erase_if(queue.entries, [&](const Completion& entry) {
      if (entry.pair == &pair && entry.wc.status == IBV_WC_SUCCESS && !entry.send) ++f.counts.discarded;
      return entry.pair == &pair;
    });
  }
}

void notify(Fabric& f, Cq& queue) {
  queue.fast.armed = false;
  if (queue.channel == nullptr) return;
  ++f.counts.events;
  static_cast<Channel*>(queue.channel)->events.push_back(&queue);
  raise(queue.channel->fd);
}

int poll(Fabric& f, Cq& queue, int most, ibv_wc* out) {
  ++f.counts.polls;
  f.pass(1);
  f.execute(f.random.below(f.options.steps + 1));
  Context& context = *context_of(queue.context);
  if (context.owner->fatal || context.silent || queue.overrun) return 0;
  int count = 0;
  while (count < most && !queue.entries.empty()) {
    const Completion& entry = queue.entries.front();
    if (entry.send) entry.pair->freed = std::max(entry.pair->freed, entry.index + 1);
    out[count++] = entry.wc;
    queue.entries.pop_front();
    --f.queued;
  }
  if (count == 0) ++f.counts.empty_polls;
  return count;
}

// --- events ---------------------------------------------------------------------------------------------------------

void emit(Fabric& f, Qp& pair, ibv_event_type type) {
  ibv_async_event event{};
  event.element.qp = &pair;
  event.event_type = type;
  emit_to(f, *context_of(pair.context), event);
}

void emit(Fabric& f, Cq& queue, ibv_event_type type) {
  ibv_async_event event{};
  event.element.cq = &queue;
  event.event_type = type;
  emit_to(f, *context_of(queue.context), event);
}

void emit(Fabric& f, Srq& queue, ibv_event_type type) {
  ibv_async_event event{};
  event.element.srq = &queue;
  event.event_type = type;
  emit_to(f, *context_of(queue.context), event);
}

void emit(Fabric& f, Device& device, ibv_event_type type) {
  ibv_async_event event{};
  event.element.port_num = type == IBV_EVENT_DEVICE_FATAL ? 0 : 1;
  event.event_type = type;
  for (Context* context : device.contexts)
    if (!context->silent) emit_to(f, *context, event);
}

void drop_events(Context& context, const void* object) {
  std::erase_if(context.events, [&](const ibv_async_event& event) { return element_of(event) == object; });
  if (context.events.empty()) lower(context.context.async_fd);
}

int make_descriptor() { return eventfd(0, EFD_CLOEXEC); }

void raise(int descriptor) {
  const uint64_t one = 1;
  static_cast<void>(!write(descriptor, &one, sizeof one));
}

// Only raised and lowered with the mutex held, so the read after the look does not block.
void lower(int descriptor) {
  pollfd entry{descriptor, POLLIN, 0};
  uint64_t value;
  if (::poll(&entry, 1, 0) == 1) static_cast<void>(!read(descriptor, &value, sizeof value));
}

bool await(int descriptor) {
  const bool blocks = (fcntl(descriptor, F_GETFL) & O_NONBLOCK) == 0;
  pollfd entry{descriptor, POLLIN, 0};
  return ::poll(&entry, 1, blocks ? -1 : 0) == 1;
}

}  // namespace standin
