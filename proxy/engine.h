// The engine: what callers' threads and the worker share, and the submitting half of every operation. One engine has one provider
// and one worker thread. Every public method may be called from any thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "native/free_list.h"
#include "native/provider.h"
#include "native/ring.h"
#include "proxy/coordination.h"
#include "proxy/group.h"
#include "proxy/inbox.h"
#include "proxy/peer.h"
#include "proxy/settings.h"
#include "proxy/staging.h"
#include "proxy/tables.h"

namespace te {

class Worker;
namespace gpu {
struct DeviceRange;
}

// Rings the worker out of its sleep.
//
// The worker, before sleeping: sleeping = true (seq_cst), then looks at the ring and the flags once more. A caller: pushes, then
// fence (seq_cst), then reads sleeping. In the total order of the two, either the worker sees the push or the caller sees it sleeping.
class Doorbell {
 public:
  Doorbell() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Doorbell() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!sleeping_.load(std::memory_order_relaxed)) return;
    const uint64_t one = 1;
    static_cast<void>(!write(fd_, &one, sizeof one));
  }
  void set_sleeping(bool value) { sleeping_.store(value, std::memory_order_seq_cst); }
  void drain() {
    uint64_t count;
    static_cast<void>(!read(fd_, &count, sizeof count));
  }

 private:
  const int fd_;
  std::atomic<bool> sleeping_{false};
};

class Engine {
 public:
  static Error open(const te_settings& settings, Engine** out);
  ~Engine();
  // kTimeout: some peer did not confirm that it has drained; everything is stopped all the same.
  Error close(int64_t timeout_ns);

  // kForked or kClosed, or ok. The first line of every entry point.
  Error check() const;
  int64_t timeout_or_default(int64_t timeout_ns) const {
    return timeout_ns < 0 ? settings_.values.default_timeout_ns : timeout_ns;
  }
  int64_t silence() const;               // of the worker, ns
  bool stuck() const { return stuck_; }  // it did not end: see close
  bool forked() const { return fork_generation() != fork_generation_; }

  Error register_region(MemorySpan span, te_handle* handle);
  Error register_staged(const MemorySpan& span, te_handle* handle);
  Error describe_reach(te_handle handle, te_region_info* out);
  static Error allocate_mapped(int device, uint64_t length, void** out);
  static void free_mapped(void* memory);
  Error describe_region(te_handle handle, te_region_descriptor* out);
  Error close_region(te_handle handle, int64_t timeout_ns);
  Error remote_region(const te_region_descriptor& descriptor, te_handle* handle);

  Error open_counter(te_handle* handle);
  Error describe_counter(te_handle handle, te_counter_descriptor* out);
  Error counter_value(te_handle handle, uint64_t* value);
  Error wait_counter(te_handle handle, uint64_t at_least, int64_t timeout_ns, std::span<const int32_t> peers);
  te_transfer* counter_reached(te_handle handle, uint64_t at_least, int64_t timeout_ns, std::span<const int32_t> peers,
                               Error* error);
  Error close_counter(te_handle handle, int64_t timeout_ns);
  Error remote_counter(const te_counter_descriptor& descriptor, te_handle* handle);

  Error peer(const te_address& address, int32_t* index);
  Peer* peer_at(int32_t index) const;  // null also once it was forgotten
  Error describe_peer(int32_t index, te_peer_info* out);
  te_transfer* peer_operation(OperationKind kind, int32_t index, int64_t timeout_ns, Error* error);

  te_transfer* write(const te_write_args& args, int64_t timeout_ns, Error* error);
  te_transfer* write_pages(const te_page_args& args, int64_t timeout_ns, Error* error);
  te_transfer* write_batch(std::span<const te_batch_entry> entries, int64_t timeout_ns, Error* error);
  te_transfer* send(int32_t peer, const void* data, uint64_t length, int64_t timeout_ns, Error* error);

