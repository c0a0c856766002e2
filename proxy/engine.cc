// The engine's life, its peers, and what it says about itself.
#include "proxy/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "proxy/providers.h"
#include "proxy/worker.h"

namespace te {
namespace {

void copy_text(char* out, size_t size, const std::string& text) {
  const size_t length = std::min(size - 1, text.size());
  std::memcpy(out, text.data(), length);
  out[length] = '\0';
}

// Entries wished for in each completion queue: own requests, and of each peer its window and the messages that it may send. Beyond
// the most, peers share what there is.
constexpr uint32_t kMostCompletions = 32768;
uint32_t completion_depth(const te_settings& v) {
  const uint64_t own = v.nic_depth == 0 ? 2048 : v.nic_depth + 64;
  const uint64_t each = std::max(v.immediate_window, v.message_window + 32);
  return static_cast<uint32_t>(std::min<uint64_t>(kMostCompletions, own + 2 * each * (v.max_peers + 1)));
}

uint64_t start_generation() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(static_cast<size_t>(i), &set)) cores.push_back(i);
  return cores;
}

}  // namespace

std::string peer_key(const uint8_t* identity, uint64_t generation) {
  std::string key(reinterpret_cast<const char*>(identity), 16);
  key.append(reinterpret_cast<const char*>(&generation), sizeof generation);
  return key;
}

Engine::Engine(const te_settings& settings)
    : settings_(settings),
      fork_generation_(te::fork_generation()),
      regions_(settings.max_regions + 1),  // kNoticeSerial
      counters_(settings.max_counters),
      remote_regions_(settings.max_regions),
      remote_counters_(settings.max_counters),
      slab_(new Operation[2 * settings.operations]),
      free_operations_(settings.operations, 2 * settings.operations),
      commands_(2 * settings.operations) {
  for (uint32_t i = 0; i < 2 * settings.operations; ++i) slab_[i].slab_index = i;
}

Error Engine::open(const te_settings& settings, Engine** out) {
  const Settings checked(settings);
  if (Error e = checked.check()) return e;
  std::unique_ptr<Engine> engine(new Engine(settings));
  if (Error e = engine->start()) return e;
  *out = engine.release();
  return {};
}

Error Engine::start() {
  const te_settings& v = settings_.values;
  if (doorbell_.fd() < 0 || !events_.ok()) return Error(Status::kConfig, "eventfd failed: too many open files?", errno);
  const uint8_t none[16] = {};
  std::memcpy(address_.identity, v.identity, 16);
  if (std::memcmp(v.identity, none, 16) == 0 && !random_bytes(address_.identity, 16))
    return Error(Status::kConfig, "getrandom failed");
  address_.generation = start_generation();
  copy_text(address_.transport, sizeof address_.transport, settings_.transport);

  const std::vector<int> cores = allowed_cores();
  busy_polling_ = v.polling == TE_POLL_BUSY || (v.polling == TE_POLL_AUTO && v.core >= 0);
  if (v.core >= 0) {
    if (std::find(cores.begin(), cores.end(), v.core) == cores.end())
      return Error(Status::kConfig,
                   format("setting core is %d, which is not among the %zu CPUs that this process may use", v.core,
                          cores.size()));
    core_ = v.core;
  }
  ProviderOptions options;
  options.transport = settings_.transport;
  options.nics = settings_.nic_names();
  options.nic_count = v.nic_count;
  options.sim = settings_.sim;
  options.nic_depth = v.nic_depth;
  options.completion_depth = completion_depth(v);
  options.chunk_bytes = v.chunk_bytes;
  options.port_low = v.port_low;
  options.port_high = v.port_high;
  options.want_wait_fd = !busy_polling_;
  options.rdma = v.rdma;
  options.connect_timeout_ns = v.connect_timeout_ns - v.connect_timeout_ns / 10;  // its reason is the better one
  std::memcpy(options.identity, address_.identity, 16);
  options.generation = address_.generation;
  if (Error e = open_provider(options, &provider_)) return e;
  capabilities_ = provider_->capabilities();
  nic_count_ = provider_->nic_count();
  if (nic_count_ == 0 || nic_count_ > TE_MAX_NICS)
    return Error(Status::kConfig, format("%u NICs; 1 to %d can be used", nic_count_, TE_MAX_NICS));
  if (!capabilities_.ordered_writes && !capabilities_.completion_orders)
    return Error(
        Status::kConfig,
        format("provider %s neither keeps the order of writes nor tells when one was placed: its counters would "
               "run ahead of the bytes",
               provider_->provider_name().c_str()));
  address_.nic_count = nic_count_;
  for (uint32_t i = 0; i < nic_count_; ++i) address_.nics[i] = provider_->nic(i).address;

  if (nic_count_ > 1) {
    slab_parts_.reset(new Part[uint64_t{2} * v.operations * nic_count_]);
    for (uint32_t i = 0; i < 2 * v.operations; ++i) slab_[i].part = &slab_parts_[uint64_t{i} * nic_count_];
  }
  peer_capacity_ =
      std::min<uint32_t>(65536, v.max_peers * 16);  // entries stay after a peer has gone, until room is needed
  peers_.reset(new std::atomic<Peer*>[peer_capacity_]);
  for (uint32_t i = 0; i < peer_capacity_; ++i) peers_[i].store(nullptr, std::memory_order_relaxed);
  worker_ = std::make_unique<Worker>(this);
  if (Error e = worker_->start()) return e;
  if (Error e = register_region({nullptr, 0, TE_DEVICE_HOST, 0}, &notice_handle_)) return e;
  notice_region_ = regions_.get(notice_handle_);
  return {};
}

