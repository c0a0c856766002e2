// Completion queues.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

int close_queue(fid* handle) {
  Locked f;
  auto& queue = behind<Queue, fid_cq>(handle);
  if (queue.uses > 0) return refuse_close("completion queue", queue.uses);
  if (queue.descriptor >= 0) close(queue.descriptor);
  --queue.domain->uses;
  --f->objects;
  delete &queue;
  return 0;
}

int control_queue(fid* handle, int command, void* argument) {
  Locked f;
  auto& queue = behind<Queue, fid_cq>(handle);
  if (command != FI_GETWAIT || queue.descriptor < 0) return -FI_ENODATA;
  *static_cast<int*>(argument) = queue.descriptor;
  return 0;
}

// The places that a completion had in its endpoint's queues are free once it is read.
void account(Fabric& f, const Entry& entry) {
  if (entry.transmit) --entry.endpoint->transmits;
  if (entry.used_receive) --entry.endpoint->receives_used;
  if (entry.endpoint->direct) release(f, entry.public_part.op_context);
}

bool dead(const Queue& queue) { return queue.domain->device->lost || queue.overrun; }

ssize_t read_error(fid_cq* handle, fi_cq_err_entry* out, uint64_t) {
  Locked f;
  auto& queue = *static_cast<Queue*>(handle);
  if (queue.entries.empty() || queue.entries.front().public_part.err == 0) return -FI_EAGAIN;
  const Entry entry = queue.entries.front();
  queue.entries.pop_front();
  account(*f, entry);
  *out = entry.public_part;
  return 1;
}

ssize_t no_blocking_read(fid_cq*, void*, size_t, const void*, int) { return -FI_ENOSYS; }

const char* describe_error(fid_cq*, int, const void*, char*, size_t) { return "see enum efa_io_comp_status"; }

fi_ops_cq* queue_ops(bool free) {
  const auto table = [](auto* read) {
    fi_ops_cq ops{};
    ops.size = sizeof ops;
    ops.read = read;
    ops.readerr = read_error;
    ops.sread = no_blocking_read;
    ops.strerror = describe_error;
    return ops;
  };
  static fi_ops_cq ordinary = table(read_queue), fast = table(read_free_queue);
  return free ? &fast : &ordinary;
}

fi_ops* queue_common_ops() {
  static fi_ops ops = [] {
    fi_ops made = *only_close<close_queue>();
    made.control = control_queue;
    return made;
  }();
  return &ops;
}

void lower(int descriptor) {
  uint64_t value;
  static_cast<void>(!read(descriptor, &value, sizeof value));
}

// Nothing has come, nothing comes without somebody who polls, and a descriptor tells when it does.
bool may_sleep(Fabric& f, Queue& queue) {
  f.execute_all();
  if (!queue.entries.empty() || queue.free.head != queue.free.tail) return false;
  // What waits for a peer needs a clock, and that is counted in polls: who has such work stays awake.
  for (const Endpoint* endpoint : f.endpoints)
    if (endpoint->transmit == &queue && endpoint->posted.size() > endpoint->held.size()) return false;
  return true;
}

}  // namespace

int open_queue(fid_domain* handle, fi_cq_attr* attributes, fid_cq** out, void* context) {
  Locked f;
  auto& domain = *static_cast<Domain*>(handle);
  const bool waits = attributes->wait_obj == FI_WAIT_FD || attributes->wait_obj == FI_WAIT_UNSPEC;
  if (!waits && attributes->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
  if (waits && f->options.wait_fd == 0) return -FI_ENOSYS;
  if (attributes->size > f->options.max_cq) return -FI_EINVAL;
  auto* queue = new Queue;
  queue->fid = {FI_CLASS_CQ, context, queue_common_ops()};
  queue->ops = queue_ops(f->options.free != 0);
  queue->domain = &domain;
  queue->size = attributes->size != 0 ? attributes->size : 1024;
  queue->format = attributes->format != FI_CQ_FORMAT_UNSPEC ? attributes->format : FI_CQ_FORMAT_DATA;
  if (waits) queue->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (f->options.free != 0) {
    queue->free.ring.resize(std::bit_ceil(queue->size));
    queue->free.mask = queue->free.ring.size() - 1;
  }
  ++domain.uses;
  ++f->objects;
  *out = queue;
  return 0;
}

void push(Fabric& f, Queue& queue, const Entry& entry) {
  if (queue.overrun) return;
  if (queue.entries.size() + (queue.free.tail - queue.free.head) >= queue.size) {
    queue.overrun = true;
    return violate("a completion queue of %zu entries overran", queue.size);
  }
  ++f.counts.completions;
  if (entry.public_part.err != 0) ++f.counts.error_completions;
  queue.entries.push_back(entry);
  if (!queue.armed) return;
  queue.armed = false;
  const uint64_t one = 1;
  static_cast<void>(!write(queue.descriptor, &one, sizeof one));
}

// As the provider translates a device's status (to_fi_errno of efa_errno.h).
int error_of(uint32_t status) {
  switch (status) {
    case kDone:
      return 0;
    case kFlushed:
      return FI_ECANCELED;
    case kBadLocalLength:
    case kBadRemoteLength:
      return FI_EMSGSIZE;
    case kRemoteAbort:
    case kUnresponsive:
      return FI_ECONNABORTED;
    case kBadQueuePair:
    case kUnknownPeer:
      return FI_ENOTCONN;
    case kNoReceive:
      return FI_ENORX;
    case kUnreachable:
      return FI_EHOSTUNREACH;
    default:
      return FI_EINVAL;
  }
}

size_t write_entry(fi_cq_format format, const fi_cq_err_entry& entry, void* buffer) {
  fi_cq_data_entry made{};
  made.op_context = entry.op_context;
  made.flags = entry.flags;
  made.len = entry.len;
  made.data = entry.data;
  // The formats CONTEXT and MSG are the beginning of DATA.
  const size_t bytes = format == FI_CQ_FORMAT_CONTEXT ? sizeof(fi_cq_entry)
                       : format == FI_CQ_FORMAT_MSG   ? sizeof(fi_cq_msg_entry)
                                                      : sizeof(fi_cq_data_entry);
  std::memcpy(buffer, &made, bytes);
  return bytes;
}

ssize_t read_queue(fid_cq* handle, void* buffer, size_t count) {
  Locked f;
  auto& queue = *static_cast<Queue*>(handle);
  ++f->counts.polls;
  f->pass(1);
  f->execute(f->random.below(f->options.steps + 1));
  if (dead(queue)) return -FI_EIO;
  size_t taken = 0;
  auto* at = static_cast<uint8_t*>(buffer);
  while (taken < count && !queue.entries.empty() && queue.entries.front().public_part.err == 0) {
    const Entry& entry = queue.entries.front();
    account(*f, entry);
    at += write_entry(queue.format, entry.public_part, at);
    queue.entries.pop_front();
    ++taken;
  }
  if (taken > 0) return static_cast<ssize_t>(taken);
  return queue.entries.empty() ? -FI_EAGAIN : -FI_EAVAIL;
}

int try_wait(fid_fabric*, fid** objects, int count) {
  Locked f;
  for (int i = 0; i < count; ++i) {
    if (objects[i]->fclass != FI_CLASS_CQ) return -FI_EINVAL;
    auto& queue = behind<Queue, fid_cq>(objects[i]);
    if (queue.descriptor < 0) return -FI_EINVAL;
    lower(queue.descriptor);
    if (dead(queue) || !may_sleep(*f, queue)) return -FI_EAGAIN;
    queue.armed = true;
  }
  return 0;
}

}  // namespace srd