  Error open_target(std::span<const te_target_member> members, int32_t place, te_handle* target);
  Error replace_member(te_handle target, uint32_t member, const te_target_member* value);
  Error close_target(te_handle target);
  te_transfer* scatter(const te_scatter_args& args, int64_t timeout_ns, Error* error);
  Error prepare_write(const te_write_args& args, te_handle* prepared);
  Error prepare_pages(const te_page_args& args, te_handle* prepared);
  Error prepare_scatter(const te_scatter_args& args, te_handle* prepared);
  te_transfer* post(te_handle prepared, int64_t timeout_ns, Error* error);
  Error close_prepared(te_handle prepared);
  void request_cancel();

  // GPU coordination: see proxy/coordination.h.
  Error open_flag(int32_t device, te_handle* flag);
  Error describe_flag(te_handle flag, te_flag_info* out);
  Error raise_flag(te_handle flag, uint64_t by);
  Error wait_flag(te_handle flag, uint64_t at_least, int64_t timeout_ns);
  Error clear_flag(te_handle flag);
  Error close_flag(te_handle flag);
  Error bind_counter(te_handle counter, te_handle flag, uint64_t every, std::span<const int32_t> peers,
                     te_handle* binding);
  Error close_binding(te_handle binding);
  Error open_watcher(int32_t device, te_handle* watcher);
  Error describe_watcher(te_handle watcher, te_watcher_info* out);
  Error add_to_watcher(te_handle watcher, uint64_t by);
  Error notify_watcher(te_handle watcher, bool on);
  Error take_watcher(te_handle watcher, uint64_t* before, uint64_t* now);
  Error close_watcher(te_handle watcher);
  Error open_trigger(const te_trigger_args& args, te_handle* trigger);
  Error describe_trigger(te_handle trigger, te_trigger_info* out);
  Error wait_trigger(te_handle trigger, uint64_t completed, int64_t timeout_ns);
  Error cancel_trigger(te_handle trigger);
  Error close_trigger(te_handle trigger);

  Error receive(int64_t timeout_ns, te_message* out);
  void release_message(te_message* message);

  Error describe(te_engine_info* out);
  Error describe_nic(uint32_t nic, te_nic_info* out);
  void statistics(te_stats* out);

  const Settings& settings() const { return settings_; }
  const te_address& address() const { return address_; }
  Events& events() { return events_; }
  Error inject(std::string_view command);

 private:
  friend class Worker;

  explicit Engine(const te_settings& settings);
  Error start();
  void release_provider();

