// Makes address handles in a thread of its own. On RoCE the kernel asks the network for the MAC address that belongs to a GID when a handle is
// made, and waits for a second and more when the host is off or the cable is out. The worker must not stand still for that: it serves
// all other peers, which would take it for dead.
//
// ask(), take() and all else run in the worker's thread; only run() does not.
#pragma once

#include "cx7/library.h"

#ifdef TE_HAVE_VERBS
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace te::cx7 {

class Resolver {
 public:
  struct Answer {
    uint32_t parcel = 0;
    ibv_ah* handle = nullptr;  // nullptr: there is no way to it now
  };

  Resolver(const Library& library, ibv_pd* domain) : library_(library), domain_(domain) {}
  ~Resolver();  // waits for the handle that is being made
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  Error start();
  void ask(uint32_t parcel, const ibv_ah_attr& route);
  bool has_answers() const { return answered_.load(std::memory_order_acquire) != 0; }
  bool take(Answer* out);
  int fd() const { return fd_; }  // readable when there are answers

 private:
  struct Request {
    uint32_t parcel = 0;
    ibv_ah_attr route{};
  };

  void run();
  Request next();
  void note(const ibv_ah_attr& route, bool slow);

  const Library& library_;
  ibv_pd* const domain_;
  std::mutex mutex_;  // requests_, answers_, ending_
  std::condition_variable wake_;
  std::deque<Request> requests_;
  std::deque<Answer> answers_;
  bool ending_ = false;
  std::atomic<uint32_t> answered_{0};  // answers_.size(), to be read without the lock
  std::vector<ibv_ah_attr> slow_;      // the thread's: where the last handle took long or was not to be had
  int fd_ = -1;
  std::thread thread_;
};

}  // namespace te::cx7
#endif
