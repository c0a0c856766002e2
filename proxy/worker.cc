// The worker's loop, its sleep and its clock.
#include "proxy/worker.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>

#include <algorithm>

namespace te {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000 * kMillisecond;
constexpr int64_t kTick = 2 * kMillisecond;            // resolution of deadlines
constexpr int64_t kLongestSleep = 100 * kMillisecond;  // heartbeats are checked at least this often
constexpr int64_t kWatchedSleep = 100'000;             // a GPU's store rings no doorbell
constexpr unsigned long kTimerSlack = 1'000;           // ns; the kernel's default is half of that sleep
constexpr uint32_t kSendDepthReserve = 8;
constexpr int64_t kYieldEvery = 2'000;               // while idle and awake: others may need this core
constexpr int64_t kPatience = 5'000 * kMillisecond;  // with a worker that was asked to end, beyond its deadline

}  // namespace

Worker::Worker(Engine* engine)
    : engine_(*engine),
      provider_(*engine->provider_),
      capabilities_(engine->capabilities_),
      settings_(engine->settings_.values),
      nic_count_(engine->nic_count_),
      all_nics_((1u << engine->nic_count_) - 1),
      nics_up_(all_nics_),
      max_chunk_(std::min(engine->capabilities_.max_write_bytes,
                          settings_.chunk_bytes == 0 ? UINT64_MAX : settings_.chunk_bytes)),
      fragment_bytes_(std::min<uint32_t>(engine->capabilities_.max_send_bytes, 8192)),
      nics_(engine->nic_count_),
      buffers_(engine->provider_.get(), 0, fragment_bytes_),
      spare_operations_(settings_.operations),
      member_batches_(engine->nic_count_),
      flush_sink_(64),
      flush_keys_(engine->nic_count_) {
  for (NicState& nic : nics_) {
    nic.depth =
        settings_.nic_depth == 0 ? capabilities_.nic_depth : std::min(settings_.nic_depth, capabilities_.nic_depth);
    nic.depth = std::max(nic.depth, kSendDepthReserve);
  }
  if (const uint32_t entries = capabilities_.completion_depth; entries > 0) {
    const uint32_t own = std::min(nics_[0].depth + kSendDepthReserve, entries / 2);
    most_receives_ = immediate_budget_ = (entries - own) / 2;
  }
}

Worker::~Worker() {
  if (epoll_ >= 0) close(epoll_);
}

void Worker::deregister_memory() {
  for (uint32_t i = 0; i < flush_registered_; ++i)
    static_cast<void>(provider_.deregister_memory(i, flush_keys_[i]).ok());
  flush_registered_ = 0;
  buffers_.deregister();
}

Error Worker::start() {
  if (fragment_bytes_ < 512)
    return Error(Status::kConfig,
                 format("the provider sends at most %u bytes in a message; 512 are needed", fragment_bytes_));
  for (uint32_t i = 0; i < nic_count_ && capabilities_.reads; ++i)
    if (Error e =
            provider_.register_memory(i, {flush_sink_.data(), flush_sink_.size(), TE_DEVICE_HOST, 0}, &flush_keys_[i]))
      return e;
    else ++flush_registered_;
  receives_wanted_ = 32;  // for hellos of strangers
  if (Error e = buffers_.grow(64)) return e;
  post_receives();
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) return Error(Status::kConfig, "epoll_create1 failed: too many open files?", errno);
  std::vector<int> descriptors{engine_.doorbell_.fd()};
  for (uint32_t i = 0; i < nic_count_; ++i)
    if (const int fd = provider_.wait_fd(i); fd >= 0) descriptors.push_back(fd);
  for (const int fd : descriptors) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0)
      return Error(Status::kConfig, format("epoll_ctl failed for descriptor %d", fd), errno);
  }
  try {
    last_round_.store(now_ns(), std::memory_order_relaxed);
    thread_ = std::thread([this] {
      run();
      ended_.store(1, std::memory_order_release);
      futex_wake_all(&ended_);
    });
  } catch (const std::system_error& failure) {
    return Error(Status::kConfig, format("cannot start the worker thread: %s", failure.what()), failure.code().value());
  }
  return {};
}

Worker::End Worker::stop(int64_t deadline_ns) {
  if (!thread_.joinable()) return End::kClean;
  stop_deadline_.store(deadline_ns, std::memory_order_relaxed);
  stop_requested_.store(true, std::memory_order_seq_cst);
  engine_.doorbell_.ring();
  for (;;) {
    const int64_t left = deadline_after(deadline_ns, kPatience) - now_ns();
    if (ended_.load(std::memory_order_acquire) != 0) break;
    if (left <= 0) {
      thread_.detach();
      return End::kStuck;
    }
    futex_wait(&ended_, 0, left);
  }
  thread_.join();
  return clean_end_ ? End::kClean : End::kUnconfirmed;
}

