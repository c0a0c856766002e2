// The provider interface: what a transport must offer to the engine. One provider object serves one engine.
//
// Threads: open, register_memory and deregister_memory may run in any caller's thread, the latter two concurrently with
// everything else. All other calls come from the engine's worker thread only, so a provider needs no lock for them.
// A provider knows neither threads nor Python nor peers' protocol: it moves bytes and reports what the NIC said.
//
// Errors: set-up returns a te::Error. The data path returns PostResult; "busy" is not an error. A provider never aborts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "native/status.h"
#include "native/te.h"

namespace te {

// What the engine must know in order to use a provider rightly. Filled at open, constant afterwards.
struct Capabilities {
  uint64_t max_write_bytes = 0;    // longest single write; longer ones are cut by the engine
  uint32_t max_send_bytes = 0;     // longest single send
  uint32_t nic_depth = 0;          // work requests (writes, reads, sends) in flight per NIC
  uint32_t receive_depth = 0;      // receives that can be posted per NIC
  uint32_t completion_depth = 0;   // entries of a NIC's completion queue; 0: cannot overrun
  bool ordered_writes = false;     // writes of one NIC to one path are placed in the order posted, immediates included
  bool ordered_sends = false;      // sends of one NIC to one path arrive in the order posted
  bool delivery_complete = false;  // a write's completion proves that its bytes are in the target's memory
  bool completion_orders = false;  // what is posted after a write's completion is placed after that write
  bool keys_enforced = false;      // a write with a deregistered key cannot land
  bool reads = false;              // kRead works
  bool device_memory = false;      // register_memory takes GPU memory
  bool connected_paths = false;    // open_path only starts a bootstrap; kPathUp or kPathDown follows
  bool immediate_consumes_receive = false;  // the provider keeps receives for immediates by itself
  bool same_process_only = false;           // the simulated fabric
  bool reports_dead_peer = false;           // a work request to a dead peer is certain to complete with an error
};

// A registered span of memory on one NIC.
struct MemoryKey {
  uint64_t base = 0;        // the address that offset 0 has on the wire
  uint64_t remote_key = 0;  // rkey
  uint64_t local_key = 0;   // lkey, or the provider's descriptor pointer
  void* handle = nullptr;   // the provider's own object
};

struct MemorySpan {
  void* address = nullptr;
  uint64_t length = 0;
  int32_t device_kind = TE_DEVICE_HOST;
  int32_t device_index = 0;
  // Memory that another driver has exported: it begins at this offset of the dma-buf. `address` is what work requests of this side call it
  // by; nothing need be mapped there. The descriptor is only needed during the call.
  int32_t dmabuf_fd = -1;
  uint64_t dmabuf_offset = 0;
};

// Scratch memory that must stay put while one work request is in flight. 64 bytes is the size of libfabric's
// fi_context2 (8 pointers), the most that any provider asks for. The provider owns `scratch` from post until the
// completion that carries this context; the rest belongs to the engine.
struct alignas(64) WorkContext {
  std::byte scratch[64];
};

using PathId = uint64_t;  // a NIC's handle of one NIC of one peer
inline constexpr PathId kNoPath = ~PathId{0};

enum class Opcode : uint8_t { kWrite, kWriteImmediate, kRead, kSend };

struct WorkRequest {
  Opcode opcode = Opcode::kWrite;
  bool more =
      false;  // another request for this NIC follows at once: the doorbell may wait. Never set on the last of a batch.
  uint32_t immediate = 0;
  PathId path = kNoPath;
  void* local = nullptr;  // may be null when length is 0
  uint64_t local_key = 0;
  uint64_t length = 0;
  uint64_t remote_address = 0;  // MemoryKey::base + offset
  uint64_t remote_key = 0;
  WorkContext* context = nullptr;
};

struct PostResult {
  uint32_t posted = 0;      // the first `posted` requests were taken: each will complete exactly once
  bool busy = false;        // the next one was refused for now (queue full): post it again after a poll
  int provider_status = 0;  // not 0 (and not busy): the next one was refused for good; it will not complete
};

enum class CompletionKind : uint8_t {
  kSent,       // a kWrite, kWriteImmediate, kRead or kSend of this side has ended (see status)
  kReceived,   // a posted receive holds `length` bytes
  kImmediate,  // a peer's kWriteImmediate has been placed; `immediate` is its value
  kPathUp,     // connected_paths: `path` is ready
  kPathDown,   // `path` failed; its work requests complete with errors of their own
  kNicDown,    // the NIC cannot send for now (its port is down): new work had better go elsewhere
  kNicUp
};

struct Completion {
  CompletionKind kind = CompletionKind::kSent;
  Status status = Status::kOk;  // kOk, kPeerLost, kRemoteAccess, kCancelled (flushed, never left), kTransport
  bool landed_unknown = false;  // an error after which the bytes may still have landed, or still land
  int provider_status = 0;
  uint32_t immediate = 0;
  uint64_t length = 0;
  WorkContext* context = nullptr;  // kSent, kReceived
  PathId path = kNoPath;           // kPathUp, kPathDown; else where the provider knows it
  const char* detail = nullptr;    // kPathDown: why, a text that stays
};

enum class Death : uint8_t { kNotProven, kAsking, kProven };

struct NicInfo {
  std::string name;  // interface or device
  te_nic_address address{};
  bool up = true;
  const char* state = "";         // in words, where there is more to say; a text that stays
  bool relaxed_ordering = false;  // memory is registered so that bytes of a write may pass each other on PCIe
  std::string ordering_reason;    // if not: why
};

// How to open a provider: a copy of the settings that concern it.
struct ProviderOptions {
  std::string transport;          // "tcp", "shm", "efa", ...
  std::vector<std::string> nics;  // names asked for; empty: choose
  uint32_t nic_count = 0;         // 0: as many as named, else the provider's choice
  std::string sim;                // options of the simulated fabric
  uint32_t nic_depth = 0;         // 0: the provider's
  uint32_t completion_depth = 0;  // entries wanted in each completion queue; 0: the provider's
  uint64_t chunk_bytes = 0;       // 0: the provider's
  uint16_t port_low = 0, port_high = 0;
  bool want_wait_fd = true;  // false: busy polling, no need for wait objects
  uint8_t identity[16] = {};
  te_rdma_settings rdma{};         // cx7
  int64_t connect_timeout_ns = 0;  // connected_paths: until a path without an answer is down; 0: the provider's
  uint64_t generation = 0;         // goes into addresses where two starts at one address must be told apart
};

class Provider {
 public:
  virtual ~Provider() = default;  // closes every NIC; whatever is in flight is dropped

