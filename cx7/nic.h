// One port of one RDMA device: protection domain, completion queues, shared receive queues, the bootstrap queue pair, and two
// reliable queue pairs per connection. nic.cc sets it up and takes it down, memory.cc registers memory, connections.cc makes and binds queue pairs,
// bootstrap.cc carries the handshake's datagrams, datapath.cc posts and polls, events.cc sleeps and hears asynchronous events.
//
// register_memory and deregister_memory run in any thread; all else in the worker's.
#pragma once

#include "cx7/library.h"

#ifdef TE_HAVE_VERBS
#include <atomic>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "cx7/limits.h"
#include "cx7/ports.h"
#include "cx7/resolver.h"
#include "cx7/switchboard.h"
#include "native/provider.h"

namespace te::cx7 {

class Nic final : public Effects {
 public:
  static Error open(const Library& library, const Port& port, const ProviderOptions& options,
                    std::unique_ptr<Nic>* out);
  ~Nic() override;
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  const Capabilities& capabilities() const { return capabilities_; }
  std::string provider_name() const { return "verbs"; }
  NicInfo info() const {
    NicInfo info = description_;
    info.up = up_.load(std::memory_order_relaxed);
    info.state = state_.load(std::memory_order_relaxed);
    describe_ordering(&info);
    return info;
  }

  Error register_memory(const MemorySpan& span, MemoryKey* key);
  Error deregister_memory(const MemoryKey& key);

  Error open_path(const te_nic_address& remote, uint64_t generation, PathId* path);
  void close_path(PathId path);
  Error reset_path(PathId path);

  PostResult post(std::span<const WorkRequest> requests);
  PostResult post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context);
  uint32_t poll(std::span<Completion> out);

  int wait_fd() const { return wait_fd_; }
  bool arm();

 private:
  static constexpr uint32_t kBatch = 32;
  static constexpr uint32_t kNone = ~0u;
  // In MemoryKey::local_key, above the device's 32 bits: this processor cannot be relied on to read the memory, so nothing of it
  // may be copied into a work request.
  static constexpr uint64_t kFarMemory = uint64_t{1} << 32;

  // The send queue of a reliable queue pair. Work requests of one queue complete in the order posted, so only some are signalled: the
  // completion of one ends all before it. Positions only grow; `contexts` is indexed by position & mask.
  struct Queue {
    Owned<ibv_qp> pair;
    std::unique_ptr<WorkContext*[]> contexts;
    uint32_t mask = 0;
    uint32_t depth = 0;           // work requests that it may hold: one place is kept for a marker
    uint32_t head = 0, tail = 0;  // oldest not yet reported, next to post
    uint32_t inline_bytes = 0;
    uint32_t sequence = 0;        // first packet sequence number
    uint32_t connection = kNone;  // kNone: its connection is gone, it only drains
    bool marker_due = false;      // its last request is not signalled
    bool failed = false;
    bool bound = false;           // it may have received something
    bool receives_ended = false;  // in the error state, and the device has taken its last receive
    int64_t dying_since_ns = 0;
    uint64_t buried_at = 0;  // not 0: once the completion queue has been found empty so many times
  };
  struct Connection {
    uint32_t queues[kPairs] = {kNone, kNone};
  };

  // A datagram on its way.
  struct Parcel {
    uint8_t* data = nullptr;
    Owned<ibv_ah> handle;
    NicAddress to;
    bool resolving = false;
  };

  Nic(const Library& library, const Port& port, const ProviderOptions& options);

  // Set-up, in this order.
  Error open_device();
  Error open_queues();
  void find_inline_bytes();
  Error open_bootstrap();
  void describe_capabilities();
  Error fail(const char* what, int code) const;

  // memory.cc
  ibv_mr* register_relaxed(const std::function<ibv_mr*(int)>& attempt);
  void describe_ordering(NicInfo* info) const;
  Error check_dmabuf(const MemorySpan& span) const;
  Error registration_failed(const MemorySpan& span, int code) const;