void Worker::run() {
  pthread_setname_np(pthread_self(), "te-worker");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the application's threads
  if (engine_.core_ >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(engine_.core_), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0);
  now_ = last_tick_ = last_work_ = last_heartbeat_ = now_ns();
  int64_t last_yield = now_;
  for (;;) {
    const bool worked = round();
    now_ = now_ns();
    last_round_.store(now_, std::memory_order_relaxed);
    if (worked) {
      last_work_ = last_yield = now_;
    }
    if (now_ - last_tick_ >= kTick) tick();
    if (stopping_ && goodbye_finished()) break;
    if (worked || engine_.busy_polling_) continue;
    if (now_ - last_work_ > settings_.spin_ns && may_sleep()) {
      sleep();
      now_ = now_ns();  // commands that come now have deadlines from now on
      last_work_ = 0;   // one round after a wake-up, then sleep again unless there was work
    } else if (now_ - last_yield > kYieldEvery) {
      sched_yield();  // with fewer cores than spinning threads, the other side needs this one
      last_yield = now_;
    }
  }
  shut_down();
}

bool Worker::round() {
  polled_something_ = false;
  bool worked = take_commands();
  if (!engine_.coordination_.orders.maybe_empty()) worked |= take_orders();
  ++rounds_;
  bool all_empty = true;
  for (uint32_t i = 0; i < nic_count_; ++i) {
    const uint32_t count = poll_nic(i);
    polled_something_ |= count > 0;
    all_empty &= count < std::size(completions_) / 2;  // providers may give less than there is, but not by half
  }
  if (!with_untaken_.empty()) take_untaken(all_empty);
  worked |= polled_something_;
  if (staging_.copying > 0 || !staging_.ready.empty()) worked |= serve_staging();
  if (!watched_.empty()) worked |= look_at_watchers();
  if (!owed_.empty()) worked |= fire_triggers();
  bool posted = post_flights();
  for (size_t left = scheduled_.size(); left > 0; --left) {
    Peer* peer = scheduled_.pop_front();
    if (peer == nullptr) break;
    posted |= post_peer(*peer);
  }
  if (posted) provider_.ring_doorbells();
  bump(polls_);
  return worked || posted;
}

void Worker::schedule(Peer& peer) {
  if (!peer.scheduled_link.linked) scheduled_.push_back(&peer);
}

bool Worker::may_sleep() {
  // Completions of own work are not certain to raise a descriptor (shm), so the worker stays awake for them.
  if (total_in_flight_ > 0 || stopping_ || !with_untaken_.empty() || !flights_.empty() || staging_.copying > 0 ||
      !staging_.ready.empty())
    return false;
  for (uint32_t i = 0; i < nic_count_; ++i)
    if (provider_.wait_fd(i) < 0) return false;
  return true;
}

void Worker::sleep() {
  engine_.doorbell_.set_sleeping(true);
  bool safe = engine_.commands_.empty() && !stop_requested_.load(std::memory_order_seq_cst) &&
              !engine_.cancel_requested_.load(std::memory_order_seq_cst) &&
              !engine_.credit_requested_.load(std::memory_order_seq_cst) &&
              !engine_.sweep_requested_.load(std::memory_order_seq_cst) && engine_.coordination_.orders.empty() &&
              !watchers_changed();
  for (uint32_t i = 0; safe && i < nic_count_; ++i) safe = provider_.arm(i);
  if (safe) {
    int64_t timeout = sleep_timeout();
    if (timeout > 0) {
      if (watched_.empty()) timeout = (timeout + kMillisecond - 1) / kMillisecond * kMillisecond;  // not too early
      pollfd wake{epoll_, POLLIN, 0};
      const timespec bound{timeout / kSecond, timeout % kSecond};
      ppoll(&wake, 1, &bound, nullptr);
      bump(sleeps_);
    }
  }
  engine_.doorbell_.set_sleeping(false);
  engine_.doorbell_.drain();
}

int64_t Worker::sleep_timeout() {
  if (!watched_.empty()) return kWatchedSleep;
  if (!scheduled_.empty() || !closings_.empty() || !rekeying_.empty() || !doubted_.empty()) return kTick;
  int64_t until = std::min(now_ + kLongestSleep, next_deadline_);
  for (Peer* peer = known_.front(); peer != nullptr; peer = known_.next(peer))
    if (peer->state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING)
      until = std::min(until, peer->session.hello_at);
  return until - now_;
}

