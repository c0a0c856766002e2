#include "efa/doorbell.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace te::efa {
namespace {

constexpr char kDirectory[] = "/dev/shm/";
constexpr char kPageSuffix[] = ".bell";
constexpr char kFifoSuffix[] = ".ring";
constexpr std::string_view kNamePrefix = "te-";

std::string path_of(std::string_view endpoint, const char* suffix) {
  return kDirectory + std::string(endpoint) + suffix;
}

Error failure(const char* what, const std::string& path) {
  return Error(Status::kTransport, format("shm doorbell: cannot %s %s: %s", what, path.c_str(), std::strerror(errno)),
               errno);
}

// Null when there is none, or not one of ours.
MappedPage map_page(const std::string& path, bool writable) {
  const int fd = open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return {};
  struct stat status{};
  void* address = MAP_FAILED;
  // A page that is too short would turn the first access into SIGBUS.
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
      status.st_size >= static_cast<off_t>(sizeof(DoorbellPage))) {
    address = mmap(nullptr, sizeof(DoorbellPage), writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (address == MAP_FAILED) return {};
  MappedPage page(static_cast<DoorbellPage*>(address));
  if (page->magic.load(std::memory_order_acquire) != DoorbellPage::kMagic) return {};
  return page;
}

std::vector<std::string> list_directory() {
  std::vector<std::string> names;
  DIR* directory = opendir(kDirectory);
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory)) names.emplace_back(entry->d_name);
  closedir(directory);
  return names;
}

// Removes page, FIFO and libfabric's segment ("NAME:0:0") of every endpoint whose process is proven to have ended.
void sweep() {
  const std::vector<std::string> names = list_directory();
  for (const std::string& name : names) {
    if (!name.starts_with(kNamePrefix) || !name.ends_with(kPageSuffix)) continue;
    const MappedPage page = map_page(kDirectory + name, false);
    if (!page || !has_ended(page->owner)) continue;
    const std::string endpoint = name.substr(0, name.size() - std::strlen(kPageSuffix));
    for (const std::string& other : names) {
      if (other.starts_with(endpoint + ":")) unlink((kDirectory + other).c_str());
    }
    unlink(path_of(endpoint, kFifoSuffix).c_str());
    unlink(path_of(endpoint, kPageSuffix).c_str());
  }
}

}  // namespace

std::string_view segment_name(std::string_view address) {
  if (const size_t scheme = address.find("://"); scheme != std::string_view::npos) address.remove_prefix(scheme + 3);
  return address.substr(0, address.find('\0'));
}

std::string_view endpoint_name(std::string_view address) {
  address = segment_name(address);
  address = address.substr(0, address.find(':'));
  const bool ours = address.starts_with(kNamePrefix) && address.find('/') == std::string_view::npos;
  return ours ? address : std::string_view();
}

MappedPage::~MappedPage() {
  if (page_ != nullptr) munmap(page_, sizeof(DoorbellPage));
}

Error Doorbell::open(std::string_view endpoint, std::unique_ptr<Doorbell>* out) {
  sweep();
  std::unique_ptr<Doorbell> bell(new Doorbell);
  const std::string page = path_of(endpoint, kPageSuffix), fifo = path_of(endpoint, kFifoSuffix);
  if (mkfifo(fifo.c_str(), 0600) != 0) return failure("create", fifo);
  bell->fifo_path_ = fifo;
  // Open for both directions: with a writer of its own it neither reports end of file nor refuses peers.
  bell->fifo_ = ::open(fifo.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (bell->fifo_ < 0) return failure("open", fifo);

  const int fd = ::open(page.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return failure("create", page);
  bell->page_path_ = page;
  void* address = MAP_FAILED;
  if (ftruncate(fd, sizeof(DoorbellPage)) == 0) {
    address = mmap(nullptr, sizeof(DoorbellPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  const int reason = errno;
  close(fd);
  errno = reason;
  if (address == MAP_FAILED) return failure("map", page);
  bell->page_ = MappedPage(static_cast<DoorbellPage*>(address));
  bell->page_->owner = this_process();
  bell->page_->magic.store(DoorbellPage::kMagic, std::memory_order_release);
  *out = std::move(bell);
  return {};
}

Doorbell::~Doorbell() {
  if (page_) mark_closed();
  if (fifo_ >= 0) close(fifo_);
  if (!fifo_path_.empty()) unlink(fifo_path_.c_str());
  if (!page_path_.empty()) unlink(page_path_.c_str());
}

void Doorbell::arm() {
  armed_ = true;
  page_->sleeping.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// A ring that arrives after the drain is harmless: the next sleep ends at once.
void Doorbell::wake() {
  armed_ = false;
  page_->sleeping.store(0, std::memory_order_relaxed);
  char rings[256];
  while (read(fifo_, rings, sizeof rings) == static_cast<ssize_t>(sizeof rings)) {
  }
}

PeerDoorbell::PeerDoorbell(std::string_view endpoint) {
  if (endpoint.empty()) return;
  page_ = map_page(path_of(endpoint, kPageSuffix), true);
  fifo_path_ = path_of(endpoint, kFifoSuffix);
}

PeerDoorbell::~PeerDoorbell() {
  if (fifo_ >= 0) close(fifo_);
}

bool PeerDoorbell::same_process() const {
  if (!page_) return false;
  const ProcessIdentity self = this_process();
  return page_->owner.pid == self.pid && page_->owner.pid_namespace == self.pid_namespace;
}

// The first of several posters takes the word and rings for all of them.
void PeerDoorbell::ring() {
  if (page_->sleeping.exchange(0, std::memory_order_relaxed) == 0) return;
  // Open for both directions: while we hold a reading end too, the peer's death cannot turn a ring into SIGPIPE.
  if (fifo_ < 0) fifo_ = open(fifo_path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
  if (fifo_ < 0) return;  // the peer closed meanwhile
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = write(fifo_, &byte, 1);  // full: it has been rung already
}

}  // namespace te::efa