Engine::~Engine() {
  if (!forked()) static_cast<void>(close(0));
  delete staging_.load(std::memory_order_relaxed);
  worker_.reset();
  for (uint32_t i = 0; i < peer_count_.load(std::memory_order_relaxed); ++i)
    delete peers_[i].load(std::memory_order_relaxed);
  prepared_.for_each([](Prepared& prepared) { std::free(std::exchange(prepared.pages, nullptr)); });  // never closed
  for (PageList* list : {spare_pages_, retired_pages_.load(std::memory_order_relaxed)}) {
    while (list != nullptr) {
      PageList* next = list->next;
      std::free(list);
      list = next;
    }
  }
}

// Endpoints, ports and registrations go. The provider may hold buffers and contexts of work that never completed: it goes
// before their memory does.
void Engine::release_provider() {
  const std::unique_lock lock(provider_mutex_);
  if (provider_ == nullptr) return;
  if (worker_ != nullptr) worker_->deregister_memory();
  if (Staging* staging = staging_.load(std::memory_order_relaxed)) close_staging(*staging);
  regions_.for_each([this](Region& region) {
    for (uint32_t i = 0; i < nic_count_ && !region.deregistered; ++i)
      static_cast<void>(provider_->deregister_memory(i, region.keys[i]).ok());
    region.deregistered = true;
    region.dmabuf = OwnedDescriptor();
  });
  provider_.reset();
  if (Staging* staging = staging_.load(std::memory_order_relaxed)) free_staging(*staging);
}

Error Engine::close(int64_t timeout_ns) {
  if (forked()) return Error(Status::kForked, "the engine belongs to the parent process");
  const std::lock_guard lock(close_mutex_);
  if (closed_) return {};
  closing_.store(true, std::memory_order_seq_cst);
  abort_flags(TE_ABORT_CLOSED);  // before the goodbyes: no kernel waits for these
  const int64_t bound = timeout_ns < 0 ? settings_.values.close_timeout_ns : timeout_ns;
  if (worker_ == nullptr) return release_provider(), Error();
  const Worker::End end = worker_->stop(deadline_after(now_ns(), bound));
  closed_ = true;
  if (end != Worker::End::kStuck) release_provider();
  if (end == Worker::End::kClean) return {};
  if (end == Worker::End::kStuck) {
    stuck_ = true;
    inbox_.shut();
    events_.shut();
    return Error(Status::kTimeout,
                 format("the worker thread is held inside the provider %s and cannot be ended; the engine is abandoned",
                        provider_->provider_name().c_str()));
  }
  return Error(Status::kTimeout,
               "a peer did not confirm that it had drained before the engine closed: it may still write to memory that "
               "was registered here");
}

