// Acquaintance and loss.
//
// A session opens with a hello in one direction and its acknowledgement in the other. The initiator has every path to the peer
// open before it says hello; the other side opens its own before it answers. So whoever is connected knows that the peer
// knows it, on every NIC: what EFA needs before the first write. Hellos are repeated with back-off until answered or until the deadline.
// Both may start at once: each answers the other's hello, and both end in one session, since a side has one token for both roles.
//
// Tokens are random per session. A message with another token is from an older session, or from a stranger, and is dropped. Session
// numbers rise with every session an engine opens, so a hello that was delayed across a reconnect is recognised as old.
#include <algorithm>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kFirstHelloWait = 20 * kMillisecond;
constexpr int64_t kLongestHelloWait = 500 * kMillisecond;
constexpr int64_t kStrayAnswerEvery = 50 * kMillisecond;
constexpr uint32_t kUnsequencedReserve = 8;

bool same_nic(const te_nic_address& a, const te_nic_address& b) {
  return a.length == b.length && std::memcmp(a.bytes, b.bytes, a.length) == 0;
}

}  // namespace

bool Worker::is_self(const Peer& peer) const {
  return peer.address.generation == engine_.address_.generation &&
         std::memcmp(peer.address.identity, engine_.address_.identity, 16) == 0;
}

void Worker::ensure_connecting(Peer& peer) {
  const uint32_t state = peer.state.load(std::memory_order_relaxed);
  if (state == TE_PEER_CONNECTED || state == TE_PEER_CONNECTING) return;
  if (peer.gone()) return fail_all(peer, peer.gone_status(), peer.gone_text());
  if (Error e = start_session(peer)) return fail_all(peer, Status::kPeerUnreachable, e.message().c_str());
  peer.state.store(TE_PEER_CONNECTING, std::memory_order_release);
  peer.session.deadline = deadline_after(now_, settings_.connect_timeout_ns);
  peer.session.hello_at = now_;
  peer.session.hello_wait = kFirstHelloWait;
  service_session(peer);
}

Error Worker::start_session(Peer& peer) {
  if (!peer.known_link.linked) known_.push_back(&peer);
  peer.session = Session{};
  peer.credits = Credits{};
  ++peer.epoch;
  Session& s = peer.session;
  if (!random_bytes(&s.token, sizeof s.token)) return Error(Status::kTransport, "getrandom failed");
  s.number = next_session_++;
  s.last_message_ns = now_;
  s.stream.early.assign(settings_.message_window, nullptr);
  peer.consumed_bytes.store(0, std::memory_order_relaxed);
  peer.session_number.store(s.number, std::memory_order_relaxed);
  peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  s.granted_window = grant_window();
  if (s.granted_window == 0)
    return Error(Status::kExhausted, "the completion queue has no room for the immediates of another peer (max_peers)");
  if (Error e = open_paths(peer)) {
    immediates_granted_ -= s.granted_window;
    return e;
  }
  s.paths_open = true;
  receives_wanted_ += settings_.message_window + kUnsequencedReserve + 2 * nic_count_;
  post_receives();
  // A peer with several NICs may cut writes over them, and needs slots for that.
  for (uint32_t i = 0; peer.address.nic_count > 1 && i < settings_.assembly_slots; ++i) {
    uint16_t id = 0;
    if (!ids_.take(IdUse::kSlot, &peer, nullptr, now_, &id)) break;
    s.granted_ids.push_back(id);
  }
  return {};
}

// Our share of a completion queue for one more peer's immediates. Where queues can overrun, half of what our own requests leave is for
// immediates (the other half is for receives): every one of max_peers gets an equal part of it for sure, and the early ones get
// more, up to the setting, from what the others do not need yet.
uint32_t Worker::grant_window() {
  uint32_t window = settings_.immediate_window;
  if (capabilities_.completion_depth > 0) {
    const uint32_t sure = std::max(immediate_budget_ / settings_.max_peers, 2u);
    const uint32_t left = immediate_budget_ - std::min(immediate_budget_, immediates_granted_);
    window = std::min(window, std::max(sure, left / 8));
    if (window > left) return 0;
  }
  immediates_granted_ += window;
  return window;
}