  // connections.cc: Effects
  bool make(uint32_t connection, QueuePairs* ours) override;
  bool bind(uint32_t connection, const NicAddress& remote, const QueuePairs& theirs) override;
  void destroy(uint32_t connection) override;
  void up(uint32_t connection) override;
  void down(uint32_t connection, Loss loss) override;
  uint32_t make_queue(uint8_t kind, uint32_t connection);
  bool bind_queue(Queue& queue, uint8_t kind, const NicAddress& remote, const QueuePairs& theirs);
  void flush_queue(Queue& queue);
  void bury(uint32_t queue);
  void reap(int64_t now);
  void fill_route(const NicAddress& remote, ibv_ah_attr* attributes) const;
  void forget_events(uint32_t connection);

  // bootstrap.cc
  void send(const NicAddress& to, const HandshakeMessage& message) override;
  bool post_parcel_receive(uint32_t index);
  uint32_t post_parcels();
  uint32_t poll_bootstrap();

  // datapath.cc
  Queue* queue_for(const WorkRequest& request, PostResult* result);
  void prepare_chain();
  uint32_t build(Queue& queue, uint32_t id, std::span<const WorkRequest> requests);
  uint32_t post_chain(Queue& queue, uint32_t count, PostResult* result);
  void post_marker(Queue& queue, uint32_t id);
  bool translate(const ibv_wc& entry, std::span<Completion> out, uint32_t* count);
  bool translate_sent(const ibv_wc& entry, std::span<Completion> out, uint32_t* count);
  bool translate_received(const ibv_wc& entry, Completion* out);
  void note_traffic(uint32_t queue_pair);
  void refill_immediates();
  void serve(int64_t now);

  // events.cc
  Error open_sleep();
  void take_async_events();
  void set_state(const char* trouble);
  void check_address();
  void bootstrap_failed();
  void drain_channel();

  const Library& library_;
  const ProviderOptions options_;
  const Port port_;
  NicInfo description_;
  Capabilities capabilities_;
  std::atomic<bool> up_{true};
  std::atomic<const char*> state_{""};
  std::atomic<int> relaxed_refusal_{
      0};               // errno with which relaxed ordering was refused; -1: the library cannot ask for it
  bool fatal_ = false;  // the device, or a queue that all connections share, is lost for good
  ibv_device_attr device_{};
  ibv_port_attr port_attributes_{};
  ibv_mtu mtu_ = IBV_MTU_1024;
  NicAddress own_;

  // In the order of creation, so that they go in the reverse order.
  Owned<ibv_context> context_;
  Owned<ibv_pd> domain_;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> completions_, bootstrap_completions_;
  Owned<ibv_srq> message_receives_, immediate_receives_;
  std::unique_ptr<uint8_t[]> parcel_memory_;
  Owned<ibv_mr> parcel_registration_;
  Owned<ibv_qp> bootstrap_;
  std::vector<Parcel> outgoing_, incoming_;
  std::vector<uint32_t> free_parcels_;
  std::unique_ptr<Resolver> resolver_;

  std::unique_ptr<Switchboard> switchboard_;
  std::vector<Connection> connections_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<uint32_t> free_queues_;
  std::vector<uint32_t> dying_, markers_due_;
  std::unordered_map<uint32_t, uint32_t> connection_by_pair_;  // queue pair number to connection
  uint64_t empty_polls_ = 0;                                   // how often the completion queue was found empty
  std::deque<Completion> events_;                              // kPathUp and kPathDown not yet handed out

  QueueSizes sizes_;
  uint32_t inline_bytes_ = 0;
  uint32_t receives_posted_ = 0, immediates_missing_ = 0;
  int64_t served_ns_ = 0;
  uint32_t polls_since_served_ = 0;
  uint32_t entry_count_ = 0, entry_next_ = 0;  // of entries_: read, and handed out
  ibv_wc entries_[kBatch];
  ibv_send_wr requests_[kBatch];
  ibv_sge pieces_[kBatch];
  int wait_fd_ = -1;
};

}  // namespace te::cx7
#endif
