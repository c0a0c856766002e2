// What the engines of one process share: who answers at which address, who waits for whom, and who cannot hear whom.
//
// One mutex guards all state of the simulator, engines and NICs included. Every entry point (native/sim/provider.cc)
// takes it once; everything below is called with it held. Bytes are copied under it too, which gives the same
// happens-before between a landing and the poll that reports it as a completion queue gives on hardware.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "native/provider.h"

namespace te::sim {

class Nic;
struct Host;

using Identity = std::array<uint8_t, 16>;

// A place that can be addressed. It outlives the NIC that answers there: a killed NIC leaves a silent one, and a
// restarted engine attaches a new incarnation. Operations are bound to the incarnation they were posted to, so what was
// on its way to a dead process never lands in its successor.
struct Endpoint {
  std::string address;
  Nic* nic = nullptr;           // null: nobody answers
  uint64_t incarnation = 0;     // counts attachments; 0: never attached
  uint64_t killed_through = 0;  // incarnations up to this one were killed (or replaced)
  uint64_t silent_through = 0;  // likewise, and their peers are not told

  // Paths that hold stalled operations towards this place. NICs are named by serial, as they may be gone by then.
  struct Waiter {
    uint64_t nic_serial;
    PathId path;
  };
  std::vector<Waiter> waiters;
};

class Fabric {
 public:
  static Fabric& instance();

  std::mutex mutex;

  // --- addresses ---
  std::shared_ptr<Endpoint> endpoint(const std::string& address);  // made on first use
  void release(std::shared_ptr<Endpoint>* endpoint);               // forgets it with its last user
  void attach(Endpoint& endpoint, Nic& nic);
  enum class End { kClosed, kKilledSilently, kKilledLoudly };
  void detach(Endpoint& endpoint, Nic& nic, End end);
  void wake(Endpoint& endpoint);  // something about it has changed: whoever waits looks again

  // --- membership ---
  void add(Host& host);
  void remove(Host& host);
  size_t host_count() const { return hosts_.size(); }
  void resume_all();  // every stalled operation of every engine looks again

  // --- partitions ---
  void partition(const Identity& injector, const Identity& other) { partitions_.emplace(injector, other); }
  void heal(const Identity& engine);  // ends every partition with it, whoever asked for it
  void heal(const Identity& a, const Identity& b);
  bool partitioned(const Identity& a, const Identity& b) const {
    return !partitions_.empty() && (partitions_.contains({a, b}) || partitions_.contains({b, a}));
  }

  uint64_t next_nic_serial() { return ++nic_serial_; }
  // 32 bits, as on EFA; never reused, so that a key of a dead engine is dead at its successor too. The odd multiplier
  // makes neighbours unlike, so that an off-by-one finds no key.
  uint32_t next_key() { return ++key_serial_ * 0x9E3779B1u; }

 private:
  std::map<std::string, std::shared_ptr<Endpoint>> endpoints_;
  std::unordered_map<uint64_t, Nic*> nics_;
  std::vector<Host*> hosts_;
  std::set<std::pair<Identity, Identity>> partitions_;  // (who asked for it, the other)
  uint64_t nic_serial_ = 0;
  uint32_t key_serial_ = 0;
};

}  // namespace te::sim