Error Worker::open_paths(Peer& peer) {
  Session& s = peer.session;
  const uint32_t theirs = peer.address.nic_count;
  uint32_t opened = 0;
  Error error;
  for (; opened < nic_count_ && !error; ++opened)
    error = provider_.open_path(opened, peer.address.nics[paired_nic(opened, theirs)], peer.address.generation,
                                &s.paths[opened]);
  if (error) --opened;
  for (uint32_t i = nic_count_; i < theirs && !error; ++i) {
    const uint32_t nic = i % nic_count_;
    PathId path = kNoPath;
    error = provider_.open_path(nic, peer.address.nics[i], peer.address.generation, &path);
    if (!error) s.extra_paths.push_back({nic, i, path});
  }
  if (capabilities_.connected_paths) s.paths_coming = opened + static_cast<uint32_t>(s.extra_paths.size());
  if (!error) return {};
  for (uint32_t i = 0; i < opened; ++i) provider_.close_path(i, s.paths[i]);
  for (const Session::ExtraPath& extra : s.extra_paths) provider_.close_path(extra.nic, extra.path);
  s.extra_paths.clear();
  return error;
}

// On the clock: hellos, heartbeats, time-outs.
void Worker::service_session(Peer& peer) {
  Session& s = peer.session;
  if (peer.state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING) {
    if (now_ >= s.deadline) {
      char why[120];
      std::snprintf(why, sizeof why, "no answer to a hello within %.3f s",
                    static_cast<double>(settings_.connect_timeout_ns) * 1e-9);
      return lose(peer, Status::kPeerUnreachable, why);
    }
    // An address comes from an engine that was there: when nobody has it any more, nobody will.
    const int64_t since = now_ - (s.deadline - settings_.connect_timeout_ns);
    if (since > 2 * kFirstHelloWait && provider_.death_of(0, s.paths[0]) == Death::kProven)
      return lose(peer, Status::kPeerUnreachable,
                  "nobody answers there: connections are refused (the process has ended, or a firewall rejects them)");
    if (now_ < s.hello_at) return;
    if (s.paths_coming == 0) send_hello(peer, false);
    else s.hello_at = now_ + kMillisecond;
    return;
  }
  if (!peer.connected()) return;
  if (!s.broken.empty()) mend_paths(peer);
  if (is_self(peer)) return;
  // Completions and immediates are signs of life, but only messages show that the peer still has this session: a peer that has
  // lost it takes writes all the same and counts none.
  const int64_t silence = now_ - peer.last_heard_ns.load(std::memory_order_relaxed);
  const int64_t speechless = now_ - s.last_message_ns;
  if (silence > settings_.peer_timeout_ns || speechless > 2 * settings_.peer_timeout_ns) {
    char why[96];
    std::snprintf(why, sizeof why, "no %s for %.3f s", silence > settings_.peer_timeout_ns ? "sign of life" : "message",
                  static_cast<double>(std::max(silence, speechless)) * 1e-9);
    return lose(peer, Status::kPeerLost, why);
  }
  if (s.ping_out && now_ - s.ping_at > settings_.peer_timeout_ns / 12 &&
      provider_.death_of(0, s.paths[0]) == Death::kProven)
    return lose(peer, Status::kPeerLost, kDeadText);
  if (speechless > settings_.peer_timeout_ns / 4 && (!s.ping_out || now_ - s.ping_at > settings_.peer_timeout_ns / 4)) {
    if (post_unsequenced(peer, MessageType::kPing)) provider_.ring_doorbells();
    s.ping_out = true;
    s.ping_at = now_;
  }
}

