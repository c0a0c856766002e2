// The schedule of a NIC, its completion queue, and sleeping.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "native/sim/nic.h"

namespace te::sim {
namespace {

bool later(const Operation* a, const Operation* b) { return std::pair(a->due, a->order) > std::pair(b->due, b->order); }

}  // namespace

// --- schedule -------------------------------------------------------------------------------------------------------

void Nic::schedule(Operation& op) {
  op.order = ordered_ ? op.serial : host_.random.next();
  op.scheduled = true;
  schedule_.push_back(&op);
  std::push_heap(schedule_.begin(), schedule_.end(), later);
}

void Nic::progress() {
  ++tick_;
  for (const PathId id : std::exchange(ready_, {}))
    if (Path* path = find(id)) unstall(*path);
  while (!schedule_.empty() && schedule_.front()->due <= tick_) {
    std::pop_heap(schedule_.begin(), schedule_.end(), later);
    Operation& op = *schedule_.back();
    schedule_.pop_back();
    op.scheduled = false;
    if (op.path == nullptr) recycle(&op);  // cancelled
    else advance(op);
  }
}

// One step of one operation: whatever happens first of a fault, a stall, and the next piece.
void Nic::advance(Operation& op) {
  if (op.stage == Stage::kConnecting) return finish_connecting(op);
  if (op.epoch != epoch_ || !up())
    return fail(op, Status::kTransport, op.begun() || (op.epoch != epoch_ && host_.random.chance(0.5)), ENETDOWN);
  if (!op.departed && !depart(op)) return;
  if (host_.paused && op.stage == Stage::kReady) return stall(op);
  switch (reach(op)) {
    case Reach::kSilent:
      return stall(op);
    case Reach::kLost:
      return fail(op, Status::kPeerLost, op.begun(), ECONNRESET);
    case Reach::kDown:
      return fail(op, Status::kTransport, op.begun(), EHOSTUNREACH);
    case Reach::kOpen:
      break;
  }
  if (op.stage == Stage::kReady) return land(op, *op.path->endpoint->nic);
  report(op, Status::kOk, false, 0);
  retire(op);
}

Nic::Reach Nic::reach(const Operation& op) const {
  const Endpoint& endpoint = *op.path->endpoint;
  if (endpoint.nic == nullptr || endpoint.incarnation != op.incarnation) {
    const bool silent = op.incarnation > 0 && op.incarnation <= endpoint.silent_through;
    return silent && !host_.options.reports_dead_peer ? Reach::kSilent : Reach::kLost;
  }
  if (fabric_.partitioned(host_.identity, endpoint.nic->host_.identity)) return Reach::kSilent;
  return endpoint.nic->up() ? Reach::kOpen : Reach::kDown;
}

// --- stalls ---------------------------------------------------------------------------------------------------------
// A stalled operation costs nothing until a change at its target (Fabric::wake) or here (resume_all) makes its path
// ready; the next poll then tries again. Due and order stay, so ordered paths stay ordered.

void Nic::stall(Operation& op) {
  Path& path = *op.path;
  path.stalled.push_back(&op);
  if (path.waits) return;
  path.waits = true;
  path.endpoint->waiters.push_back({serial_, path.id});
}

void Nic::unstall(Path& path) {
  for (Operation* op : std::exchange(path.stalled, {})) schedule(*op);
}

void Nic::wake(PathId id) {
  Path* path = find(id);
  if (path == nullptr) return;
  path->waits = false;
  wake_path(*path);
}

void Nic::resume_all() {
  for (const auto& path : paths_)
    if (path != nullptr) wake_path(*path);
}

void Nic::wake_path(Path& path) {
  if (path.stalled.empty()) return;
  ready_.push_back(path.id);
  activate();
}

// --- completions ----------------------------------------------------------------------------------------------------

bool Nic::has_room() const {
  const uint64_t depth = host_.capabilities.completion_depth;
  return depth == 0 || completions_.size() < depth;
}

// What EFA leaves undefined is made plain here: the NIC is dead, everything that it had in flight fails, and so does
// everything that is posted to it or aimed at it from now on. From then on the queue has no bound: errors must get through.
void Nic::overrun() {
  if (overrun_) return;
  overrun_ = true;
  ++host_.counts.overruns;
  resume_all();
  fabric_.wake(*endpoint_);
}

bool Nic::queue(const Completion& completion) {
  if (!has_room() || overrun_) {
    overrun();
    return false;
  }
  completions_.push_back({completion});
  activate();
  return true;
}

void Nic::queue_own(Path& path, Completion completion) {
  if (!has_room()) {
    overrun();
    completion.status = Status::kTransport;
    completion.provider_status = EOVERFLOW;
    completion.landed_unknown = true;
  }
  if (completion.status != Status::kOk) {
    ++host_.counts.errors;
    ++path.unread_errors;
  }
  completions_.push_back({completion, path.break_epoch});
  activate();
}

void Nic::queue_event(const Completion& completion) {
  events_.push_back(completion);
  activate();
}

uint32_t Nic::poll(std::span<Completion> out) {
  progress();
  uint32_t count = 0;
  for (; count < out.size() && !events_.empty(); ++count) {
    out[count] = events_.front();
    events_.pop_front();
  }
  for (; count < out.size() && !completions_.empty(); ++count) {
    const Entry& entry = completions_.front();
    out[count] = entry.completion;
    Path* path = entry.completion.status == Status::kOk ? nullptr : find(entry.completion.path);
    if (path != nullptr && path->break_epoch == entry.break_epoch) --path->unread_errors;
    completions_.pop_front();
  }
  if (completions_.empty() && events_.empty() && schedule_.empty() && ready_.empty())
    active_.store(false, std::memory_order_release);
  return count;
}

// --- sleeping -------------------------------------------------------------------------------------------------------

// There is something to poll. The descriptor is written only when it is not readable yet: once between two arms.
void Nic::activate() {
  active_.store(true, std::memory_order_release);
  if (wait_fd_ < 0 || signalled_) return;
  signalled_ = eventfd_write(wait_fd_, 1) == 0;
}

bool Nic::arm() {
  if (wait_fd_ < 0 || active_.load(std::memory_order_relaxed)) return false;
  if (signalled_) {
    eventfd_t value = 0;
    if (eventfd_read(wait_fd_, &value) != 0) return false;
    signalled_ = false;
  }
  return true;
}

}  // namespace te::sim