  // Submission. take_operation waits while the slab is empty or the peer is at its cap, for a while (then kAgain) and at most until the deadline.
  Operation* take_operation(Peer* peer, int64_t deadline_ns, Error* error);
  Operation* try_operation(Peer* peer);                                    // null instead of waiting
  Operation* take_operation_patiently(int64_t deadline_ns, Error* error);  // never kAgain
  void give_back_operation(Operation* operation);
  te_transfer* submit(Operation* operation, Error* error);
  Error check_write(const te_write_args& args, Operation* out);
  Error check_pages(const te_page_args& args, Operation* out);
  Error check_ends(te_handle region, te_handle remote, te_handle counter, Operation* out, uint64_t* source_length,
                   uint64_t* target_length);
  void drop_claims(Operation* operation);
  Error copy_indices(const te_page_args& args, Operation* out, uint64_t source_length, uint64_t target_length);
  MemorySpan provider_span(const MemorySpan& span);
  Error register_everywhere(const MemorySpan& span, MemoryKey* keys);
  Error add_region(const MemorySpan& span, const gpu::DeviceRange& range, OwnedDescriptor dmabuf, const MemoryKey* keys,
                   Reach reach, te_handle* handle);
  // GPU memory: see engine_staging.cc.
  Error reach_device(MemorySpan* span, gpu::DeviceRange* range, OwnedDescriptor* dmabuf, Reach* reach);
  Error open_staging(const gpu::Cuda& cuda, int device);
  void close_staging(Staging& staging);
  static void free_staging(Staging& staging);
  static Error check_device_memory(const Region& region);
  te_transfer* finished_transfer(Error* error);
  PageList* take_page_list(uint64_t bytes);
  void retire_pages(Operation* op);
  void retire_page_list(PageList* list);
  // Peer groups: see proxy/group.h.
  static constexpr uint64_t kNoticeSerial = 1;  // of a region without bytes that every engine has
  Error check_member(const te_target_member& value, Member* out);
  Error tell_worker(OperationKind kind, Target* target, Prepared* prepared);
  Target* enter_target(te_handle handle);
  void recycle(Target* target);
  Flight* take_flight(Target& target);
  Flight* take_flight_patiently(Target& target, int64_t deadline_ns, Error* error);
  void give_back_flight(Flight* flight);
  Error fill_flight(const te_scatter_args& args, const Target& target, uint64_t source_length, Flight* flight);
  te_transfer* scatter_on(const te_scatter_args& args, Target& target, int64_t deadline_ns, Error* error);
  Error check_scatter(const te_scatter_args& args, Target& target);
  template <typename F>
  Error prepare(te_handle region, te_handle* handle, F&& check);
  template <typename F>
  Error keep_prepared(te_handle* handle, F&& fill);
  Prepared* enter_prepared(te_handle handle);
  void recycle(Prepared* prepared);
  te_transfer* post_prepared(Prepared& prepared, int64_t timeout_ns, Error* error);
  Error fill_prepared(Prepared& prepared, Operation* out);
  // GPU coordination.
  template <typename T>
  T* enter_shared(Table<T>& table, te_handle handle);  // null, or an open one that is to be left
  template <typename T>
  void leave_shared(T* entry) {
    if (entry->leave()) recycle(entry);
  }
  void recycle(Flag* flag);
  void recycle(Binding* binding);
  void recycle(Watcher* watcher);
  void recycle(Trigger* trigger);
  Error words_of(int32_t device, DeviceWords** out);
  Error make_words(int32_t device, std::unique_ptr<DeviceWords>* out);
  Error take_word(gpu::Words* gdr, gpu::Words& host, gpu::Word* word, gpu::Words** from);
  bool gdr_required() const { return settings_.values.gdr == TE_GDR_REQUIRE; }
  Error give_order(Order order);
  void abort_flags(uint64_t why);
  Error check_address(const te_address& address) const;
  Error find_or_add_peer(const te_address& address, int32_t* index);  // kExhausted without having swept
  void retire_peer(Peer* peer);
  Error no_peer(int32_t index) const;
  uint32_t live_peers() const;
  static Error check_fate(const Peer& peer);
  static Error stale(const Remote* entry, te_handle handle, const char* what);
  static Error check_usable(const Remote& remote, const char* what);
  // For the worker, on its control path.
  Region* region_by_serial(uint64_t serial);
  Counter* counter_by_serial(uint64_t serial);
  void forget_remote(const Remote& remote, bool is_region);
  template <typename T, typename F>
  te_handle find_or_add(Table<T>& table, std::unordered_map<std::string, te_handle>& known, int32_t peer,
                        uint64_t serial, F&& prepare);
  template <typename F>
  Error patiently(const te_address& owner, uint32_t capacity, const char* what, const char* setting, te_handle* handle,
                  F&& find);
  te_handle find_region(int32_t peer, uint64_t serial, uint64_t length);
  te_handle find_counter(int32_t peer, uint64_t serial);
  // What a handle that was given up (not closed) stood for; null when that is not known, or no room is left.
  RemoteRegion* revive(const RemoteRegion& former, te_handle handle);
  RemoteCounter* revive(const RemoteCounter& former, te_handle handle);
  void sweep(bool peers);
  Error wait_operation(te_transfer* transfer, int64_t timeout_ns);

