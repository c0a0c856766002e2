// One NIC: a libfabric fabric, domain, address vector, completion queue and endpoint. nic.cc sets it up and takes it
// down, memory.cc registers memory, datapath.cc posts and polls, sleep.cc waits.
//
// register_memory and deregister_memory run in any thread (the domain is FI_THREAD_SAFE); all else in the worker's.
#pragma once

#include "efa/selection.h"

#ifdef TE_HAVE_LIBFABRIC
#include <atomic>
#include <map>
#include <mutex>

#include "efa/doorbell.h"
#include "efa/gate.h"
#include "efa/objects.h"
#include "efa/probe.h"
#include "efa/receive_pool.h"

namespace te::efa {

class Nic {
 public:
  static Error open(const Library& library, Kind kind, Selected selected, const ProviderOptions& options,
                    std::unique_ptr<Nic>* out);
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  const Capabilities& capabilities() const { return capabilities_; }
  NicInfo info() const {
    NicInfo info = description_;
    info.up = up_.load(std::memory_order_relaxed);
    info.ordering_reason = "left to libfabric's provider";
    return info;
  }
  std::string provider_name() const { return info_->fabric_attr->prov_name; }

  Error register_memory(const MemorySpan& span, MemoryKey* key);
  Error deregister_memory(const MemoryKey& key);

  Error open_path(const te_nic_address& remote, uint64_t generation, PathId* path);
  void close_path(PathId path);
  Death death_of(PathId path);

  PostResult post(std::span<const WorkRequest> requests);
  PostResult post_receive(void* buffer, uint64_t length, uint64_t local_key, WorkContext* context);
  uint32_t poll(std::span<Completion> out);

  int wait_fd() const { return wait_fd_; }
  bool arm();
  void ring_doorbells();

 private:
  static constexpr size_t kBatch = 32;  // completions read at once; more showed no gain
  static constexpr uint32_t kNoIndex = ~0u;

  struct Path {
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    uint32_t in_flight = 0;
    bool open = false;
    bool dirty = false;  // in dirty_: posted to since the last ring_doorbells()
    PeerDoorbell* bell = nullptr;
    te_nic_address remote{};
    ConnectProbe probe;  // tcp
  };

  // Of the address vector. efa has each address once: inserted again it gives the same handle, and the first removal
  // takes it away from under all paths. So they are counted.
  struct Known {
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    uint32_t paths = 0;
  };

  // shm: an address that was inserted stays, because removing it while the peer still sends ends in SIGSEGV at our next
  // poll (1.17, measured). Names are never used twice, so it can do no harm but fill the table.
  struct ShmPeer {
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    std::unique_ptr<PeerDoorbell> bell;
    uint32_t paths = 0;
  };

  Nic(const Library& library, Kind kind, Selected selected, const ProviderOptions& options);

  // Set-up, in this order.
  Error open_domain();
  Error open_queue(bool want_wait_fd);
  Error open_endpoint();
  Error try_endpoint(InfoPtr info);
  Error read_address();
  Error open_receives();
  Error open_empty_range();
  Error describe_capabilities();
  Error fail(const char* what, int64_t status) const;

  Error check_dmabuf(const MemorySpan& span) const;
  Error open_region(const MemorySpan& span, FidPtr<fid_mr>* out);
  Error insert_address(const te_nic_address& remote, fi_addr_t* handle);
  Error share_address(const te_nic_address& remote, fi_addr_t* handle);
  void leave_address(const te_nic_address& remote);
  Error insert_shm(const te_nic_address& remote, Path* path);
  void forget_dead_shm_peers();
  std::string_view address_text() const;

  ssize_t post_one(const WorkRequest& request, Path& path);
  void remember_post(const WorkRequest& request, Path& path);
  void touch(Path& path);
  uint32_t read_queue(std::span<Completion> out);
  uint32_t read_error(Completion* out);
  bool translate(const fi_cq_data_entry& entry, Completion* out);
  void account(Completion* out);
  bool settled();
  void ring_stalled();

  const Library& library_;
  const Kind kind_;
  const ProviderOptions options_;
  const std::string node_;
  const bool may_emulate_;
  InfoPtr info_;
  NicInfo description_;
  std::atomic<bool> up_{true};  // false once the completion queue itself has failed
  Capabilities capabilities_;

  Gate gate_;
  std::mutex memory_mutex_;  // guards objects_.memory
  std::byte no_bytes_[64]{};
  Objects objects_;
  std::string shm_name_;  // of our endpoint, once it is registered among those of this process

  // Worker thread only.
  fid_ep* endpoint_ = nullptr;  // objects_.endpoint
  fid_cq* queue_ = nullptr;     // objects_.queue
  std::vector<Path> paths_;
  std::vector<uint32_t> free_paths_, dirty_;
  std::map<std::string, Known, std::less<>> known_;  // but for shm
  std::map<std::string, ShmPeer, std::less<>> shm_peers_;
  uint64_t write_flags_ = 0, send_flags_ = 0;
  bool scratch_is_ours_ = true;       // libfabric does not want the scratch memory: it holds the path
  bool flush_more_ = false;           // FI_MORE means something to this provider
  void* empty_descriptor_ = nullptr;  // FI_MR_LOCAL: of no_bytes_, for ranges of length 0 that have none
  uint32_t in_flight_ = 0;            // towards open paths
  bool refused_ = false;              // the last post was
  uint64_t activity_ = 0;             // posts, refusals and completions so far
  uint64_t seen_activity_ = 0;
  int64_t quiet_since_ns_ = 0;
  uint32_t idle_polls_ = 0;
  int wait_fd_ = -1;             // owned by libfabric or by doorbell_
  bool waits_on_queue_ = false;  // wait_fd_ is the queue's wait object
  std::unique_ptr<Doorbell> doorbell_;
  std::unique_ptr<ReceivePool> receives_;  // only where immediates use up receives
  uint32_t stash_count_ = 0, stash_next_ = 0;
  Completion stash_[kBatch];  // found by arm(), handed out by the next poll()
};

// sleep.cc
int find_progress_fd(const te_nic_address& address);

}  // namespace te::efa
#endif
