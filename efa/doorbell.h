// How a NIC of the shm transport sleeps: libfabric's provider has no wait object (FI_WAIT_FD gives ENOSYS), so each NIC
// keeps a page in /dev/shm that says whether it sleeps, and a FIFO that wakes it. Peers write into the FIFO only when
// the page says so: traffic between processes that are awake costs one load of a word, and no system call.
//
// No wake-up is lost (Dekker's argument). The sleeper: S1 sleeping = 1; S2 fence; S3 look into the queues once more;
// S4 sleep on the FIFO. The poster: P1 put work into the sleeper's queue; P2 fence; P3 read sleeping, ring if it is 1.
// Both fences are sequentially consistent, hence totally ordered: if S2 comes first, P3 reads 1 and rings; if P2 comes
// first, S3 sees the work. A ring before S4 stays in the FIFO, so S4 returns at once.
//
// A peer that has died or has no page is never rung and never waited for. All calls come from the worker thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "efa/process.h"
#include "native/status.h"

namespace te::efa {

// Layout of the page: a contract between processes that may run different builds.
struct alignas(64) DoorbellPage {
  static constexpr uint64_t kMagic = 0x31'6c'6c'65'62'2d'65'74;  // "te-bell1"
  std::atomic<uint64_t> magic;                                   // stored last, with release: the rest is valid then
  ProcessIdentity owner;
  alignas(64) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> closed;  // the endpoint is gone or going: nothing may be posted to it any more
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(DoorbellPage) == 128);

// The name of an shm endpoint ("te-...") inside libfabric's address of it ("fi_shm://te-...:0:0"), empty for others.
std::string_view endpoint_name(std::string_view address);

// The file in /dev/shm that libfabric keeps for that endpoint.
std::string_view segment_name(std::string_view address);

// A page mapped for as long as the object lives.
class MappedPage {
 public:
  MappedPage() = default;
  explicit MappedPage(DoorbellPage* page) : page_(page) {}
  ~MappedPage();
  MappedPage(MappedPage&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  MappedPage& operator=(MappedPage&& other) noexcept {
    std::swap(page_, other.page_);
    return *this;
  }
  DoorbellPage* operator->() const { return page_; }
  explicit operator bool() const { return page_ != nullptr; }

 private:
  DoorbellPage* page_ = nullptr;
};

// A NIC's own doorbell. Opening one sweeps what dead processes of this user left behind, libfabric's files included.
class Doorbell {
 public:
  static Error open(std::string_view endpoint, std::unique_ptr<Doorbell>* out);
  ~Doorbell();

  int fd() const { return fifo_; }
  // S1 and S2 above.
  void arm();
  // Awake again. Costs a branch when not armed.
  void disarm() {
    if (armed_) [[unlikely]]
      wake();
  }
  void mark_closed() { page_->closed.store(1, std::memory_order_release); }

 private:
  Doorbell() = default;
  void wake();

  std::string page_path_, fifo_path_;
  MappedPage page_;
  int fifo_ = -1;
  bool armed_ = false;
};

// A peer's doorbell, which need not exist.
class PeerDoorbell {
 public:
  explicit PeerDoorbell(std::string_view endpoint);
  ~PeerDoorbell();
  PeerDoorbell(const PeerDoorbell&) = delete;
  PeerDoorbell& operator=(const PeerDoorbell&) = delete;

  // P3; the caller has executed P2 after the last post.
  void ring_if_sleeping() {
    if (page_ && page_->sleeping.load(std::memory_order_relaxed) != 0) [[unlikely]]
      ring();
  }
  bool closed() const { return page_ && page_->closed.load(std::memory_order_acquire) != 0; }
  bool same_process() const;
  bool proven_dead() const { return page_ && has_ended(page_->owner); }

 private:
  void ring();

  MappedPage page_;
  std::string fifo_path_;
  int fifo_ = -1;
};

}  // namespace te::efa
