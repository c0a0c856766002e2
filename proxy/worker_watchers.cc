// Watchers and triggers: from a word that has risen to work requests, with no other thread in between.
//
// Firing. A trigger knows how often it is due with the value seen (`asked`) and how often it has fired. The difference is owed, and what is
// owed is posted as far as there is room: an operation slot, a place under the peer's cap, a flight of the target. The rest stays
// owed and is tried again every round, so nothing is lost, and no firing waits inside the worker. Raises between two
// looks coalesce in the value and come apart again here: each is a transfer of its own.
//
// Order. The word is read with acquire: what its raiser wrote before is there when the transfer reads its source. (Stores of a GPU to its
// memory and then to the word: see docs/gpus.md.)
#include <algorithm>
#include <utility>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr uint32_t kFiringsPerTurn = 64;  // of one trigger, before others have theirs and completions are polled again

const int64_t* array(const std::vector<int64_t>& from) { return from.empty() ? nullptr : from.data(); }

}  // namespace

// --- which watchers are looked at --------------------------------------------------------------------------------------------------

void Worker::watch(Watcher& watcher, uint64_t value) {
  if (watcher.listed) return;
  watcher.listed = true;
  watcher.seen.store(value, std::memory_order_relaxed);
  std::unique_ptr<WatchBlock>& block = watch_blocks_[watcher.words->block_of(watcher.word)];
  if (block == nullptr)
    block = std::make_unique<WatchBlock>(watcher.words->block_of(watcher.word), watcher.words->per_block());
  if (block->empty()) watched_.push_back(block.get());
  block->add(watcher.word.index % watcher.words->per_block(), &watcher, value);
}

void Worker::unwatch_if_idle(Watcher& watcher) {
  if (!watcher.listed || watcher.notify || !watcher.triggers.empty()) return;
  watcher.listed = false;
  WatchBlock* block = watch_blocks_[watcher.words->block_of(watcher.word)].get();
  block->remove(watcher.word.index % watcher.words->per_block());
  if (block->empty()) std::erase(watched_, block);
}

void Worker::notify(Watcher& watcher, bool on) {
  if (on && !watcher.notify && watcher.open.load(std::memory_order_relaxed)) {
    const uint64_t value = watcher.value();
    watcher.delivered.store(value, std::memory_order_release);
    watcher.notify = true;
    // A watcher that was looked at already may have been seen with less: that is an event of no change, or the next one comes earlier.
    watch(watcher, value);
  } else if (!on) {
    watcher.notify = false;
    unwatch_if_idle(watcher);
  }
}

void Worker::forget(Watcher& watcher) {
  while (!watcher.triggers.empty()) disarm(*watcher.triggers.back());
  watcher.notify = false;
  unwatch_if_idle(watcher);
}

bool Worker::arm(Watcher& watcher, Trigger& trigger) {
  if (!watcher.open.load(std::memory_order_relaxed)) return false;
  if (!trigger.open.load(std::memory_order_relaxed)) return true;  // the caller has given up waiting
  trigger.stay();
  trigger.watcher = &watcher;
  trigger.active.store(true, std::memory_order_relaxed);
  watcher.triggers.push_back(&trigger);
  watcher.armed.store(static_cast<uint32_t>(watcher.triggers.size()), std::memory_order_relaxed);
  const uint64_t value = watcher.value();
  watch(watcher, value);
  ask(trigger, value);
  return true;
}

void Worker::disarm(Trigger& trigger) {
  Watcher* watcher = std::exchange(trigger.watcher, nullptr);
  if (watcher == nullptr) return;
  std::erase(watcher->triggers, &trigger);
  watcher->armed.store(static_cast<uint32_t>(watcher->triggers.size()), std::memory_order_relaxed);
  owed_.remove(&trigger);
  trigger.asked = trigger.fired.get();
  trigger.active.store(false, std::memory_order_relaxed);
  unwatch_if_idle(*watcher);
  trigger.wake();
  engine_.leave_shared(&trigger);
}