void Worker::send_hello(Peer& peer, bool acknowledgement) {
  Session& s = peer.session;
  Hello hello;
  std::memcpy(hello.target_identity, peer.address.identity, 16);
  hello.target_generation = peer.address.generation;
  hello.sender = engine_.address_;
  hello.sender_index = static_cast<uint32_t>(peer.index);
  hello.sender_token = s.token;
  hello.echo_token = acknowledgement ? s.their_token : 0;
  hello.session = s.number;
  hello.immediate_window = s.granted_window;
  hello.message_window = settings_.message_window;
  hello.fragment_bytes = fragment_bytes_;
  hello.message_queue_bytes = settings_.message_queue_bytes;
  hello.max_message_bytes = settings_.max_message_bytes;
  hello.slots = s.granted_ids;
  hello.slots.resize(std::min<size_t>(hello.slots.size(), std::min(settings_.assembly_slots, kMaxHelloSlots)));
  const std::vector<uint8_t> body = encode(hello);
  Buffer* buffer = buffers_.take();
  if (buffer == nullptr || kHeaderBytes + body.size() > fragment_bytes_) {
    if (buffer != nullptr) buffers_.give_back(buffer);
    return lose(peer, Status::kPeerUnreachable, "the hello does not fit a message of this provider");
  }
  MessageHeader header = header_for(peer, acknowledgement ? MessageType::kHelloAck : MessageType::kHello);
  header.body_bytes = static_cast<uint32_t>(body.size());
  write_header(header, std::span(buffer->data, kHeaderBytes));
  std::copy(body.begin(), body.end(), buffer->data + kHeaderBytes);
  const bool sent = send_buffer(peer, buffer, kHeaderBytes + header.body_bytes, WorkKind::kControl, false, nullptr);
  if (!sent) buffers_.give_back(buffer);
  provider_.ring_doorbells();
  if (acknowledgement) {
    s.hello_ack_due = !sent;
    return;
  }
  s.hello_at = now_ + (sent ? s.hello_wait : kMillisecond);
  if (sent) s.hello_wait = std::min(2 * s.hello_wait, kLongestHelloWait);
}

void Worker::take_hello(std::span<const uint8_t> body) {
  Hello hello;
  if (!decode(body, &hello)) {
    bump(damaged_messages_);
    return;
  }
  if (stopping_) return;
  const te_address& me = engine_.address_;
  if (std::memcmp(hello.target_identity, me.identity, 16) != 0 || hello.target_generation != me.generation)
    return reject(hello.sender, hello.sender_index, hello.sender_token, RejectReason::kRestarted);
  int32_t index = -1;
  Error unknown = engine_.find_or_add_peer(hello.sender, &index);
  if (unknown.status() == Status::kExhausted) {
    sweep(true);
    unknown = engine_.find_or_add_peer(hello.sender, &index);
  }
  if (unknown) return reject(hello.sender, hello.sender_index, hello.sender_token, RejectReason::kFull);
  Peer& peer = *engine_.peer_at(index);
  Session& s = peer.session;
  // Of a session with ourselves that we have given up since: nobody has its token any more.
  if (is_self(peer) && hello.sender_token != s.token) return;
  if (s.hello_seen && s.their_token == hello.sender_token) {  // repeated: our answer was late or lost
    s.hello_ack_due = true;
    return schedule(peer);
  }
  if (s.hello_seen && static_cast<int32_t>(hello.session - s.their_number) <= 0)
    return;  // older than the session we have
  if (s.hello_seen) lose(peer, Status::kPeerLost, "the peer lost this connection and opened a new one");
  lose_older(peer);
  if (!peer.session.paths_open) {
    if (start_session(peer)) return;  // the initiator's hello comes again
    peer.state.store(TE_PEER_CONNECTING, std::memory_order_release);
  }
  adopt(peer, hello);
  peer.session.hello_ack_due = true;
  connected(peer);
  schedule(peer);
}

void Worker::take_hello_ack(Peer& peer, std::span<const uint8_t> body) {
  Hello hello;
  if (!decode(body, &hello) || hello.echo_token != peer.session.token) {
    bump(damaged_messages_);
    return;
  }
  if (!peer.session.hello_seen) adopt(peer, hello);
  if (!peer.connected()) connected(peer);
}

void Worker::adopt(Peer& peer, const Hello& hello) {
  Session& s = peer.session;
  s.hello_seen = true;
  s.their_token = hello.sender_token;
  s.their_index = hello.sender_index;
  s.their_number = hello.session;
  peer.credits.their_window = hello.immediate_window;
  peer.credits.their_queue_bytes = hello.message_queue_bytes;
  s.stream.their_window = hello.message_window;
  s.stream.fragment_bytes = hello.fragment_bytes;
  s.slots = hello.slots;
  s.last_message_ns = now_;
  peer.last_heard_ns.store(now_, std::memory_order_relaxed);
}

