// Streams: each a queue of tasks and the thread that carries them out.
#include <chrono>

#include "tests/cuda/api.h"
#include "tests/cuda/driver.h"

namespace standin::cuda {
namespace {

const CuStream kLegacy = reinterpret_cast<CuStream>(1);  // CU_STREAM_LEGACY: another name of stream 0

// Carries out one task of this context; the lock is let go while its work is done.
void carry_out(Driver& d, Lock& lock, CuContext handle, Task task) {
  Context* context = d.find_context(handle);
  if (context == nullptr || context->error != result::kSuccess) return;
  if (task.fails) {
    context->error = result::kIllegalAddress;
    return;
  }
  const std::chrono::microseconds delay(task.copy ? d.options.copy_delay_us : 0);
  lock.unlock();
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  if (task.work) task.work();
  lock.lock();
  if (task.finish) task.finish();
}

void run(Driver& d, Stream* stream) {
  Lock lock(d.mutex);
  for (;;) {
    d.changed.wait(lock, [&] { return stream->ending || (!stream->tasks.empty() && d.options.hold == 0); });
    if (stream->tasks.empty()) return;
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->busy = true;
    carry_out(d, lock, stream->context, std::move(task));
    stream->busy = false;
    d.changed.notify_all();
  }
}

Stream* find_stream(const Call& call, CuStream handle, const char* caller) {
  const auto found = call.d.streams.find(handle);
  if (found == call.d.streams.end() || found->second->ending) {
    call.d.violation("%s: %p is no stream, or one that was destroyed", caller, static_cast<void*>(handle));
    return nullptr;
  }
  if (found->second->context == call.context->handle) return found->second.get();
  call.d.violation("%s: the stream belongs to another context than the current one", caller);
  return nullptr;
}

bool is_legacy(CuStream stream) { return stream == nullptr || stream == kLegacy; }

}  // namespace

void drain(Lock& lock, CuContext context, bool blocking_only) {
  Driver& d = Driver::get();
  d.changed.wait(lock, [&] {
    for (const auto& [handle, stream] : d.streams)
      if ((context == nullptr || stream->context == context) && (stream->blocking || !blocking_only) && !stream->idle())
        return false;
    return true;
  });
}

CuResult submit(Call& call, CuStream stream, Task task) {
  const CuContext context = call.context->handle;
  Stream* found = nullptr;
  if (!is_legacy(stream) && (found = find_stream(call, stream, "submit")) == nullptr) return result::kInvalidHandle;
  if (task.copy) task.fails = ++call.d.async_copies == call.d.options.copy_fail_after;
  if (found != nullptr) {
    found->tasks.push_back(std::move(task));
    call.d.changed.notify_all();
    return result::kSuccess;
  }
  drain(call.lock, context, true);
  carry_out(call.d, call.lock, context, std::move(task));
  const Context* after = call.d.find_context(context);
  return after == nullptr ? result::kInvalidContext : after->error;
}

void end_stream(Lock& lock, CuStream handle) {
  Driver& d = Driver::get();
  Stream* stream = d.streams.at(handle).get();
  stream->ending = true;
  d.changed.notify_all();
  lock.unlock();
  stream->thread.join();
  lock.lock();
  d.streams.erase(handle);
}

}  // namespace standin::cuda

using namespace standin::cuda;

extern "C" {

CuResult cuStreamCreate(CuStream* stream, unsigned flags) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  if (stream == nullptr || (flags & ~te::gpu::kStreamNonBlocking) != 0) return result::kInvalidValue;
  auto made = std::make_unique<Stream>();
  made->handle = call.d.new_handle<CuStream>();
  made->context = call.context->handle;
  made->blocking = (flags & te::gpu::kStreamNonBlocking) == 0;
  made->thread = std::thread(run, std::ref(call.d), made.get());
  *stream = made->handle;
  call.d.streams.emplace(made->handle, std::move(made));
  return result::kSuccess;
}

CuResult cuStreamDestroy_v2(CuStream stream) {
  Call call(Call::Needs::kContext);
  if (call.context == nullptr) return call.status;
  if (find_stream(call, stream, "cuStreamDestroy") == nullptr) return result::kInvalidHandle;
  const CuResult status = call.status;
  end_stream(call.lock, stream);
  return status;
}

CuResult cuStreamSynchronize(CuStream stream) {
  Call call(Call::Needs::kContext);
  if (call.failed()) return call.status;
  const CuContext context = call.context->handle;
  if (is_legacy(stream)) {
    drain(call.lock, context, true);
  } else {
    if (find_stream(call, stream, "cuStreamSynchronize") == nullptr) return result::kInvalidHandle;
    call.d.changed.wait(call.lock, [&] {
      const auto found = call.d.streams.find(stream);
      return found == call.d.streams.end() || found->second->idle();
    });
  }
  const Context* after = call.d.find_context(context);
  return after == nullptr ? result::kInvalidContext : after->error;
}

}  // extern "C"
