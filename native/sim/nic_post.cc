// Posting work requests, and the ways in which they end.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "native/sim/nic.h"

namespace te::sim {
namespace {

// Reported operations that have yet to land (delivery_complete=0) fill buffers of their own, a few times the queue's depth.
constexpr uint64_t kUnfinishedPerDepth = 4;

// While the provider owns the scratch it holds this pattern; a change shows a context reused too early.
void fill_scratch(WorkContext& context, uint64_t serial) {
  for (size_t at = 0; at < sizeof context.scratch; at += sizeof serial)
    std::memcpy(context.scratch + at, &serial, sizeof serial);
}

bool scratch_intact(const WorkContext& context, uint64_t serial) {
  WorkContext expected;
  fill_scratch(expected, serial);
  return std::memcmp(context.scratch, expected.scratch, sizeof expected.scratch) == 0;
}

}  // namespace

bool Nic::full() const {
  const uint64_t depth = host_.capabilities.nic_depth;
  return in_flight_ >= depth || unfinished_ >= kUnfinishedPerDepth * depth;
}

PostResult Nic::post(std::span<const WorkRequest> requests) {
  PostResult result;
  for (const WorkRequest& request : requests) {
    result.provider_status = refusal(request, &request == &requests.back());
    if (result.provider_status != 0) break;
    if (full() || host_.random.chance(host_.options.busy)) {
      result.busy = true;
      ++host_.counts.busy;
      break;
    }
    accept(request);
    ++result.posted;
  }
  if (result.posted > 0) activate();
  return result;
}

int Nic::refusal(const WorkRequest& request, bool last) const {
  if (host_.killed) return ESHUTDOWN;
  if (overrun_) return EIO;
  if (request.context == nullptr) return EINVAL;
  if (request.more && last) return EINVAL;  // the doorbell would never ring
  const Path* path = find(request.path);
  if (path == nullptr) return EINVAL;
  if (!path->up && !path->down_told) return ENOTCONN;
  if (request.opcode == Opcode::kRead && !host_.options.reads) return EOPNOTSUPP;
  const Capabilities& limits = host_.capabilities;
  const uint64_t longest = request.opcode == Opcode::kSend ? limits.max_send_bytes : limits.max_write_bytes;
  if (request.length > longest) return EINVAL;
  return covers(request.local_key, request.local, request.length) ? 0 : EINVAL;
}

void Nic::accept(const WorkRequest& request) {
  Path& path = *find(request.path);
  Operation& op = *allocate();
  op.request = request;
  op.serial = ++operation_serial_;
  op.incarnation = path.endpoint->incarnation;
  op.epoch = epoch_;
  fill_scratch(*request.context, op.serial);
  link(path, op);
  ++in_flight_;
  ++unfinished_;
  op.due = tick_ + host_.random.below(host_.options.delay + 1);
  if (!ordered_) return schedule(op);
  if (path.unread_errors > 0 || path.down_told) return flush(op);
  op.due = path.last_due = std::max(op.due, path.last_due);
  if (!std::exchange(path.busy, true)) schedule(op);
}

// --- ending ---------------------------------------------------------------------------------------------------------

void Nic::report(Operation& op, Status status, bool landed_unknown, int provider_status) {
  if (op.reported) return;
  if (ordered_) report_before(op, status, provider_status);
  op.reported = true;
  --in_flight_;
  if (!scratch_intact(*op.request.context, op.serial)) ++host_.counts.tampered;
  Completion completion;
  completion.status = status;
  completion.landed_unknown = landed_unknown;
  completion.provider_status = provider_status;
  completion.length = op.request.length;
  completion.context = op.request.context;
  completion.path = op.path->id;
  queue_own(*op.path, completion);
}

// Completions of one path keep order: whatever landed earlier and still waits for its completion gets it now. The answer
// to a later operation covers it, as on RC, unless the peer or this NIC is gone.
void Nic::report_before(Operation& op, Status status, int provider_status) {
  Operation* earlier = op.path->first;
  while (earlier != &op) {
    Operation& each = *std::exchange(earlier, earlier->next);
    if (each.reported || each.stage != Stage::kLanded) continue;
    const Reach reached = reach(each);
    const bool answered = each.epoch == epoch_ && up() && reached != Reach::kLost && reached != Reach::kDown;
    if (!answered && status == Status::kOk) continue;  // its own turn will tell
    if (!each.scheduled) std::erase(op.path->stalled, &each);
    report(each, answered ? Status::kOk : status, !answered, answered ? 0 : provider_status);
    unlink(each);
    if (!each.scheduled) recycle(&each);
  }
}

void Nic::fail(Operation& op, Status status, bool landed_unknown, int provider_status) {
  const bool news = !op.reported;
  report(op, status, landed_unknown, provider_status);
  if (news) break_path(op);
  retire(op);
}

// An operation failed. In ordered mode nothing that was posted behind it may land.
void Nic::break_path(Operation& failed) {
  if (!ordered_) return;
  Path& path = *failed.path;
  if (host_.options.connected && !path.down_told) {
    path.up = false;
    path.down_told = true;
    Completion event;
    event.kind = CompletionKind::kPathDown;
    event.status = Status::kTransport;
    event.path = path.id;
    queue_event(event);
  }
  while (failed.next != nullptr) {
    if (!failed.next->scheduled) std::erase(path.stalled, failed.next);
    flush(*failed.next);
  }
  if (failed.stage == Stage::kLanded) path.busy = false;  // the head was behind it
}

// Ends an operation from outside of its schedule. The heap cannot give up its middle: an operation in it loses its path
// and is recycled when its turn comes.
void Nic::flush(Operation& op) {
  if (op.stage != Stage::kConnecting) report(op, Status::kCancelled, op.begun(), ECANCELED);
  unlink(op);
  if (!op.scheduled) recycle(&op);
}

// Ordered mode: an operation has landed or failed, and the one posted after it, if any, may go.
void Nic::start_next(Path& path, Operation* next) {
  path.busy = next != nullptr;
  if (next != nullptr) schedule(*next);
}

// The operation is over. One that held up its path lets the next one go.
void Nic::retire(Operation& op) {
  Path& path = *op.path;
  const bool was_head = ordered_ && op.stage == Stage::kReady && !op.scheduled;
  Operation* const next = op.next;
  unlink(op);
  recycle(&op);
  if (was_head) start_next(path, next);
}

Error Nic::reset_path(PathId id) {
  Path* path = find(id);
  if (path == nullptr) return Error(Status::kArgument, "unknown path", EINVAL, static_cast<int>(index_));
  cancel(*path);
  if (host_.options.connected) connect(*path);
  activate();
  return {};
}

void Nic::cancel_all() {
  for (const auto& path : paths_)
    if (path != nullptr) cancel(*path);
}

// Ends everything on the path: nothing of it lands from here on.
void Nic::cancel(Path& path) {
  path.stalled.clear();
  while (path.first != nullptr) flush(*path.first);
  path.busy = false;
  path.last_due = path.last_completion_due = 0;
  path.unread_errors = 0;
  ++path.break_epoch;
}

// --- bookkeeping ----------------------------------------------------------------------------------------------------

Operation* Nic::allocate() {
  if (free_.empty()) {
    pool_.push_back(std::make_unique<Operation>());
    return pool_.back().get();
  }
  Operation* op = free_.back();
  free_.pop_back();
  return op;
}

void Nic::recycle(Operation* op) {
  *op = Operation();
  free_.push_back(op);
}

void Nic::link(Path& path, Operation& op) {
  op.path = &path;
  op.previous = path.last;
  (path.last == nullptr ? path.first : path.last->next) = &op;
  path.last = &op;
}

void Nic::unlink(Operation& op) {
  Path& path = *op.path;
  (op.previous == nullptr ? path.first : op.previous->next) = op.next;
  (op.next == nullptr ? path.last : op.next->previous) = op.previous;
  op.path = nullptr;
  --unfinished_;
}

}  // namespace te::sim