int64_t Engine::silence() const {
  return closing_.load(std::memory_order_relaxed) ? 0 : std::max<int64_t>(0, now_ns() - worker_->last_round_ns());
}

Error Engine::check() const {
  if (forked())
    return Error(Status::kForked, "this engine was opened by the parent process; a forked child cannot use it");
  if (closing_.load(std::memory_order_relaxed)) return Error(Status::kClosed, "the engine is closed");
  return {};
}

// --- peers ---------------------------------------------------------------------------------------------------------------------

Error Engine::check_address(const te_address& address) const {
  if (std::strncmp(address.transport, address_.transport, sizeof address.transport) != 0)
    return Error(Status::kConfig, format("the peer speaks transport '%.15s', this engine '%.15s'", address.transport,
                                         address_.transport));
  return {};
}

Error Engine::peer(const te_address& address, int32_t* index) {
  for (int attempt = 0;; ++attempt) {
    Error error = find_or_add_peer(address, index);
    if (error.status() != Status::kExhausted || attempt == 2) return error;
    sweep(true);
  }
}

Error Engine::find_or_add_peer(const te_address& address, int32_t* index) {
  if (Error e = check_address(address)) return e;
  const std::string key = peer_key(address.identity, address.generation);
  const std::lock_guard lock(peers_mutex_);
  const auto found = peer_by_key_.find(key);
  if (found != peer_by_key_.end()) {
    *index = found->second;
    return {};
  }
  uint32_t slot, reuse = 0;
  if (peer_count_.load(std::memory_order_relaxed) < peer_capacity_) {
    slot = peer_count_.load(std::memory_order_relaxed);
  } else if (!free_peers_.empty()) {
    slot = free_peers_.front().first;
    reuse = free_peers_.front().second;
    free_peers_.pop_front();
  } else {
    return Error(Status::kExhausted,
                 format("%u peers are known and in use, which is all that max_peers allows for", peer_capacity_));
  }
  auto* peer = new Peer;
  peer->index = static_cast<int32_t>(slot | reuse << kPeerSlotBits);
  peer->address = address;
  peers_[slot].store(peer, std::memory_order_release);
  if (reuse == 0) peer_count_.store(slot + 1, std::memory_order_release);
  peer_by_key_.emplace(key, peer->index);
  *index = peer->index;
  return {};
}

// The worker has made sure that nothing points to it any more but what may look at its address and fate.
void Engine::retire_peer(Peer* peer) {
  const std::lock_guard lock(peers_mutex_);
  const uint32_t slot = static_cast<uint32_t>(peer->index) & kPeerSlotMask;
  const uint32_t reuse = (static_cast<uint32_t>(peer->index) >> kPeerSlotBits) + 1;
  peer_by_key_.erase(peer_key(peer->address.identity, peer->address.generation));
  peers_[slot].store(nullptr, std::memory_order_release);
  retired_peers_.emplace_back(peer);
  free_peers_.emplace_back(slot, reuse > kPeerReuseMask ? 1 : reuse);
}

uint32_t Engine::live_peers() const {
  const std::lock_guard lock(peers_mutex_);
  return static_cast<uint32_t>(peer_by_key_.size());
}

Peer* Engine::peer_at(int32_t index) const {
  const uint32_t slot = static_cast<uint32_t>(index) & kPeerSlotMask;
  if (index < 0 || slot >= peer_capacity_) return nullptr;
  Peer* peer = peers_[slot].load(std::memory_order_acquire);
  return peer != nullptr && peer->index == index ? peer : nullptr;
}

