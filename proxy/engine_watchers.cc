// Watchers and triggers from the caller's side. How the worker looks at them and fires: worker_watchers.cc.
#include <algorithm>
#include <utility>

#include "proxy/engine.h"

namespace te {
namespace {

constexpr int64_t kSlice = 100'000'000;

Error watcher_closed() { return Error(Status::kClosed, "the watcher is closed"); }
Error trigger_closed() { return Error(Status::kClosed, "the trigger is closed"); }

}  // namespace

// --- watchers --------------------------------------------------------------------------------------------------------------------

Error Engine::open_watcher(int32_t device, te_handle* handle) {
  DeviceWords* words = nullptr;
  if (Error e = words_of(device, &words)) return e;
  gpu::Word word;
  gpu::Words* from = nullptr;
  if (Error e = take_word(words->gdr_watched.get(), words->watched, &word, &from)) return e;
  Watcher* watcher = coordination_.watchers.add([&](Watcher& w) {
    w.device = device < 0 ? -1 : device;
    w.words = from;
    w.word = word;
    w.seen.store(0, std::memory_order_relaxed);
    w.delivered.store(0, std::memory_order_relaxed);
    w.armed.store(0, std::memory_order_relaxed);
    w.born();
  });
  if (watcher == nullptr) {
    from->give_back(word);
    return Error(Status::kExhausted, format("%u watchers are open; close some first", Coordination::kMost));
  }
  *handle = watcher->handle.load(std::memory_order_relaxed);
  return {};
}

void Engine::recycle(Watcher* watcher) {
  watcher->words->give_back(watcher->word);
  coordination_.watchers.recycle(watcher);
}

Error Engine::describe_watcher(te_handle handle, te_watcher_info* out) {
  Watcher* watcher = enter_shared(coordination_.watchers, handle);
  if (watcher == nullptr) return watcher_closed();
  *out = te_watcher_info{};
  out->value = watcher->value();
  out->seen = watcher->seen.load(std::memory_order_relaxed);
  out->host = reinterpret_cast<uint64_t>(watcher->word.host);
  out->device_pointer = watcher->word.device;
  out->kind = static_cast<uint32_t>(watcher->word.kind);
  out->device = watcher->device;
  out->triggers = watcher->armed.load(std::memory_order_relaxed);
  leave_shared(watcher);
  return {};
}

// The worker, before it sleeps, says so and then looks at the words once more: either it sees the raise, or ring() sees it sleeping.
Error Engine::add_to_watcher(te_handle handle, uint64_t by) {
  Watcher* watcher = enter_shared(coordination_.watchers, handle);
  if (watcher == nullptr) return watcher_closed();
  const bool ours = watcher->word.kind != gpu::WordKind::kGdr;
  if (ours) watcher->word.host->fetch_add(by, std::memory_order_release);
  leave_shared(watcher);
  if (!ours)
    return Error(Status::kArgument,
                 "the watcher lies in GPU memory (kind gdr): the CPU cannot add to it; a kernel can");
  doorbell_.ring();
  return {};
}

Error Engine::notify_watcher(te_handle handle, bool on) {
  Watcher* watcher = enter_shared(coordination_.watchers, handle);
  if (watcher == nullptr) return watcher_closed();
  Error error = give_order({.kind = Order::Kind::kNotify, .watcher = watcher, .on = on});
  leave_shared(watcher);
  return error;
}

Error Engine::take_watcher(te_handle handle, uint64_t* before, uint64_t* now) {
  Watcher* watcher = enter_shared(coordination_.watchers, handle);
  if (watcher == nullptr) return watcher_closed();
  const uint64_t given = watcher->delivered.load(std::memory_order_acquire), value = watcher->value();
  if (value != given) watcher->delivered.store(value, std::memory_order_relaxed);
  leave_shared(watcher);
  if (value == given) return Error(Status::kAgain, "");
  *before = given;
  *now = value;
  return {};
}

Error Engine::close_watcher(te_handle handle) {
  Watcher* watcher = enter_shared(coordination_.watchers, handle);
  if (watcher == nullptr) return {};
  Error error;
  if (watcher->open.exchange(false, std::memory_order_acq_rel)) {
    error = give_order({.kind = Order::Kind::kForgetWatcher, .watcher = watcher});
    static_cast<void>(watcher->leave());  // born's; we are still inside
  }
  leave_shared(watcher);
  return error;
}

// --- triggers --------------------------------------------------------------------------------------------------------------------

Error Engine::open_trigger(const te_trigger_args& args, te_handle* handle) {
  if (args.every == 0 || args.first == 0)
    return Error(Status::kArgument,
                 format("every is %llu and first %llu: both are 1 or more", static_cast<unsigned long long>(args.every),
                        static_cast<unsigned long long>(args.first)));
  Prepared* prepared = enter_prepared(args.prepared);
  if (prepared == nullptr) return Error(Status::kStale, "the prepared transfer is closed");
  if (prepared->leave()) recycle(prepared);
  Flag* flags[2] = {};
  const te_handle wanted[2] = {args.posted_flag, args.completed_flag};
  Watcher* watcher = enter_shared(coordination_.watchers, args.watcher);
  Error error = watcher == nullptr ? watcher_closed() : Error();
  for (int i = 0; i < 2 && !error; ++i) {
    if (wanted[i] == TE_NONE) continue;
    flags[i] = enter_shared(coordination_.flags, wanted[i]);
    if (flags[i] == nullptr) error = Error(Status::kClosed, "the flag is closed");
  }
  Trigger* trigger = nullptr;
  if (!error) {
    trigger = coordination_.triggers.add([&](Trigger& t) {
      t.prepared = args.prepared;
      t.posted_flag = flags[0];  // our holds become the trigger's
      t.completed_flag = flags[1];
      t.every = args.every;
      t.first = args.first;
      t.timeout_ns = timeout_or_default(args.timeout_ns);
      t.fired = t.posted = t.completed = t.asked = 0;
      t.failed.store(0, std::memory_order_relaxed);
      t.last_post_ns = 0;
      t.first_error = {};
      t.wake_at.store(Alarm::kNobody, std::memory_order_relaxed);
      t.born();
    });
    if (trigger == nullptr)
      error = Error(Status::kExhausted, format("%u triggers are open; close some first", Coordination::kMost));
  }
  if (trigger == nullptr) {
    for (Flag* flag : flags)
      if (flag != nullptr) leave_shared(flag);
  } else {
    const te_handle made = trigger->handle.load(std::memory_order_relaxed);
    error = give_order({.kind = Order::Kind::kArm, .watcher = watcher, .trigger = trigger});
    if (error) {
      trigger->open.store(false, std::memory_order_release);
      leave_shared(trigger);
    } else {
      *handle = made;
    }
  }
  if (watcher != nullptr) leave_shared(watcher);
  return error;
}

// Not cancelled and not under way any more: see Worker::disarm.
void Engine::recycle(Trigger* trigger) {
  Flag* flags[2] = {std::exchange(trigger->posted_flag, nullptr), std::exchange(trigger->completed_flag, nullptr)};
  coordination_.triggers.recycle(trigger);
  for (Flag* flag : flags)
    if (flag != nullptr) leave_shared(flag);
}

Error Engine::describe_trigger(te_handle handle, te_trigger_info* out) {
  Trigger* trigger = enter_shared(coordination_.triggers, handle);
  if (trigger == nullptr) return trigger_closed();
  *out = te_trigger_info{};
  out->failed = trigger->failed.load(std::memory_order_acquire);
  out->completed = trigger->completed;
  out->posted = trigger->posted;
  out->fired = trigger->fired;
  const uint64_t asked = trigger->asked;
  out->owed = asked - std::min(asked, out->fired);
  out->last_post_ns = trigger->last_post_ns;
  out->active = trigger->active.load(std::memory_order_relaxed) ? 1 : 0;
  if (out->failed > 0) out->first_error = trigger->first_error;
  leave_shared(trigger);
  return {};
}

Error Engine::wait_trigger(te_handle handle, uint64_t completed, int64_t timeout_ns) {
  Trigger* trigger = enter_shared(coordination_.triggers, handle);
  if (trigger == nullptr) return trigger_closed();
  const auto failed = [&] { return trigger->failed.load(std::memory_order_acquire) > 0; };
  const auto reached = [&] { return trigger->completed.get() >= completed; };
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  if (timeout_ns != 0) static_cast<void>(spin_until([&] { return reached() || failed(); }));
  Error outcome(Status::kAgain, "");
  for (;;) {
    const uint32_t epoch = trigger->epoch.load(std::memory_order_acquire);
    trigger->wait_for(completed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (reached()) {
      outcome = Error();
      break;
    }
    if (failed()) {
      const te_error& e = trigger->first_error;
      outcome = Error(static_cast<Status>(e.status), e.message, e.provider_status, e.nic).about_peer(e.peer);
      break;
    }
    if (closing_.load(std::memory_order_relaxed)) {
      outcome = Error(Status::kClosed, "the engine was closed");
      break;
    }
    const int64_t left = deadline - now_ns();
    if (left <= 0) break;
    futex_wait(&trigger->epoch, epoch, std::min(left, kSlice));
  }
  leave_shared(trigger);
  return outcome;
}

Error Engine::cancel_trigger(te_handle handle) {
  Trigger* trigger = enter_shared(coordination_.triggers, handle);
  if (trigger == nullptr) return {};
  Error error = give_order({.kind = Order::Kind::kCancel, .trigger = trigger});
  leave_shared(trigger);
  return error;
}

Error Engine::close_trigger(te_handle handle) {
  Trigger* trigger = enter_shared(coordination_.triggers, handle);
  if (trigger == nullptr) return {};
  Error error;
  if (trigger->open.exchange(false, std::memory_order_acq_rel)) {
    error = give_order({.kind = Order::Kind::kCancel, .trigger = trigger});
    static_cast<void>(trigger->leave());  // born's; we are still inside
  }
  leave_shared(trigger);
  return error;
}

}  // namespace te