  Settings settings_;
  const uint32_t fork_generation_;
  te_address address_{};
  // Shared by threads that call the provider, apart from the worker; exclusive for close, which takes it away.
  mutable std::shared_mutex provider_mutex_;
  static constexpr const char* kClosedEngine = "the engine is closed";
  std::unique_ptr<Provider> provider_;
  Capabilities capabilities_;
  uint32_t nic_count_ = 0;
  bool busy_polling_ = false;
  int32_t core_ = -1;

  Table<Region> regions_;
  Table<Counter> counters_;
  Table<RemoteRegion> remote_regions_;
  Table<RemoteCounter> remote_counters_;
  static constexpr uint32_t kMaxTargets = 1u << 14, kMaxPrepared = 1u << 16;
  Table<Target> targets_{kMaxTargets};
  Table<Prepared> prepared_{kMaxPrepared};
  Region* notice_region_ = nullptr;  // kNoticeSerial
  te_handle notice_handle_ = TE_NONE;
  std::atomic<uint64_t> next_serial_{1};
  alignas(64) uint8_t placeholder_[64] = {};  // behind regions of no bytes
  std::mutex serials_mutex_;
  std::unordered_map<uint64_t, te_handle> region_by_serial_, counter_by_serial_;  // handles

  mutable std::mutex peers_mutex_;
  std::unordered_map<std::string, int32_t> peer_by_key_;  // identity and generation
  std::unique_ptr<std::atomic<Peer*>[]> peers_;
  // A peer's index is its slot and how often that was used before, so that an index which somebody kept never means another peer.
  static constexpr uint32_t kPeerSlotBits = 16, kPeerSlotMask = (1u << kPeerSlotBits) - 1, kPeerReuseMask = 0x7FFF;
  uint32_t peer_capacity_ = 0;
  std::atomic<uint32_t> peer_count_{0};                   // slots ever used
  std::deque<std::pair<uint32_t, uint32_t>> free_peers_;  // slot and reuse; peers_mutex_
  std::vector<std::unique_ptr<Peer>> retired_peers_;      // others may still look at their addresses
  std::unordered_map<std::string, te_handle> remote_region_by_key_,
      remote_counter_by_key_;  // peer index and serial; remotes_mutex_
  std::mutex remotes_mutex_;

  std::unique_ptr<Operation[]> slab_;
  std::unique_ptr<Part[]> slab_parts_;
  FreeList free_operations_;
  Ring<Operation*> commands_;
  Doorbell doorbell_;
  std::atomic<uint32_t> submitting_{0};
  std::atomic<bool> closing_{false};
  std::atomic<bool> cancel_requested_{false};
  std::atomic<bool> credit_requested_{false};
  std::atomic<bool> sweep_requested_{false}, sweep_peers_too_{false};
  std::atomic<uint32_t> sweeps_{0};  // futex
  std::atomic<PageList*> retired_pages_{nullptr};
  std::mutex page_lists_mutex_;
  PageList* spare_pages_ = nullptr;

  std::mutex staging_mutex_;                // making it
  std::atomic<Staging*> staging_{nullptr};  // owned; constant once there
  std::atomic<const gpu::Cuda*> flusher_{nullptr};
  std::atomic<uint64_t> flush_devices_{0};  // mask of devices for which completions do not order what NICs wrote

  Coordination coordination_;
  Inbox inbox_;
  Events events_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint32_t> operations_in_use_{0};
  std::mutex close_mutex_;
  bool closed_ = false;
  bool stuck_ = false;
  std::unique_ptr<Worker> worker_;
};

template <typename T>
T* Engine::enter_shared(Table<T>& table, te_handle handle) {
  T* entry = table.peek(handle);
  bool last = false;
  if (entry != nullptr && entry->enter(handle, &last)) return entry;
  if (last) recycle(entry);
  return nullptr;
}

// Key of a map: identity and generation, or peer and serial.
std::string peer_key(const uint8_t* identity, uint64_t generation);

}  // namespace te