// An index that was given out once, and whose peer has been forgotten since; or one that never was.
Error Engine::no_peer(int32_t index) const {
  const uint32_t slot = static_cast<uint32_t>(index) & kPeerSlotMask;
  const Peer* now = index < 0 || slot >= peer_capacity_ ? nullptr : peers_[slot].load(std::memory_order_acquire);
  const bool later = now != nullptr && index > now->index;  // than any that this slot has had
  if (index < 0 || slot >= peer_count_.load(std::memory_order_acquire) || later)
    return Error(Status::kArgument, format("no peer has index %d", index));
  return Error(Status::kPeerLost,
               "the peer was lost or had parted, and was forgotten to make room: use its address again");
}

Error Engine::describe_peer(int32_t index, te_peer_info* out) {
  const Peer* peer = peer_at(index);
  if (peer == nullptr) return no_peer(index);
  *out = te_peer_info{};
  out->address = peer->address;
  out->state = peer->state.load(std::memory_order_acquire);
  out->operations = peer->operations.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < nic_count_; ++i) {
    out->in_flight += peer->in_flight[i];
    out->bytes_in_flight += peer->bytes_in_flight[i];
  }
  const Credits& credits = peer->credits;
  out->immediate_window = credits.their_window;
  for (uint32_t i = 0; i < peer->address.nic_count; ++i)
    out->immediates_in_flight += credits.sent[i] - credits.polled_by_them[i];
  const Peer::Statistics& s = peer->statistics;
  out->writes = s.writes.load(std::memory_order_relaxed);
  out->write_bytes = s.write_bytes.load(std::memory_order_relaxed);
  out->messages_sent = s.messages_sent.load(std::memory_order_relaxed);
  out->messages_received = s.messages_received.load(std::memory_order_relaxed);
  out->immediates_received = s.immediates.load(std::memory_order_relaxed);
  out->errors = s.errors.load(std::memory_order_relaxed);
  const int64_t heard = peer->last_heard_ns.load(std::memory_order_relaxed);
  out->silence_ns = heard == 0 ? 0 : std::max<int64_t>(0, now_ns() - heard);
  return {};
}