// --- looking -----------------------------------------------------------------------------------------------------------------------

bool Worker::look_at_watchers() {
  bool changed = false;
  for (WatchBlock* block : watched_)
    block->look([&](Watcher& watcher, uint64_t value) {
      changed = true;
      watcher.seen.store(value, std::memory_order_relaxed);
      for (Trigger* trigger : watcher.triggers) ask(*trigger, value);
      if (watcher.notify) engine_.events_.push(&watcher.notice);
    });
  return changed;
}

bool Worker::watchers_changed() const {
  return std::any_of(watched_.begin(), watched_.end(), [](const WatchBlock* block) { return block->stale(); });
}

// The trigger is due this often, all in all.
void Worker::ask(Trigger& trigger, uint64_t value) {
  if (value < trigger.first) return;
  const uint64_t due = (value - trigger.first) / trigger.every + 1;
  if (due <= trigger.asked) return;
  trigger.asked = due;
  if (!trigger.owed_link.linked) owed_.push_back(&trigger);
}

// --- firing ------------------------------------------------------------------------------------------------------------------------

bool Worker::fire_triggers() {
  if (stopping_) return false;
  bool any = false;
  for (size_t left = owed_.size(); left > 0; --left) {
    Trigger& trigger = *owed_.pop_front();
    for (uint32_t i = 0; i < kFiringsPerTurn && trigger.fired < trigger.asked && fire(trigger); ++i) any = true;
    if (trigger.fired < trigger.asked) owed_.push_back(&trigger);
  }
  return any;
}

// False: there is no room, and nothing has happened.
bool Worker::fire(Trigger& trigger) {
  Prepared* prepared = engine_.enter_prepared(trigger.prepared);
  if (prepared == nullptr) {
    firing_refused(trigger, Error(Status::kClosed, "the prepared transfer is closed"));
    return true;
  }
  const bool done =
      prepared->kind == OperationKind::kScatter ? fire_scatter(trigger, *prepared) : fire_write(trigger, *prepared);
  if (prepared->leave()) engine_.recycle(prepared);
  return done;
}

// A transfer of two holders: the engine, and who fires.
te_transfer* Worker::start_firing(Trigger& trigger, uint32_t operations) {
  te_transfer* transfer = acquire_transfer(&engine_, operations);
  if (transfer == nullptr) return nullptr;
  transfer->trigger = &trigger;
  trigger.stay();
  ++trigger.fired;
  engine_.submitted_.fetch_add(1, std::memory_order_relaxed);
  return transfer;
}

bool Worker::fire_write(Trigger& trigger, Prepared& prepared) {
  Operation* op = engine_.try_operation(prepared.member.peer);
  if (op == nullptr) return false;
  op->kind = prepared.kind;
  op->peer = prepared.member.peer;
  op->deadline_ns = deadline_after(now_, trigger.timeout_ns);
  if (Error e = engine_.fill_prepared(prepared, op)) {
    engine_.give_back_operation(op);
    firing_refused(trigger, e);
    return true;
  }
  te_transfer* transfer = start_firing(trigger, 1);
  if (transfer == nullptr) {
    op->region->leave();
    engine_.retire_pages(op);
    engine_.give_back_operation(op);
    return false;
  }
  op->transfer = transfer;
  op->triggered = true;
  transfer->peer = op->peer->index;
  begin(op);
  release_transfer(transfer);
  return true;
}

