// Flags and bindings from the caller's side, and the words behind flags and watchers. How the worker raises flags: worker_flags.cc.
#include <utility>

#include "proxy/engine.h"

namespace te {
namespace {

using gpu::WordKind;
using ull = unsigned long long;

// Longest sleep of a wait: where a device may abort the flag, nobody wakes.
constexpr int64_t kHostSlice = 100'000'000;
constexpr int64_t kDeviceSlice = 1'000'000;

uint64_t address_of(const std::atomic<uint64_t>* word) { return reinterpret_cast<uint64_t>(word); }

Error no_gdr(const Error& why) {
  return Error(why.status(), format("setting gdr is \"require\": %s", why.message().c_str()), why.provider_status());
}

Error flag_closed() { return Error(Status::kClosed, "the flag is closed"); }

}  // namespace

// --- words -----------------------------------------------------------------------------------------------------------------------

DeviceWords::DeviceWords(int device, uint32_t most)
    : epochs(device < 0 ? WordKind::kHost : WordKind::kMapped, device, 8, most),
      controls(epochs.kind(), device, 8, most),
      taken(device < 0 ? WordKind::kHost : WordKind::kDevice, device, 1, most),
      watched(epochs.kind(), device, 1, most) {}

Error Engine::words_of(int32_t device, DeviceWords** out) {
  const int32_t key = device < 0 ? -1 : device;
  const std::lock_guard lock(coordination_.mutex);
  std::unique_ptr<DeviceWords>& words = coordination_.devices[key];
  if (words == nullptr)
    if (Error e = make_words(key, &words)) return e;
  *out = words.get();
  return {};
}

// What a GPU polls (epochs) lies in its memory where the CPU can store there. What the CPU polls (watchers) lies where the CPU reads
// at less cost, which is measured: most often that is the host's memory by two orders of magnitude. What was measured stays in
// use: to free it would wait for the device, where a kernel may be waiting for this very thread.
Error Engine::make_words(int32_t device, std::unique_ptr<DeviceWords>* out) {
  auto made = std::make_unique<DeviceWords>(device, Coordination::kMost);
  gpu::Word near, far;
  if (device >= 0) {
    if (Error e = made->watched.take(&near)) return e;
    made->watched.give_back(near);
  }
  if (device >= 0 && settings_.values.gdr != TE_GDR_OFF) {
    auto gdr = std::make_unique<gpu::Words>(WordKind::kGdr, device, 8, Coordination::kMost);
    if (Error e = gdr->take(&far)) {
      if (gdr_required()) return no_gdr(e);
    } else {
      gdr->give_back(far);
      if (gpu::reads_faster(far, near))
        made->gdr_watched = std::make_unique<gpu::Words>(WordKind::kGdr, device, 1, Coordination::kMost);
      made->gdr_epochs = std::move(gdr);
    }
  }
  *out = std::move(made);
  return {};
}

// A word of kind gdr where there are such. If no more can be had (a GPU's memory and BAR are finite), one of the host's, unless gdr is
// required.
Error Engine::take_word(gpu::Words* gdr, gpu::Words& host, gpu::Word* word, gpu::Words** from) {
  *from = gdr != nullptr ? gdr : &host;
  Error error = (*from)->take(word);
  if (!error || gdr == nullptr) return error;
  if (gdr_required()) return no_gdr(error);
  *from = &host;
  return host.take(word);
}

// --- flags -----------------------------------------------------------------------------------------------------------------------

Error Engine::open_flag(int32_t device, te_handle* handle) {
  DeviceWords* words = nullptr;
  if (Error e = words_of(device, &words)) return e;
  gpu::Word word, control, taken;
  gpu::Words* epochs = nullptr;
  Error error = take_word(words->gdr_epochs.get(), words->epochs, &word, &epochs);
  if (!error) error = words->controls.take(&control);
  if (!error && device >= 0) error = words->taken.take(&taken);
  Flag* flag = nullptr;
  if (!error) {
    flag = coordination_.flags.add([&](Flag& f) {
      f.device = device < 0 ? -1 : device;
      f.words = words;
      f.epochs = epochs;
      f.word = word;
      f.control = control;
      f.taken = taken;
      f.forget_epoch();
      f.abort_peer.store(-1, std::memory_order_relaxed);
      f.wake_at.store(Alarm::kNobody, std::memory_order_relaxed);
      f.born();
    });
    if (flag == nullptr)
      error = Error(Status::kExhausted, format("%u flags are open; close some first", Coordination::kMost));
  }
  if (error) {
    if (word.index != FreeList::kNone) epochs->give_back(word);
    if (control.index != FreeList::kNone) words->controls.give_back(control);
    if (taken.index != FreeList::kNone) words->taken.give_back(taken);
    return error;
  }
  *handle = flag->handle.load(std::memory_order_relaxed);
  // Either close sees the flag in the table or we see that it has begun.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (closing_.load(std::memory_order_seq_cst)) flag->abort(TE_ABORT_CLOSED, -1);
  return {};
}

void Engine::recycle(Flag* flag) {
  flag->epochs->give_back(flag->word);
  flag->words->controls.give_back(flag->control);
  if (flag->taken.index != FreeList::kNone) flag->words->taken.give_back(flag->taken);
  coordination_.flags.recycle(flag);
}

Error Engine::describe_flag(te_handle handle, te_flag_info* out) {
  Flag* flag = enter_shared(coordination_.flags, handle);
  if (flag == nullptr) return flag_closed();
  *out = te_flag_info{};
  out->epoch = flag->value();
  out->abort = flag->abort_word().load(std::memory_order_acquire);
  out->early = flag->early().load(std::memory_order_acquire);
  out->epoch_host = address_of(flag->word.host);
  out->control_host = address_of(flag->control.host);
  out->epoch_device = flag->word.device;
  out->control_device = flag->control.device;
  out->taken_device = flag->taken.device;
  out->kind = static_cast<uint32_t>(flag->word.kind);
  out->device = flag->device;
  out->abort_peer = out->abort == TE_ABORT_PEER_LOST ? flag->abort_peer.load(std::memory_order_relaxed) : -1;
  leave_shared(flag);
  return {};
}

Error Engine::raise_flag(te_handle handle, uint64_t by) {
  Flag* flag = enter_shared(coordination_.flags, handle);
  if (flag == nullptr) return flag_closed();
  if (by > 0) flag->raise(by);
  leave_shared(flag);
  return {};
}

Error Engine::wait_flag(te_handle handle, uint64_t at_least, int64_t timeout_ns) {
  Flag* flag = enter_shared(coordination_.flags, handle);
  if (flag == nullptr) return flag_closed();
  const auto why = [&] { return flag->abort_word().load(std::memory_order_acquire); };
  const int64_t deadline = deadline_after(now_ns(), timeout_or_default(timeout_ns));
  const auto ended = [&] { return flag->value() >= at_least || why() != TE_ABORT_NONE; };
  Error outcome(Status::kAgain, "");
  if (timeout_ns != 0) static_cast<void>(spin_until(ended));
  for (;;) {
    const uint32_t epoch = flag->epoch.load(std::memory_order_acquire);
    flag->wait_for(at_least);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint64_t value = flag->value(), abort = why();
    const auto text = [&](const char* what) {
      return format("flag at %llu/%llu when %s", static_cast<ull>(value), static_cast<ull>(at_least), what);
    };
    if (value >= at_least) {
      outcome = Error();
      break;
    }
    if (abort == TE_ABORT_PEER_LOST) {
      const int32_t peer = flag->abort_peer.load(std::memory_order_relaxed);
      outcome = Error(Status::kPeerLost, text("a peer that it depends on was lost")).about_peer(peer);
      break;
    }
    if (abort == TE_ABORT_DEADLINE) {
      outcome = Error(Status::kTimeout, text("the deadline of a wait on the device passed"));
      break;
    }
    if (abort != TE_ABORT_NONE || closing_.load(std::memory_order_relaxed)) {
      const bool engine = closing_.load(std::memory_order_relaxed);
      outcome = Error(Status::kClosed, engine ? "the engine was closed" : "the flag was closed");
      break;
    }
    const int64_t left = deadline - now_ns();
    if (left <= 0) break;
    futex_wait(&flag->epoch, epoch, std::min(left, flag->device < 0 ? kHostSlice : kDeviceSlice));
  }
  leave_shared(flag);
  return outcome;
}

Error Engine::clear_flag(te_handle handle) {
  Flag* flag = enter_shared(coordination_.flags, handle);
  if (flag == nullptr) return flag_closed();
  flag->early().store(0, std::memory_order_relaxed);
  flag->abort_word().store(TE_ABORT_NONE, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (closing_.load(std::memory_order_seq_cst)) flag->abort(TE_ABORT_CLOSED, -1);
  leave_shared(flag);
  return {};
}

Error Engine::close_flag(te_handle handle) {
  Flag* flag = enter_shared(coordination_.flags, handle);
  if (flag == nullptr) return {};
  if (flag->open.exchange(false, std::memory_order_acq_rel)) {
    flag->abort(TE_ABORT_CLOSED, -1);
    static_cast<void>(flag->leave());  // born's; we are still inside
  }
  leave_shared(flag);
  return {};
}

// Everybody who waits looks again, too.
void Engine::abort_flags(uint64_t why) {
  coordination_.flags.for_each([why](Flag& flag) { flag.abort(why, -1); });
  coordination_.triggers.for_each([](Trigger& trigger) { trigger.wake(); });
}

// --- bindings --------------------------------------------------------------------------------------------------------------------

Error Engine::bind_counter(te_handle counter_handle, te_handle flag_handle, uint64_t every,
                           std::span<const int32_t> peers, te_handle* handle) {
  if (every == 0) return Error(Status::kArgument, "a flag cannot rise for every 0 arrivals: `every` is 1 or more");
  Counter* counter = counters_.get(counter_handle);
  if (counter == nullptr) return Error(Status::kClosed, "the counter is closed");
  for (const int32_t index : peers)
    if (peer_at(index) == nullptr) return no_peer(index).about_peer(index);
  Flag* flag = enter_shared(coordination_.flags, flag_handle);
  if (flag == nullptr) return flag_closed();
  Binding* binding = coordination_.bindings.add([&](Binding& b) {
    b.counter_handle = counter_handle;
    b.flag = flag;  // our hold becomes the binding's
    b.every = every;
    b.next_at = every;
    b.peers.assign(peers.begin(), peers.end());
    b.born();
  });
  if (binding == nullptr) {
    leave_shared(flag);
    return Error(Status::kExhausted, format("%u bindings are open; close some first", Coordination::kMost));
  }
  const te_handle made = binding->handle.load(std::memory_order_relaxed);
  if (Error e = give_order({.kind = Order::Kind::kBind, .binding = binding})) {
    binding->open.store(false, std::memory_order_release);
    leave_shared(binding);
    return e;
  }
  *handle = made;
  return {};
}

void Engine::recycle(Binding* binding) {
  Flag* flag = std::exchange(binding->flag, nullptr);
  coordination_.bindings.recycle(binding);
  leave_shared(flag);
}

Error Engine::close_binding(te_handle handle) {
  Binding* binding = enter_shared(coordination_.bindings, handle);
  if (binding == nullptr) return {};
  Error error;
  if (binding->open.exchange(false, std::memory_order_acq_rel)) {
    error = give_order({.kind = Order::Kind::kUnbind, .binding = binding});
    static_cast<void>(binding->leave());  // born's; we are still inside
  }
  leave_shared(binding);
  return error;
}

// --- orders ----------------------------------------------------------------------------------------------------------------------

Error Engine::give_order(Order order) {
  if (order.binding != nullptr) order.binding->stay();
  if (order.watcher != nullptr) order.watcher->stay();
  if (order.trigger != nullptr) order.trigger->stay();
  auto* pending = new PendingOrder(order);
  if (!coordination_.orders.push(pending)) {  // the caller is inside, too: these are not the last
    delete pending;
    if (order.binding != nullptr) order.binding->leave();
    if (order.watcher != nullptr) order.watcher->leave();
    if (order.trigger != nullptr) order.trigger->leave();
    return Error(Status::kClosed, kClosedEngine);
  }
  doorbell_.ring();
  const auto done = [pending] { return pending->done.load(std::memory_order_acquire) != 0; };
  const int64_t deadline = deadline_after(now_ns(), settings_.values.default_timeout_ns);
  static_cast<void>(spin_until(done));
  Error error;
  while (!done()) {
    const int64_t left = deadline - now_ns();
    if (left <= 0) break;
    futex_wait(&pending->done, 0, std::min(left, kHostSlice));
  }
  if (!done()) error = Error(Status::kTimeout, "the worker thread has not answered in time");
  else if (pending->outcome != Status::kOk) error = Error(pending->outcome, pending->why);
  pending->leave();
  return error;
}

}  // namespace te
