// Copies between GPU memory and pinned host memory, on a thread of its own: the driver may hold up a caller for milliseconds (while it
// loads a module, say), which the engine's worker must not feel.
//
// One consumer: submit and next are called by one thread. Jobs of one device and direction are done in the order submitted, on one
// stream; `next` gives them in the order in which they ended.
//
// The job is handed over through a ring and comes back through another, so each is one thread's at a time. The rings hold as many as
// there may be jobs: neither side ever waits for room.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "native/gpu/cuda.h"
#include "native/ring.h"
#include "native/status.h"

namespace te::gpu {

struct CopyJob {
  bool to_device = false;
  int device = 0;
  uint64_t address = 0;    // on the device
  uint64_t anchor = 0;     // where the allocation was looked at when it was registered
  uint64_t buffer_id = 0;  // that must still be there; 0: not checked
  void* host = nullptr;    // pinned
  uint64_t length = 0;
  // Filled in by the copier.
  Status status = Status::kOk;  // kRegistration: the memory was freed; kTransport: the device failed
  int code = 0;                 // CuResult
};

class Copier {
 public:
  // `wake` is called from the copier's thread after a job has ended.
  static Error open(const Cuda& cuda, uint32_t most_jobs, std::function<void()> wake, std::unique_ptr<Copier>* out);
  ~Copier();  // finishes what was submitted
  // Before its first job. Any thread.
  Error add_device(int device);

  void submit(CopyJob* job);
  CopyJob* next();  // null: none has ended

 private:
  struct Lane;  // one device and direction
  Copier(const Cuda& cuda, uint32_t most_jobs, std::function<void()> wake);
  void run();
  void start(CopyJob* job);
  void end(CopyJob* job, Status status, CuResult code);
  bool collect();

  const Cuda& cuda_;
  const std::function<void()> wake_;
  Ring<CopyJob*> jobs_, ended_;
  std::atomic<uint32_t> rung_{0};  // futex: grows with each job, and at the end
  std::atomic<uint32_t> asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // lanes_ against add_device
  std::map<std::pair<int, bool>, std::unique_ptr<Lane>> lanes_;
  uint32_t under_way_ = 0;  // of the thread
  std::thread thread_;
};

}  // namespace te::gpu