void Worker::connected(Peer& peer) {
  if (peer.connected()) return;
  lose_older(peer);
  peer.fate.store(Fate::kMayReturn, std::memory_order_relaxed);
  peer.state.store(TE_PEER_CONNECTED, std::memory_order_release);
  ++peer.epoch;
  std::vector<Operation*> connects;
  connects.swap(peer.connects);
  for (Operation* op : connects) finish(op);
  ask_drain(peer);
  ask_about_pieces(peer);
  readmit(peer);
}

// Somebody new lives where an older acquaintance lived: the same identity with another generation, or the same NIC address.
void Worker::lose_older(const Peer& newcomer) {
  for (Peer* peer = known_.front(); peer != nullptr;) {
    Peer* next = known_.next(peer);
    const bool same_engine = std::memcmp(peer->address.identity, newcomer.address.identity, 16) == 0;
    if (peer != &newcomer && (same_engine || same_nic(peer->address.nics[0], newcomer.address.nics[0]))) {
      peer->fate.store(Fate::kRestarted, std::memory_order_relaxed);
      if (peer->session.paths_open) lose(*peer, Status::kPeerRestarted, kRestartedText);
      else drop_attachments(*peer);
    }
    peer = next;
  }
}

// Answers a hello that was meant for somebody else. The sender is no peer of ours, so the path to it lives for this one message.
void Worker::reject(const te_address& to, uint32_t index, uint64_t token, RejectReason reason) {
  PathId path = kNoPath;
  if (provider_.open_path(0, to.nics[0], to.generation, &path)) return;
  Buffer* buffer = buffers_.take();
  if (buffer == nullptr) return provider_.close_path(0, path);
  Reject answer;
  answer.reason = reason;
  answer.echo_token = token;
  std::memcpy(answer.identity, engine_.address_.identity, 16);
  answer.generation = engine_.address_.generation;
  const std::vector<uint8_t> body = encode(answer);
  MessageHeader header;
  header.type = MessageType::kReject;
  header.target_index = index;
  header.token = token;
  header.body_bytes = static_cast<uint32_t>(body.size());
  write_header(header, std::span(buffer->data, kHeaderBytes));
  std::copy(body.begin(), body.end(), buffer->data + kHeaderBytes);
  WorkItem* item = items_.take();
  item->peer = nullptr;
  item->buffer = buffer;
  item->kind = WorkKind::kControl;
  item->length = path;  // closed when the send completes
  WorkRequest request;
  request.opcode = Opcode::kSend;
  request.path = path;
  request.local = buffer->data;
  request.local_key = buffer->local_key;
  request.length = kHeaderBytes + header.body_bytes;
  request.context = item;
  if (provider_.post(0, std::span(&request, 1)).posted == 1) return provider_.ring_doorbells();
  items_.give_back(item);
  buffers_.give_back(buffer);
  provider_.close_path(0, path);
}

// Somebody we know speaks in a session that we have lost. Told so, it opens a new one at once; the token shows that it is us.
void Worker::answer_stray(Peer& peer) {
  if (peer.last_their_token == 0 || now_ - peer.stray_answered_ns < kStrayAnswerEvery) return;
  peer.stray_answered_ns = now_;
  reject(peer.address, peer.last_their_index, peer.last_their_token, RejectReason::kUnknownSession);
}

void Worker::take_reject(Peer& peer, std::span<const uint8_t> body) {
  Reject answer;
  const bool readable = decode(body, &answer) && answer.echo_token == peer.session.token;
  if (!readable || peer.connected() != (answer.reason == RejectReason::kUnknownSession)) {
    bump(stray_messages_);
    return;
  }
  if (answer.reason == RejectReason::kUnknownSession)
    return lose(peer, Status::kPeerLost, "the peer has lost this session");
  if (answer.reason == RejectReason::kFull)
    return lose(peer, Status::kPeerUnreachable, "the peer has no room for another peer (its max_peers)");
  peer.fate.store(Fate::kRestarted, std::memory_order_relaxed);
  lose(peer, Status::kPeerRestarted, kRestartedText);
}

// --- loss ----------------------------------------------------------------------------------------------------------------------

void Worker::fail_all(Peer& peer, Status status, const char* why, bool spare_waiting) {
  for (Operation* op = active_.front(); op != nullptr;) {
    Operation* next = active_.next(op);
    const bool about_work = op->kind == OperationKind::kWrite || op->kind == OperationKind::kPages ||
                            op->kind == OperationKind::kMessage || op->kind == OperationKind::kConnect;
    const bool spared = spare_waiting && (op->queue == Queue::kWaiting || op->kind == OperationKind::kConnect);
    if (op->peer == &peer && about_work && !op->reported && !spared) {
      if (op->in_flight > 0) replace_zombie(op);
      fail(op, status, why);
    }
    op = next;
  }
}

