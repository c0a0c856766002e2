// Sleeping. efa and ofi_rxm: libfabric's wait object. Native tcp: the provider's own epoll descriptor. shm: our doorbell
// (doorbell.h).
#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "efa/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {
namespace {

bool listens_at(int fd, const te_nic_address& address) {
  int listening = 0;
  socklen_t length = sizeof listening;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || listening == 0) return false;
  sockaddr_storage bound{};
  length = sizeof bound;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) return false;
  return length == address.length && std::memcmp(&bound, address.bytes, length) == 0;
}

// Does this epoll instance watch the socket that listens at `address`?
bool watches(const char* epoll_fd, const te_nic_address& address) {
  FILE* info = std::fopen(format("/proc/self/fdinfo/%s", epoll_fd).c_str(), "re");
  if (info == nullptr) return false;
  char line[256];
  bool found = false;
  while (!found && std::fgets(line, sizeof line, info) != nullptr) {
    int target = -1;
    found = std::sscanf(line, "tfd: %d", &target) == 1 && listens_at(target, address);
  }
  std::fclose(info);
  return found;
}

// shm: how long after the last sign of activity an unanswered request keeps us awake.
constexpr int64_t kUnsettledNs = 20'000'000;
constexpr uint32_t kStalledPolls = 256;

}  // namespace

// The wait object of native tcp is of no use: with FI_WAIT_FD every completion signals it and nothing ever takes the
// signal back (1.17's fi_trywait does nothing), so that after the first one poll(2) returns at once for ever. But all
// sockets of the provider hang in one level-triggered epoll instance, which is itself a descriptor that one can sleep
// on, without the cost of a signal per completion. It is known by watching the socket that listens at our address; if
// a version arranges it otherwise, there is none, and the engine polls. -1: none.
int find_progress_fd(const te_nic_address& address) {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return -1;
  int found = -1;
  while (const dirent* entry = found < 0 ? readdir(directory) : nullptr) {
    char target[64] = {};
    if (readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1) <= 0) continue;
    if (std::strcmp(target, "anon_inode:[eventpoll]") == 0 && watches(entry->d_name, address))
      found = std::atoi(entry->d_name);
  }
  closedir(directory);
  return found;
}

// Between the look into the queue and the sleep nothing is lost: the doorbell by the argument in doorbell.h, the epoll
// instance because it is level-triggered (reading the queue has run the sockets dry), a wait object by fi_trywait.
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
  if (!waits_on_queue_) return true;
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
  return (in_flight_ == 0 && !refused_) || now_ns() - quiet_since_ns_ >= kUnsettledNs;
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
