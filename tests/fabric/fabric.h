// The one fabric of the process: its devices, its clock, its faults, what is posted and not yet done. Every function
// here, and everything that it calls, runs with Fabric::mutex held unless it says otherwise.
#pragma once

#include <atomic>
#include <cstdarg>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/fabric/objects.h"
#include "tests/fabric/options.h"
#include "tests/standins/random.h"

namespace srd {

struct Counts {
  uint64_t posted = 0, writes = 0, immediates = 0, reads = 0, sends = 0, receives = 0, held = 0, refused = 0,
           completions = 0, error_completions = 0, polls = 0, bytes = 0, rnr = 0, retries = 0, unknown_peer = 0,
           ghosts = 0, violations = 0;
};

struct Faults {
  uint64_t error_in = 0;  // requests until the one that fails, 0: none does
  uint32_t error_status = 0;
  bool error_landed = false;
  uint64_t registration_failures = 0, refusals = 0;
  std::set<std::pair<uint32_t, uint32_t>> cuts;  // pairs of device indices, lower first
};

// The 64 bytes of a context between a post and the reading of its completion: the stand-in's, full of what `pattern`
// gives.
struct Claim {
  Endpoint* endpoint = nullptr;
  uint64_t pattern = 0;
};

struct Fabric {
  static Fabric& get();  // made at the first call, never destroyed

  std::mutex mutex;
  Options initial, options;
  standin::Random random{1};
  Counts counts;
  Faults faults;
  std::string last_violation;

  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Endpoint*> endpoints;
  uint64_t endpoints_opened = 0, objects = 0, last_descriptor = 0;
  std::unordered_map<uint64_t, Region*> by_descriptor, by_key;
  std::unordered_map<void*, Claim> claims;

  uint64_t now = 1;
  std::vector<Request*> active;   // have something that can be tried
  std::vector<Request*> waiting;  // until their wake
  // Not 0: polls of free completion queues must look further. Read without the mutex.
  std::atomic<uint64_t> attention{0};

  void pass(uint64_t ticks);    // time passes: who waited enough is active again
  void execute(uint64_t most);  // some steps, of requests by chance
  void execute_all();           // until nothing is active
  void activate(Request* request);
  void wait(Request* request, uint64_t ticks);
  void forget(Request* request);  // it is neither active nor waiting any more

 private:
  Fabric();
};

// How every exported function begins.
class Locked {
 public:
  Locked() : fabric_(Fabric::get()), lock_(fabric_.mutex) {}
  ~Locked();  // tells free polls what there is to do
  Fabric* operator->() { return &fabric_; }
  Fabric& operator*() { return fabric_; }

 private:
  Fabric& fabric_;
  std::lock_guard<std::mutex> lock_;
};

// A breach of the rules by the program: counted, told, and the end of it unless the options say otherwise.
void violate(const char* text, ...) __attribute__((format(printf, 1, 2)));

// Contexts.
bool claim(Fabric& f, Endpoint& endpoint, void* context, const char* function);
void release(Fabric& f, void* context);

// Regions: null where there is none that covers all of the range with these rights.
Region* local_region(Fabric& f, const Domain* domain, uint64_t descriptor, const void* from, uint64_t length,
                     uint64_t access);
Region* remote_region(Fabric& f, const Domain* domain, uint64_t key, uint64_t address, uint64_t length,
                      uint64_t access);

// execution.cc
void step(Fabric& f, Request* request);
void end(Fabric& f, Request* request, uint32_t status);
void drop(Fabric& f, Request* request);                 // without a completion
void land_as_ghost(Fabric& f, const Request& request);  // all of its bytes, if they can

// queue.cc
void push(Fabric& f, Queue& queue, const Entry& entry);
int error_of(uint32_t status);

}  // namespace srd