void Worker::lose(Peer& peer, Status status, const char* why, uint32_t final_state) {
  const bool was_connected = peer.connected();
  const bool drained = peer.session.bye_done || peer.session.their_bye;
  // One side disconnected, but did not close. What came after the goodbye goes to the next session: the first use opens one.
  const bool parted = (peer.session.their_bye || peer.session.saying_bye) && !peer.gone() && !stopping_;
  char reason[320];
  std::snprintf(reason, sizeof reason, "%s", why);  // `why` may lie in what is torn down below
  peer.state.store(final_state, std::memory_order_release);
  fail_all(peer, status, reason, parted);
  std::erase(staging_.asking, &peer);
  std::vector<Operation*> disconnects;
  disconnects.swap(peer.disconnects);
  for (Operation* op : disconnects) finish(op);
  drop_attachments(peer);
  leave_ghost(peer, drained);
  Session& s = peer.session;
  for (Buffer* early : s.stream.early)
    if (early != nullptr) buffers_.give_back(early);
  std::free(s.assembly.data);
  if (s.paths_open) {
    immediates_granted_ -= s.granted_window;
    for (const Session::ExtraPath& extra : s.extra_paths)
      if (extra.path != kNoPath) provider_.close_path(extra.nic, extra.path);
    const uint32_t given = settings_.message_window + kUnsequencedReserve + 2 * nic_count_;
    receives_wanted_ -= std::min(receives_wanted_, given);  // those made stay posted, for the next peer
  }
  for (uint32_t i = 0; i < nic_count_; ++i) {
    nics_[i].in_flight -= peer.in_flight[i];
    nics_[i].bytes_in_flight -= peer.bytes_in_flight[i];
    total_in_flight_ -= peer.in_flight[i];
    peer.former_in_flight += peer.in_flight[i];
    peer.in_flight[i] = 0;
    peer.bytes_in_flight[i] = 0;
  }
  if (s.hello_seen) {
    peer.last_their_index = s.their_index;
    peer.last_their_token = s.their_token;
  }
  drop_resends(peer);
  peer.session = Session{};
  peer.credits = Credits{};
  peer.staged_former = peer.staged_arriving;
  lose_pieces(peer, drained);  // now that they are of a former session
  ++peer.epoch;
  scheduled_.remove(&peer);
  std::erase(with_untaken_, &peer);
  engine_.counters_.for_each([this](Counter& counter) {
    counter.wake();
    if (!counter.armed.empty()) check_armed(counter);
  });
  if (!bound_to_peers_.empty()) abort_bound(peer);
  if (was_connected) engine_.events_.push_lost(peer.index);
  if (parted && (!peer.waiting.empty() || !peer.connects.empty())) ensure_connecting(peer);
}

// Ids and regions of the ended session. Where the peer has said that it drained, they are free at once. Otherwise a ghost
// keeps them until it is proven that nothing of the peer's can land or count any more.
void Worker::leave_ghost(Peer& peer, bool drained) {
  Session& s = peer.session;
  Ghost ghost;
  ghost.peer = &peer;
  leave_slots(peer, drained, &ghost.slots);
  for (Region* region : s.regions) {
    if (!drained && !region->staged()) ghost.regions.push_back(region->handle.load(std::memory_order_relaxed));
    holder_gone(*region, peer);
  }
  for (Counter* counter : s.counters)
    if (counter != nullptr)
      std::erase_if(counter->holders, [&](const Counter::Holder& holder) { return holder.peer == &peer; });
  for (const uint16_t id : s.granted_ids) {
    if (drained) ids_.give_back(id);
    else ids_.quarantine(id, nullptr, now_);
  }
  for (const uint16_t id : s.retired_ids) {
    ids_[id].peer = nullptr;
    if (drained) ids_.release_quarantined(id);
  }
  if (!drained && (s.hello_seen || !ghost.slots.empty())) {
    ghost.ids = s.granted_ids;
    ghost.ids.insert(ghost.ids.end(), s.retired_ids.begin(), s.retired_ids.end());
    if (!capabilities_.keys_enforced && s.paths_open) {  // the paths are needed for the proof
      ghost.paths_open = true;
      std::copy(std::begin(s.paths), std::end(s.paths), std::begin(ghost.paths));
    }
    ghosts_.push_back(std::move(ghost));
  }
  if (s.paths_open && (ghosts_.empty() || ghosts_.back().peer != &peer || !ghosts_.back().paths_open || drained))
    for (uint32_t i = 0; i < nic_count_; ++i)
      if (s.paths[i] != kNoPath) provider_.close_path(i, s.paths[i]);
}

