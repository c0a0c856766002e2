// What the stand-in's functions share: its objects, all guarded by one mutex, and the checks that come before each call.
//
// Handles are numbers that are never used twice and point nowhere, so one that is stale or of another kind is always noticed.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "native/gpu/cuda.h"
#include "tests/cuda/options.h"

namespace standin::cuda {

using te::gpu::CuContext;
using te::gpu::CuDevice;
using te::gpu::CuEvent;
using te::gpu::CuPointer;
using te::gpu::CuResult;
using te::gpu::CuStream;
namespace result = te::gpu::result;

struct Context {
  CuContext handle = nullptr;
  int device = 0;
  uint64_t references = 0;  // of cuDevicePrimaryCtxRetain
  CuResult error = result::kSuccess;
};

enum class Kind { kDevice, kManaged, kHost };

struct Allocation {
  Kind kind = Kind::kDevice;
  CuContext context = nullptr;
  int device = 0;
  uint64_t base = 0, bytes = 0;         // as the program sees it
  uint64_t pages = 0, pages_bytes = 0;  // device memory: what is reserved around it
  uint8_t* view = nullptr;              // of the pages; of managed and host memory: the memory itself
  int descriptor = -1;                  // device memory: the file behind the pages
  uint64_t id = 0;
  unsigned flags = 0;  // of cuMemHostAlloc

  bool holds(uint64_t at, uint64_t length) const {
    return at >= base && length <= bytes && at - base <= bytes - length;
  }
  uint8_t* seen(uint64_t at) const { return view + (at - (kind == Kind::kDevice ? pages : base)); }
};

// What a stream has to do: `work` is carried out without the mutex, `finish` afterwards with it. Either may be empty.
struct Task {
  std::function<void()> work, finish;
  bool copy = false, fails = false;
};

struct Stream {
  CuStream handle = nullptr;
  CuContext context = nullptr;
  bool blocking = true, ending = false, busy = false;
  std::deque<Task> tasks;
  std::thread thread;

  bool idle() const { return tasks.empty() && !busy; }
};

struct Event {
  CuContext context = nullptr;
  uint64_t recorded = 0, reached = 0;  // the latest record that was asked for, and that was carried out
};

struct Driver {
  static Driver& get();

  std::mutex mutex;
  std::condition_variable changed;  // options, or what a stream has to do
  Options initial, options;
  std::atomic<bool> initialised = false, forked = false;
  std::map<CuContext, Context> contexts;
  std::array<CuContext, kMostDevices> primary{};
  std::map<uint64_t, Allocation> allocations;              // by base, of all kinds
  std::map<uint64_t, std::vector<uint64_t>> reservations;  // pages that were freed, by their bytes
  std::map<CuStream, std::unique_ptr<Stream>> streams;
  std::map<CuEvent, Event> events;
  uint64_t last_handle = 0, last_id = 0, async_copies = 0;
  uint64_t copies = 0, fills = 0, flushes = 0, violations = 0;

  // --- under the mutex ---
  template <typename Handle>
  Handle new_handle() {
    return reinterpret_cast<Handle>(0xC0DA'0000'0000u + 16 * ++last_handle);
  }
  void violation(const char* format, ...) __attribute__((format(printf, 2, 3)));
  bool has_device(CuDevice device) const { return device >= 0 && static_cast<uint64_t>(device) < options.devices; }
  Context* find_context(CuContext handle);
  // The allocation that this address lies in, or device memory whose pages it lies in; null: none.
  Allocation* find(uint64_t at);
  Allocation* find_pages(uint64_t at);

 private:
  Driver();
};

// What a function begins with: the mutex, held unless this is a child after a fork, and what the calling thread has current. The status says why the call must
// fail; the context is there also where an error stuck to it.
struct Call {
  enum class Needs { kNothing, kDriver, kContext };
  explicit Call(Needs needs);
  bool failed() const { return status != result::kSuccess; }

  Driver& d = Driver::get();
  std::unique_lock<std::mutex> lock{d.mutex, std::defer_lock};
  CuResult status = result::kSuccess;
  Context* context = nullptr;
};

// --- contexts.cc ---
std::vector<CuContext>& current();  // the calling thread's stack

// --- memory.cc ---
// Gives back what is behind an allocation, which is not in the table any more.
void release(Driver& d, const Allocation& gone);
// Enters it in the table, with a context and an id.
void enter(Call& call, Allocation made);

// --- streams.cc, all of which let the mutex go while they wait ---
using Lock = std::unique_lock<std::mutex>;
// Until what was given to streams is done: to those of one context, or all (null); only to those that stream 0 waits for.
void drain(Lock& lock, CuContext context, bool blocking_only);
// Gives a stream a task; on stream 0 it is carried out at once.
CuResult submit(Call& call, CuStream stream, Task task);
// What it was given is carried out, or dropped where its context has failed; then its thread ends.
void end_stream(Lock& lock, CuStream stream);

}  // namespace standin::cuda