te_transfer* Engine::peer_operation(OperationKind kind, int32_t index, int64_t timeout_ns, Error* error) {
  Peer* peer = peer_at(index);
  if (peer == nullptr) {
    *error = no_peer(index);
    return nullptr;
  }
  int64_t bound = timeout_or_default(timeout_ns);
  if (kind == OperationKind::kConnect && timeout_ns < 0)
    bound = deadline_after(0, settings_.values.connect_timeout_ns + 1'000'000'000);
  const int64_t deadline = deadline_after(now_ns(), bound);
  Operation* op = take_operation(nullptr, deadline, error);
  if (op == nullptr) return nullptr;
  op->kind = kind;
  op->peer = peer;
  op->deadline_ns = deadline;
  return submit(op, error);
}

// --- descriptions ----------------------------------------------------------------------------------------------------------------

Error Engine::inject(std::string_view command) {
  const std::shared_lock lock(provider_mutex_);
  return provider_ == nullptr ? Error(Status::kClosed, kClosedEngine) : provider_->inject(command);
}

Error Engine::describe(te_engine_info* out) {
  const std::shared_lock lock(provider_mutex_);
  if (provider_ == nullptr) return Error(Status::kClosed, kClosedEngine);
  *out = te_engine_info{};
  std::memcpy(out->identity, address_.identity, 16);
  out->generation = address_.generation;
  out->nic_count = nic_count_;
  out->polling = busy_polling_ ? TE_POLL_BUSY : TE_POLL_ADAPTIVE;
  out->core = core_;
  out->delivery_complete = capabilities_.delivery_complete;
  out->ordered_writes = capabilities_.ordered_writes;
  out->keys_enforced = capabilities_.keys_enforced;
  out->max_message_fragment = capabilities_.max_send_bytes;
  out->max_write_bytes = capabilities_.max_write_bytes;
  out->wait_fd = provider_->wait_fd(0) >= 0;
  copy_text(out->transport, sizeof out->transport, settings_.transport);
  copy_text(out->provider, sizeof out->provider, provider_->provider_name());
  copy_text(out->library, sizeof out->library, provider_->library_name());
  return {};
}

Error Engine::describe_nic(uint32_t nic, te_nic_info* out) {
  if (nic >= nic_count_)
    return Error(Status::kArgument, format("NIC %u does not exist: the engine has %u", nic, nic_count_));
  const std::shared_lock lock(provider_mutex_);
  if (provider_ == nullptr) return Error(Status::kClosed, kClosedEngine);
  const NicInfo info = provider_->nic(nic);
  const NicState& state = worker_->nic(nic);
  const auto& s = state.statistics;
  *out = te_nic_info{};
  // Several domains may share an interface; their names must still tell them apart.
  uint32_t namesakes = 0;
  for (uint32_t i = 0; i < nic; ++i) namesakes += provider_->nic(i).name == info.name ? 1 : 0;
  copy_text(out->name, sizeof out->name, namesakes == 0 ? info.name : format("%s#%u", info.name.c_str(), namesakes));
  out->address = info.address;
  out->up = info.up;
  copy_text(out->state, sizeof out->state, info.state);
  out->relaxed_ordering = info.relaxed_ordering;
  copy_text(out->ordering_reason, sizeof out->ordering_reason, info.ordering_reason);
  out->depth = state.depth;
  out->in_flight = state.in_flight;
  out->bytes_in_flight = state.bytes_in_flight;
  out->writes = s.writes.load(std::memory_order_relaxed);
  out->write_bytes = s.write_bytes.load(std::memory_order_relaxed);
  out->sends = s.sends.load(std::memory_order_relaxed);
  out->receives = s.receives.load(std::memory_order_relaxed);
  out->immediates = s.immediates.load(std::memory_order_relaxed);
  out->reads = s.reads.load(std::memory_order_relaxed);
  out->errors = s.errors.load(std::memory_order_relaxed);
  out->busy = s.busy.load(std::memory_order_relaxed);
  return {};
}

void Engine::statistics(te_stats* out) {
  *out = te_stats{};
  out->submitted = submitted_.load(std::memory_order_relaxed);
  out->completed = worker_->completed();
  out->failed = worker_->failed();
  out->polls = worker_->polls();
  out->sleeps = worker_->sleeps();
  out->stray_messages = worker_->stray_messages();
  out->stray_immediates = worker_->stray_immediates();
  out->damaged_messages = worker_->damaged_messages();
  out->operations_in_use = operations_in_use_.load(std::memory_order_relaxed);
  out->transfers_alive = transfers_alive();
  out->regions = regions_.live() - 1;  // but for our own
  out->remote_regions = remote_regions_.live();
  out->counters = counters_.live();
  out->peers = live_peers();
}

// --- messages ----------------------------------------------------------------------------------------------------------------------

Error Engine::receive(int64_t timeout_ns, te_message* out) {
  InboxMessage message;
  if (!inbox_.pop(&message, timeout_or_default(timeout_ns)))
    return closing_.load(std::memory_order_relaxed) ? Error(Status::kClosed, "the engine is closed")
                                                    : Error(Status::kAgain, "");
  Peer* peer = message.peer;
  if (peer->session_number.load(std::memory_order_relaxed) == message.session) {
    // The sender's allowance comes back; the worker says so once enough has gathered.
    constexpr uint64_t kOverhead = 64;
    const uint64_t quarter = settings_.values.message_queue_bytes / 4;
    const uint64_t before = peer->consumed_bytes.fetch_add(message.length + kOverhead, std::memory_order_relaxed);
    if (before / quarter != (before + message.length + kOverhead) / quarter) {
      credit_requested_.store(true, std::memory_order_seq_cst);
      doorbell_.ring();
    }
  }
  *out = te_message{message.peer_index, message.length, message.data, message.data};
  return {};
}

void Engine::release_message(te_message* message) {
  std::free(message->owner);
  if (message->peer >= 0)
    if (Peer* peer = peer_at(message->peer)) peer->unread.fetch_sub(1, std::memory_order_release);
  *message = te_message{};
  message->peer = -1;
}

}  // namespace te