// What we had attached of the peer's: to be attached again in the next session.
void Worker::drop_attachments(Peer& peer) {
  const auto drop = [&](Remote& remote) {
    remote.revoke_pending = false;
    remote.in_flight = 0;  // what the lost session left in flight is no longer counted anywhere
    const Attachment state = remote.state.load(std::memory_order_relaxed);
    if (state == Attachment::kAttached || state == Attachment::kAttaching) set_attachment(remote, Attachment::kNew);
  };
  for (auto& [serial, region] : peer.remote_regions) {
    drop(*region);
    region->fence = RemoteRegion::Fence::kNone;
  }
  for (auto& [serial, counter] : peer.remote_counters) drop(*counter);
  if (!peer.gone()) return;
  // Nobody will attach these again: their handles are given up (those that operations still use, when these end).
  std::vector<Remote*> regions, counters;
  for (auto& [serial, region] : peer.remote_regions) regions.push_back(region);
  for (auto& [serial, counter] : peer.remote_counters) counters.push_back(counter);
  for (Remote* remote : regions) recycle_if_unused(peer, *remote, true);
  for (Remote* remote : counters) recycle_if_unused(peer, *remote, false);
}

// --- goodbye ---------------------------------------------------------------------------------------------------------------------

// Anything but messages in flight towards the peer.
uint32_t Worker::writes_in_flight(const Peer& peer) {
  uint32_t count = orphaned_pieces(peer);
  for (const auto& [serial, region] : peer.remote_regions) count += region->in_flight;
  return count;
}

// We will post nothing more. Said once what we have in flight has drained, so it also tells the peer that we have drained.
void Worker::say_bye(Peer& peer) {
  if (!peer.connected()) return;
  peer.session.saying_bye = true;
  ++peer.epoch;
  schedule(peer);
  finish_bye(peer);
}

void Worker::take_bye(Peer& peer, bool for_good) {
  if (for_good) peer.fate.store(Fate::kClosed, std::memory_order_relaxed);
  peer.session.their_bye = true;
  ++peer.epoch;
  peer.session.bye_done = true;  // it drained before it said so
  fail_all(peer, Status::kPeerLost, "the peer closed its engine or disconnected");
  schedule(peer);
}

// Advances a goodbye in either direction; ends the session when it is complete.
void Worker::finish_bye(Peer& peer) {
  if (!peer.connected()) return;
  Session& s = peer.session;
  schedule(peer);
  if (is_self(peer)) {  // nobody else needs to be told
    if (writes_in_flight(peer) > 0) return;
    s.bye_done = true;
    return lose(peer, Status::kPeerLost, "disconnected", TE_PEER_CLOSED);
  }
  if (writes_in_flight(peer) > 0 || peer.staged_arriving > 0) return;  // our word ends their pieces, too
  // Byes that cross confirm each other: the first to have heard both may be gone before an answer reaches it.
  if (s.their_bye && !s.bye_answered && !s.bye_said) {
    s.bye_answered = true;
    Record record;
    record.type = RecordType::kByeDone;
    push_record(peer, std::move(record));
    return;
  }
  if (s.saying_bye && !s.their_bye && !s.bye_said) {
    s.bye_said = true;
    Record record;
    record.type = RecordType::kBye;
    record.for_good = stopping_;
    push_record(peer, std::move(record));
    return;
  }
  if (!s.stream.records.empty() || peer.in_flight[0] > s.unsequenced_out) return;  // not yet out
  if (s.bye_done)
    lose(peer, Status::kPeerLost, s.saying_bye ? "disconnected" : "the peer closed its engine or disconnected",
         s.saying_bye ? TE_PEER_CLOSED : TE_PEER_LOST);
}

}  // namespace te
