// The one fabric of the process: its devices, its clock, its faults, what is posted and not yet done. Every function here, and everything
// that it calls, runs with Fabric::mutex held unless it says otherwise.
#pragma once

#include <condition_variable>
#include <cstdarg>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/standins/random.h"
#include "tests/verbs/objects.h"
#include "tests/verbs/options.h"

namespace standin {

struct Counts {
  uint64_t calls = 0, posted = 0, signalled = 0, inlined = 0, chained = 0, refused = 0, receives = 0, completions = 0,
           error_completions = 0, polls = 0, empty_polls = 0, armed = 0, events = 0, async_events = 0, bytes = 0,
           rnr = 0, retries = 0, datagrams = 0, datagrams_lost = 0, datagrams_dropped = 0, ghosts = 0, violations = 0,
           discarded = 0;
};

struct Datagram {
  Device* from = nullptr;
  ibv_gid source{}, target{};
  uint32_t source_number = 0, number = 0, key = 0;
  bool with_immediate = false, solicited = false;
  __be32 immediate = 0;
  std::vector<uint8_t> payload;
  uint64_t due = 0;
};

// Bytes that were on the wire when their sender was taken out of service.
struct Ghost {
  Qp* target = nullptr;
  uint32_t psn = 0, key = 0;
  uint64_t address = 0, due = 0;
  std::vector<uint8_t> bytes;
};

// Bytes that were acknowledged and have not reached memory. In the order of arrival.
struct Late {
  Qp* target = nullptr;
  uint32_t key = 0;
  bool relaxed = false;
  uint64_t address = 0, due = 0;
  std::vector<uint8_t> bytes;
};

struct Faults {
  uint64_t partial_left = 0, partial_take = 0, partial_period = 0, calls_since = 0;
  uint64_t srq_refusals = 0, registration_failures = 0, pair_failures = 0, handle_failures = 0;
  uint64_t error_in = 0;  // requests until the one that fails, 0: none does
  uint32_t error_status = 0;
  bool error_late = false;
  std::set<std::pair<uint32_t, uint32_t>> cuts;  // pairs of device indices, lower first
};

struct Fabric {
  static Fabric& get();  // made at the first call, never destroyed

  std::mutex mutex;
  Options initial, options;
  Random random{1};
  Counts counts;
  Faults faults;
  std::string last_violation;
  std::string sysfs_root;

  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Context*> contexts;
  uint64_t contexts_opened = 0;
  std::unordered_map<uint32_t, Mr*> local_keys, remote_keys;
  uint64_t objects = 0, pairs_created = 0;
  uint64_t queued = 0;  // completions not polled yet
  std::deque<std::unique_ptr<Object>> graveyard;
  Counts buried;  // what fast queue pairs had counted when they were destroyed

  uint64_t now = 1;
  std::vector<Qp*> active;   // have something that can be tried
  std::vector<Qp*> waiting;  // until their wake
  std::vector<Datagram> air;
  std::vector<Ghost> ghosts;
  std::vector<Late> late;
  // Not 0: polls of fast completion queues must look further. Read without the mutex.
  std::atomic<uint64_t> attention{0};

  // The thread that polls while nobody does.
  std::thread ticker;
  std::condition_variable ticker_wakes;
  uint32_t channels = 0;
  uint64_t ticker_serial = 0;  // of the one that shall run
  bool ticker_sleeps = false;

  bool idle() const { return active.empty() && waiting.empty() && air.empty() && ghosts.empty() && late.empty(); }
  void pass(uint64_t ticks);    // time passes: who waited enough is active again, datagrams arrive
  void execute(uint64_t most);  // some steps, of queue pairs by chance
  void execute_all();           // until nothing is active
  void schedule(Qp& pair);      // puts it where it belongs after its state has changed
  void wait(Qp& pair, uint64_t ticks);
  static void add_fast_counts(const Qp& pair, Counts* to);
  void forget(Qp& pair);  // it will never be scheduled again

 private:
  Fabric();
};

// How every exported function begins.
class Locked {
 public:
  Locked() : fabric_(Fabric::get()), lock_(fabric_.mutex) {}
  ~Locked();  // tells the ticker and fast polls what there is to do
  Fabric* operator->() { return &fabric_; }
  Fabric& operator*() { return fabric_; }

 private:
  Fabric& fabric_;
  std::lock_guard<std::mutex> lock_;
};

void violate(const char* text, ...) __attribute__((format(printf, 1, 2)));

// The object behind a handle, or null (a violation) when it was destroyed.
template <typename Type, typename Handle>
Type* alive(Handle* handle, const char* function) {
  Type* object = static_cast<Type*>(handle);
  if (object != nullptr && object->alive) return object;
  violate("%s: the object was destroyed, or is null", function);
  return nullptr;
}

// Null, or what is wrong with the way to a remote port.
const char* wrong_address(const Device& device, const ibv_ah_attr& attributes);

void bury(Object* object);  // the last thing that is done with a destroyed object
ibv_context* tombstone();   // what destroyed objects point to: every operation on it is a violation

void channel_opened();
// Joins the ticker after the last; without the mutex.
void channel_closed();

}  // namespace standin