void Worker::tick() {
  // A worker that was itself stopped (SIGSTOP, a debugger, a starved machine) must not take its own absence for the peers' silence.
  const bool was_away = now_ - last_tick_ > std::max(settings_.peer_timeout_ns / 3, 2 * kLongestSleep);
  last_tick_ = now_;
  check_deadlines();
  if (engine_.cancel_requested_.exchange(false, std::memory_order_seq_cst)) cancel_requested();
  const bool credit = engine_.credit_requested_.exchange(false, std::memory_order_seq_cst);
  const bool heartbeat = now_ - last_heartbeat_ > settings_.peer_timeout_ns / 12;
  for (Peer* peer = known_.front(); peer != nullptr;) {
    Peer* next = known_.next(peer);
    if (was_away) {
      peer->last_heard_ns.store(now_, std::memory_order_relaxed);
      peer->session.last_message_ns = now_;
    }
    if (heartbeat || peer->state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING) service_session(*peer);
    if (credit && peer->connected()) schedule(*peer);
    if (!peer->session.stage_slots.empty() && peer->connected()) return_idle_slots(*peer);
    peer = next;
  }
  if (heartbeat) last_heartbeat_ = now_;
  if (!closings_.empty() || !rekeying_.empty()) continue_closings();
  if (!doubted_.empty()) resolve_doubts();
  if (!ghosts_.empty()) watch_ghosts();
  if (!idle_receives_.empty() || receives_made_ < receives_wanted_) post_receives();
  if (!stopping_ && stop_requested_.load(std::memory_order_seq_cst)) {
    stopping_ = true;
    while (engine_.submitting_.load(std::memory_order_seq_cst) != 0)
      sched_yield();  // none starts any more: closing_ is set
    while (take_commands()) {
    }
    while (!flights_.empty()) post_flights();  // their members begin, and fail
    for (Operation* op = active_.front(); op != nullptr;) {
      Operation* next = active_.next(op);
      fail(op, Status::kClosed, "the engine was closed");
      op = next;
    }
    for (Peer* peer = known_.front(); peer != nullptr; peer = known_.next(peer)) say_bye(*peer);
  }
}

void Worker::check_deadlines() {
  if (fences_wanted_) request_remote_fences();
  if (now_ < next_deadline_) return;
  next_deadline_ = INT64_MAX;
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    if (!op->reported && op->deadline_ns <= now_) {
      const char* why = "the deadline passed";
      if (op->peer != nullptr && op->peer->state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING)
        why = "the deadline passed while the peer was being connected";
      fail(op, Status::kTimeout, why);
    } else if (!op->reported) {
      next_deadline_ = std::min(next_deadline_, op->deadline_ns);
    }
    op = next;
  }
}

// While stopping: every peer has confirmed that it drained towards us (or is gone), and our own work towards it has ended.
bool Worker::goodbye_finished() {
  bool finished = true;
  for (Peer* peer = known_.front(); peer != nullptr;) {
    Peer* next = known_.next(peer);
    if (peer->connected()) {
      say_bye(*peer);
      if (peer->connected()) finished = false;
    } else if (peer->state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING) {
      lose(*peer, Status::kClosed, "the engine was closed", TE_PEER_CLOSED);
    }
    peer = next;
  }
  if (finished) return true;
  if (now_ < stop_deadline_.load(std::memory_order_relaxed)) return false;
  clean_end_ = false;
  return true;
}

void Worker::shut_down() {
  for (Peer* peer = known_.front(); peer != nullptr;) {
    Peer* next = known_.next(peer);
    if (peer->session.paths_open) lose(*peer, Status::kClosed, "the engine was closed", TE_PEER_CLOSED);
    peer = next;
  }
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    if (!op->reported) fail(op, Status::kClosed, "the engine was closed");
    op = next;
  }
  // What never drained keeps its transfer truthful: ended, not quiesced. Its memory goes with the slab, or its batch.
  while (Operation* op = active_.pop_front()) {
    if (te_transfer* t = op->transfer; t != nullptr && --t->undrained == 0) release_transfer(t);
    engine_.retire_pages(op);
    if (BatchBlock* block = op->block; block != nullptr && --block->remaining == 0) delete block;
  }
  engine_.counters_.for_each([](Counter& counter) { counter.wake(); });
  while (!owed_.empty()) owed_.pop_front();  // stays owed
  take_orders(true);
  engine_.abort_flags(TE_ABORT_CLOSED);  // those that were opened or cleared meanwhile, too
  engine_.inbox_.shut();
  engine_.events_.shut();
}

}  // namespace te