  virtual const Capabilities& capabilities() const = 0;
  virtual std::string provider_name() const = 0;  // "net", "shm", "sim", ...
  virtual std::string library_name() const = 0;   // "libfabric 1.17.0"
  virtual uint32_t nic_count() const = 0;
  virtual NicInfo nic(uint32_t nic) const = 0;

  // --- memory: any thread -----------------------------------------------------------------------------------------
  virtual Error register_memory(uint32_t nic, const MemorySpan& span, MemoryKey* key) = 0;
  // After it returns the key is dead: where keys_enforced, nothing that uses it can land.
  virtual Error deregister_memory(uint32_t nic, const MemoryKey& key) = 0;

  // --- worker thread only ---------------------------------------------------------------------------------------------
  // `generation` is the peer's: a provider that keeps connections must not hand an old one to a restarted peer.
  virtual Error open_path(uint32_t nic, const te_nic_address& remote, uint64_t generation, PathId* path) = 0;
  virtual void close_path(uint32_t nic, PathId path) = 0;

  // Posts in order, stops at the first refusal.
  virtual PostResult post(uint32_t nic, std::span<const WorkRequest> requests) = 0;
  // Busy means: no room for another receive.
  virtual PostResult post_receive(uint32_t nic, void* buffer, uint64_t length, uint64_t local_key,
                                  WorkContext* context) = 0;
  // Takes up to out.size() completions and makes the NIC progress. Never blocks.
  virtual uint32_t poll(uint32_t nic, std::span<Completion> out) = 0;

  // Sleeping. wait_fd is -1 where the NIC has none. arm returns true when it is safe to sleep on the descriptor
  // (nothing is pending); it must be called right before sleeping and again after each wake-up and poll.
  virtual int wait_fd(uint32_t nic) const = 0;
  virtual bool arm(uint32_t nic) = 0;
  // For transports without a wait_fd: ring peers that sleep after work was posted to them (see shm's doorbell). The engine calls it
  // once after each round in which something was posted. Default: nothing.
  virtual void ring_doorbells() {}

  // --- quiescence and fences --------------------------------------------------------------------------------------------
  // Resets whatever carries this path's work requests so that they complete (with kCancelled or an error) and nothing of
  // them lands afterwards. Returns kUnsupported where the provider has no such means.
  virtual Error reset_path(uint32_t nic, PathId path) = 0;
  // Is it proven that the process behind the path has ended, so that nothing of it can land any more (after our own
  // queue was drained)? Never blocks: where the answer takes time, kAsking, and the next calls go on asking.
  virtual Death death_of(uint32_t nic, PathId path) = 0;

  // A test hook; only the simulated fabric has commands.
  virtual Error inject(std::string_view command) = 0;
};

}  // namespace te
