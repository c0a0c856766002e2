#include "cx7/resolver.h"

#ifdef TE_HAVE_VERBS
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>

#include "native/system.h"

namespace te::cx7 {
namespace {

constexpr int64_t kSlow = 50'000'000;
constexpr size_t kMostSlow = 256;

bool same_way(const ibv_ah_attr& a, const ibv_ah_attr& b) {
  return a.dlid == b.dlid && a.is_global == b.is_global &&
         std::memcmp(a.grh.dgid.raw, b.grh.dgid.raw, sizeof a.grh.dgid.raw) == 0;
}

}  // namespace

Error Resolver::start() {
  fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd_ < 0) return Error(Status::kTransport, format("eventfd: %s", std::strerror(errno)), errno);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& failure) {
    return Error(Status::kTransport, format("cannot start the thread that resolves addresses: %s", failure.what()),
                 failure.code().value());
  }
  return {};
}

Resolver::~Resolver() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  for (const Answer& answer : answers_)
    if (answer.handle != nullptr) library_.destroy_ah(answer.handle);
  if (fd_ >= 0) ::close(fd_);
}

void Resolver::ask(uint32_t parcel, const ibv_ah_attr& route) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back({parcel, route});
  }
  wake_.notify_one();
}

bool Resolver::take(Answer* out) {
  const std::lock_guard lock(mutex_);
  if (answers_.empty()) {
    eventfd_t count;
    eventfd_read(fd_, &count);
    return false;
  }
  *out = answers_.front();
  answers_.pop_front();
  answered_.store(static_cast<uint32_t>(answers_.size()), std::memory_order_relaxed);
  return true;
}

// --- the thread ------------------------------------------------------------------------------------------------------------------

void Resolver::run() {
  pthread_setname_np(pthread_self(), "te-resolver");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the application's threads
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return ending_ || !requests_.empty(); });
    if (ending_) return;
    const Request request = next();
    lock.unlock();
    const int64_t begin = now_ns();
    ibv_ah_attr route = request.route;
    ibv_ah* handle = library_.create_ah(domain_, &route);
    note(request.route, handle == nullptr || now_ns() - begin > kSlow);
    lock.lock();
    answers_.push_back({request.parcel, handle});
    answered_.store(static_cast<uint32_t>(answers_.size()), std::memory_order_release);
    eventfd_write(fd_, 1);
  }
}

// In the order asked, but those that let wait last time wait now.
Resolver::Request Resolver::next() {
  const auto is_quick = [this](const Request& request) {
    return std::none_of(slow_.begin(), slow_.end(),
                        [&](const ibv_ah_attr& slow) { return same_way(slow, request.route); });
  };
  auto found = std::find_if(requests_.begin(), requests_.end(), is_quick);
  if (found == requests_.end()) found = requests_.begin();
  const Request request = *found;
  requests_.erase(found);
  return request;
}

void Resolver::note(const ibv_ah_attr& route, bool slow) {
  std::erase_if(slow_, [&](const ibv_ah_attr& known) { return same_way(known, route); });
  if (!slow) return;
  if (slow_.size() == kMostSlow) slow_.erase(slow_.begin());
  slow_.push_back(route);
}

}  // namespace te::cx7
#endif
