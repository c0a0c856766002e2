#include "native/gpu/copier.h"

#include <pthread.h>
#include <signal.h>

#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

#include "native/gpu/memory.h"
#include "native/system.h"

namespace te::gpu {
namespace {

constexpr int64_t kSpin = 50'000;             // ns without work before it sleeps
constexpr int64_t kNap = 100 * 1'000'000;     // ns: bounds the harm of a lost wake-up
constexpr uint32_t kQueriesBetweenJobs = 16;  // of one lane, so that new jobs are not kept waiting

}  // namespace

struct Copier::Lane {
  CuContext context = nullptr;
  CuStream stream = nullptr;
  std::vector<CuEvent> idle;
  std::deque<std::pair<CopyJob*, CuEvent>> under_way;
};

Copier::Copier(const Cuda& cuda, uint32_t most_jobs, std::function<void()> wake)
    : cuda_(cuda), wake_(std::move(wake)), jobs_(most_jobs), ended_(most_jobs) {}

Error Copier::open(const Cuda& cuda, uint32_t most_jobs, std::function<void()> wake, std::unique_ptr<Copier>* out) {
  std::unique_ptr<Copier> copier(new Copier(cuda, most_jobs, std::move(wake)));
  try {
    copier->thread_ = std::thread([c = copier.get()] { c->run(); });
  } catch (const std::system_error& failure) {
    return Error(Status::kConfig, format("cannot start the thread that copies: %s", failure.what()),
                 failure.code().value());
  }
  *out = std::move(copier);
  return {};
}

Copier::~Copier() {
  stop_.store(true, std::memory_order_seq_cst);
  rung_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&rung_);
  if (thread_.joinable()) thread_.join();
  for (auto& [key, lane] : lanes_) {
    const ContextScope scope(cuda_, lane->context);
    for (CuEvent event : lane->idle) static_cast<void>(cuda_.event_destroy(event));
    static_cast<void>(cuda_.stream_destroy(lane->stream));
  }
}

Error Copier::add_device(int device) {
  const std::lock_guard lock(mutex_);
  for (const bool to_device : {false, true}) {
    if (lanes_.contains({device, to_device})) continue;
    auto lane = std::make_unique<Lane>();
    if (Error e = primary_context(cuda_, device, &lane->context)) return e;
    const ContextScope scope(cuda_, lane->context);
    if (const CuResult code = cuda_.stream_create(&lane->stream, kStreamNonBlocking); code != result::kSuccess)
      return Error(Status::kRegistration, format("cuStreamCreate on cuda:%d: %s", device, cuda_.describe(code).c_str()),
                   code);
    lanes_.emplace(std::pair{device, to_device}, std::move(lane));
  }
  return {};
}

// Sleeping against submission: the thread reads rung_, says that it is asleep (seq_cst), looks at the ring once more and sleeps while
// rung_ is what it was. The other side pushes, raises rung_ (seq_cst) and then looks whether it is asleep. Either the thread sees the job,
// or it sees the raise in the futex call, or the other side sees it asleep and wakes it.
void Copier::submit(CopyJob* job) {
  while (!jobs_.push(job)) cpu_relax();  // only while a slot is being given back: see the top of the header
  rung_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&rung_);
}

CopyJob* Copier::next() {
  CopyJob* job = nullptr;
  return ended_.pop(&job) ? job : nullptr;
}

void Copier::run() {
  pthread_setname_np(pthread_self(), "te-copier");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ignore_captures(cuda_);
  int64_t last_work = now_ns();
  for (;;) {
    const uint32_t rung = rung_.load(std::memory_order_seq_cst);
    CopyJob* job = nullptr;
    bool worked = false;
    while (jobs_.pop(&job)) {
      start(job);
      worked = true;
    }
    worked |= collect();
    if (worked || under_way_ > 0) {
      last_work = now_ns();
      if (!worked) sched_yield();
      continue;
    }
    if (stop_.load(std::memory_order_seq_cst)) return;
    if (now_ns() - last_work < kSpin) {
      sched_yield();
      continue;
    }
    asleep_.store(1, std::memory_order_seq_cst);
    if (jobs_.empty()) futex_wait(&rung_, rung, kNap);
    asleep_.store(0, std::memory_order_relaxed);
  }
}

void Copier::start(CopyJob* job) {
  Lane* lane = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = lanes_.find({job->device, job->to_device});
    if (found != lanes_.end()) lane = found->second.get();
  }
  if (lane == nullptr) return end(job, Status::kTransport, result::kInvalidDevice);
  if (was_freed(cuda_, job->anchor, job->buffer_id)) return end(job, Status::kRegistration, result::kInvalidValue);
  const ContextScope scope(cuda_, lane->context);
  CuEvent event = nullptr;
  CuResult code = result::kSuccess;
  if (!lane->idle.empty()) {
    event = lane->idle.back();
    lane->idle.pop_back();
  } else {
    code = cuda_.event_create(&event, kEventDisableTiming);
  }
  if (code == result::kSuccess)
    code = job->to_device ? cuda_.copy_to_device(job->address, job->host, job->length, lane->stream)
                          : cuda_.copy_to_host(job->host, job->address, job->length, lane->stream);
  if (code == result::kSuccess) code = cuda_.event_record(event, lane->stream);
  if (code != result::kSuccess) {
    if (event != nullptr) lane->idle.push_back(event);
    static_cast<void>(
        cuda_.stream_synchronize(lane->stream));  // should the copy have begun, it does not outlive the job
    return end(job, Status::kTransport, code);
  }
  lane->under_way.emplace_back(job, event);
  ++under_way_;
}

// True: something has ended.
bool Copier::collect() {
  if (under_way_ == 0) return false;
  bool any = false;
  const std::lock_guard lock(mutex_);
  for (auto& [key, lane] : lanes_) {
    if (lane->under_way.empty()) continue;
    const ContextScope scope(cuda_, lane->context);
    for (uint32_t i = 0; i < kQueriesBetweenJobs && !lane->under_way.empty(); ++i) {
      const auto [job, event] = lane->under_way.front();
      const CuResult code = cuda_.event_query(event);
      if (code == result::kNotReady) break;
      lane->under_way.pop_front();
      lane->idle.push_back(event);
      --under_way_;
      end(job, code == result::kSuccess ? Status::kOk : Status::kTransport, code);
      any = true;
    }
  }
  return any;
}

void Copier::end(CopyJob* job, Status status, CuResult code) {
  job->status = status;
  job->code = code;
  while (!ended_.push(job)) cpu_relax();
  wake_();
}

}  // namespace te::gpu