bool Worker::fire_scatter(Trigger& trigger, Prepared& prepared) {
  Target* target = engine_.enter_target(prepared.target);
  if (target == nullptr) {
    firing_refused(trigger, Error(Status::kClosed, "the target is closed"));
    return true;
  }
  const bool notices = prepared.region_handle == TE_NONE;
  Region* region = notices ? engine_.notice_region_ : engine_.regions_.get(prepared.region_handle);
  if (region == nullptr || !region->enter(notices ? engine_.notice_handle_ : prepared.region_handle)) {
    firing_refused(trigger, Error(Status::kRegionClosed, "the source region is closed"));
  } else if (!fire_flight(trigger, prepared, *target, *region)) {
    region->leave();
    if (target->leave()) engine_.recycle(target);
    return false;
  }
  if (target->leave()) engine_.recycle(target);
  return true;
}

// The region is entered; on success it is the flight's, or left.
bool Worker::fire_flight(Trigger& trigger, Prepared& prepared, Target& target, Region& region) {
  const te_scatter_args args{
      prepared.target,         prepared.region_handle,        0, prepared.shard, array(prepared.source_offsets),
      array(prepared.lengths), array(prepared.target_offsets)};
  std::unique_lock lock(target.mutex, std::try_to_lock);  // a caller fills a flight in: the next round is soon enough
  if (!lock.owns_lock()) return false;
  Flight* flight = target.count == 0 ? nullptr : engine_.take_flight(target);
  if (flight == nullptr && target.count > 0) return false;
  te_transfer* transfer = start_firing(trigger, target.count + 1);
  Error error;
  if (transfer != nullptr && flight != nullptr) {
    flight->region = &region;
    flight->deadline_ns = deadline_after(now_, trigger.timeout_ns);
    flight->flush = prepared.flush;
    error = engine_.fill_flight(args, target, region.span.length, flight);
  }
  lock.unlock();
  if (transfer != nullptr && flight != nullptr && !error) {
    target.stay();
    begin_flight(*flight, transfer);
    release_transfer(transfer);
    return true;
  }
  if (flight != nullptr) {
    target.under_way.fetch_sub(1, std::memory_order_relaxed);
    engine_.give_back_flight(flight);
  }
  if (transfer == nullptr) return false;
  // Nothing to do is done; what was refused has failed. Either way nothing is under way.
  region.leave();
  if (error) note_failure(transfer, error.status(), error.provider_status(), -1, error.peer(), error.message().c_str());
  transfer->undrained = transfer->unfinished = 0;
  end_transfer(transfer);
  settle_quiesced(transfer);
  release_transfer(transfer);
  return true;
}

// --- what becomes of a firing --------------------------------------------------------------------------------------------------------

void Worker::firing_refused(Trigger& trigger, const Error& error) {
  ++trigger.fired;
  te_error told{};
  static_cast<void>(export_error(error, &told));
  firing_failed(trigger, told);
}

void Worker::firing_failed(Trigger& trigger, const te_error& error) {
  const uint64_t failed = trigger.failed.load(std::memory_order_relaxed);
  if (failed == 0) trigger.first_error = error;
  trigger.failed.store(failed + 1, std::memory_order_release);
  if (failed == 0) trigger.wake();
}

// A work request of it is with the provider.
void Worker::firing_posted(te_transfer& transfer) {
  Trigger* trigger = transfer.trigger;
  if (trigger == nullptr || transfer.trigger_posted) return;
  transfer.trigger_posted = true;
  trigger->last_post_ns = now_ns() - transfer.submitted_ns;
  ++trigger->posted;
  if (trigger->posted_flag != nullptr) trigger->posted_flag->raise(1);
}

void Worker::firing_ended(te_transfer& transfer) {
  if (transfer.status == Status::kOk) firing_posted(transfer);  // also where there was nothing to post
  Trigger* trigger = std::exchange(transfer.trigger, nullptr);
  if (transfer.status == Status::kOk) {
    ++trigger->completed;
    if (trigger->completed_flag != nullptr) trigger->completed_flag->raise(1);
    trigger->wake_if_reached(trigger->completed);
  } else {
    te_error error{};
    export_result(transfer, &error);
    firing_failed(*trigger, error);
  }
  engine_.leave_shared(trigger);
}

}  // namespace te
