// Sleeping: libfabric's wait object where the provider has one, our doorbell (doorbell.h) for shm.
#include "efa/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {
namespace {

// shm: how long after the last sign of activity an unanswered request keeps us awake.
constexpr int64_t kUnsettledNs = 20'000'000;
constexpr uint32_t kStalledPolls = 256;

}  // namespace

bool Nic::arm() {
  if (stash_count_ > 0) return false;
  if (doorbell_ != nullptr) doorbell_->arm();
  stash_next_ = 0;
  stash_count_ = read_queue(stash_);
  if (doorbell_ != nullptr) {
    if (stash_count_ == 0 && settled()) return true;
    doorbell_->disarm();
    return false;
  }
  if (stash_count_ > 0 || wait_fd_ < 0) return false;
  fid* objects[] = {&queue_->fid};
  return fi_trywait(objects_.fabric.get(), objects, 1) == FI_SUCCESS;
}

// A peer rings for what it posts, not for the answers that its polling gives to our requests: it does not know whom it
// has answered. So we stay awake while requests are in flight, until nothing has moved for a while; then the peer is
// dead or stopped, and an answer that comes after all is found at the engine's next tick.
bool Nic::settled() {
  if (activity_ != seen_activity_) {
    seen_activity_ = activity_;
    quiet_since_ns_ = now_ns();
  }
  return in_flight_ == 0 || now_ns() - quiet_since_ns_ >= kUnsettledNs;
}

void Nic::ring_doorbells() {
  if (dirty_.empty()) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // P2 of doorbell.h
  for (const uint32_t index : dirty_) {
    Path& path = paths_[index];
    path.dirty = false;
    if (path.bell != nullptr) path.bell->ring_if_sleeping();
  }
  dirty_.clear();
}

// A large write without process_vm_readv takes several steps of both sides, and only the first was rung for: a peer that
// went back to sleep in between is rung again. No fence: this repeats.
void Nic::ring_stalled() {
  if (++idle_polls_ % kStalledPolls != 0) return;
  for (Path& path : paths_) {
    if (path.open && path.in_flight > 0 && path.bell != nullptr) path.bell->ring_if_sleeping();
  }
}

}  // namespace te::efa
#endif
