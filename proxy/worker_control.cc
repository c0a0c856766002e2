// Messages between engines: sending what is due within the peer's window, taking what arrives. All of it goes over NIC 0.
#include <algorithm>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr uint32_t kControlNic = 0;
constexpr uint32_t kMostUnsequenced = 4;   // acknowledgements and signs of life in flight towards one peer
constexpr size_t kMostRecords = 1 << 16;   // queued towards a peer that does not acknowledge: it is broken or hostile
constexpr uint64_t kMostRounds = 1024;     // with full polls: more completions than any queue holds
constexpr uint64_t kMessageOverhead = 64;  // charged per message, so that empty ones cannot fill the receiver's memory

}  // namespace

MessageHeader Worker::header_for(const Peer& peer, MessageType type) const {
  MessageHeader header;
  header.type = type;
  header.target_index = peer.session.their_index;
  header.token = peer.session.their_token;
  header.acknowledged = peer.session.stream.received;
  header.consumed_bytes = peer.consumed_bytes.load(std::memory_order_relaxed);
  return header;
}

// On false the caller keeps the buffer and nothing has changed.
bool Worker::send_buffer(Peer& peer, Buffer* buffer, uint32_t length, WorkKind kind, bool sequenced, Operation* op) {
  WorkItem* item = items_.take();
  item->operation = op;
  item->peer = &peer;
  item->buffer = buffer;
  item->kind = kind;
  item->nic = kControlNic;
  item->sequenced = sequenced;
  item->length = length;
  item->session = peer.session.number;
  WorkRequest request;
  request.opcode = Opcode::kSend;
  request.path = peer.session.paths[kControlNic];
  request.local = buffer->data;
  request.local_key = buffer->local_key;
  request.length = length;
  request.context = item;
  const PostResult result = provider_.post(kControlNic, std::span(&request, 1));
  if (result.posted == 0) {
    bump(result.busy ? nics_[kControlNic].statistics.busy : nics_[kControlNic].statistics.errors);
    items_.give_back(item);
    return false;
  }
  account(peer, item, +1);
  if (!sequenced) ++peer.session.unsequenced_out;
  if (op != nullptr) ++op->in_flight;
  bump(nics_[kControlNic].statistics.sends);
  // Every header carries these two.
  peer.session.stream.reported = peer.session.stream.received;
  return true;
}

bool Worker::acknowledgement_due(const Peer& peer) const {
  const Session& s = peer.session;
  if (s.stream.received - s.stream.reported >= settings_.message_window / 2) return true;
  if (peer.consumed_bytes.load(std::memory_order_relaxed) - peer.credits.consumed_reported >=
      settings_.message_queue_bytes / 4)
    return true;
  for (uint32_t i = 0; i < nic_count_; ++i)
    if (peer.credits.polled[i] - peer.credits.reported[i] >= std::max(s.granted_window / 2, 1u)) return true;
  return false;
}

bool Worker::post_control(Peer& peer) {
  Session& s = peer.session;
  if (!s.paths_open || !peer.connected()) return false;
  bool posted = false;
  if (s.hello_ack_due) send_hello(peer, true);
  if (s.pong_due && post_unsequenced(peer, MessageType::kPong)) {
    s.pong_due = false;
    posted = true;
  }
  if (!s.slots_to_return.empty() && s.slots_to_return.size() >= std::max<size_t>(1, settings_.assembly_slots / 4)) {
    Record record;
    record.type = RecordType::kSlots;
    record.ids.swap(s.slots_to_return);
    push_record(peer, std::move(record));
  }
  posted |= post_resends(peer);
  posted |= post_records(peer);
  posted |= post_fragments(peer);
  if (acknowledgement_due(peer) && post_unsequenced(peer, MessageType::kAck)) posted = true;
  if (s.stream.records.size() > kMostRecords)
    lose(peer, Status::kPeerLost, "the peer does not take control messages any more");
  return posted;
}

bool Worker::post_records(Peer& peer) {
  Stream& stream = peer.session.stream;
  bool posted = false;
  while (!stream.records.empty() && stream.sent - stream.acknowledged < stream.their_window) {
    Buffer* buffer = buffers_.take();
    if (buffer == nullptr) return posted;
    const uint32_t limit = std::min(stream.fragment_bytes, fragment_bytes_);
    uint32_t length = kHeaderBytes, taken = 0;
    for (const Record& record : stream.records) {
      const std::vector<uint8_t> bytes = encode(record);
      if (length + bytes.size() > limit) break;
      std::copy(bytes.begin(), bytes.end(), buffer->data + length);
      length += static_cast<uint32_t>(bytes.size());
      ++taken;
    }
    MessageHeader header = header_for(peer, MessageType::kRecords);
    header.sequence = stream.sent + 1;
    header.body_bytes = length - kHeaderBytes;
    write_header(header, std::span(buffer->data, kHeaderBytes));
    if (taken == 0 || !send_buffer(peer, buffer, length, WorkKind::kControl, true, nullptr)) {
      buffers_.give_back(buffer);
      return posted;
    }
    peer.credits.consumed_reported = header.consumed_bytes;
    ++stream.sent;
    stream.records.erase(stream.records.begin(), stream.records.begin() + taken);
    posted = true;
  }
  return posted;
}

bool Worker::post_fragments(Peer& peer) {
  Stream& stream = peer.session.stream;
  Credits& credits = peer.credits;
  bool posted = false;
  while (Operation* op = peer.messages.front()) {
    if (stream.sent - stream.acknowledged >= stream.their_window) return posted;
    const bool first = !op->started;
    const uint32_t room =
        std::min(stream.fragment_bytes, fragment_bytes_) - kHeaderBytes - (first ? sizeof(uint64_t) : 0);
    const uint64_t part = std::min<uint64_t>(op->length - op->position, room);
    const uint64_t charge = part + (first ? kMessageOverhead : 0);
    if (credits.bytes_sent + charge - credits.bytes_consumed_by_them > credits.their_queue_bytes) return posted;
    Buffer* buffer = buffers_.take();
    if (buffer == nullptr) return posted;
    MessageHeader header = header_for(peer, MessageType::kFragment);
    header.first_fragment = first;
    header.sequence = stream.sent + 1;
    header.body_bytes = static_cast<uint32_t>(part + (first ? sizeof(uint64_t) : 0));
    write_header(header, std::span(buffer->data, kHeaderBytes));
    uint8_t* body = buffer->data + kHeaderBytes;
    if (first) {
      SpanWriter(std::span(body, sizeof(uint64_t))).put(op->length);
      body += sizeof(uint64_t);
    }
    if (part > 0) std::memcpy(body, op->message.get() + op->position, part);
    if (!send_buffer(peer, buffer, kHeaderBytes + header.body_bytes, WorkKind::kMessage, true, op)) {
      buffers_.give_back(buffer);
      return posted;
    }
    credits.consumed_reported = header.consumed_bytes;
    ++stream.sent;
    credits.bytes_sent += charge;
    op->started = true;
    op->position += part;
    if (op->position == op->length) leave_queue(op);
    posted = true;
  }
  return posted;
}

bool Worker::post_unsequenced(Peer& peer, MessageType type) {
  Session& s = peer.session;
  if (s.unsequenced_out >= kMostUnsequenced) return false;
  Buffer* buffer = buffers_.take();
  if (buffer == nullptr) return false;
  MessageHeader header = header_for(peer, type);
  header.body_bytes = write_counts(peer.credits.polled, nic_count_,
                                   std::span(buffer->data + kHeaderBytes, buffers_.bytes() - kHeaderBytes));
  write_header(header, std::span(buffer->data, kHeaderBytes));
  if (!send_buffer(peer, buffer, kHeaderBytes + header.body_bytes, WorkKind::kControl, false, nullptr)) {
    buffers_.give_back(buffer);
    return false;
  }
  peer.credits.reported = peer.credits.polled;
  peer.credits.consumed_reported = header.consumed_bytes;
  return true;
}

void Worker::push_record(Peer& peer, Record record) {
  peer.session.stream.records.push_back(std::move(record));
  schedule(peer);
}

void Worker::complete_send(uint32_t nic, const Completion& c, WorkItem* item) {
  Peer* peer = item->peer;
  Operation* op = item->operation;
  const bool reject = peer == nullptr;
  const bool current = !reject && item->session == peer->session.number;
  if (reject) provider_.close_path(nic, static_cast<PathId>(item->length));
  if (current) {
    account(*peer, item, -1);
    if (!item->sequenced && peer->session.unsequenced_out > 0) --peer->session.unsequenced_out;
  }
  if (!current && !reject) {
    --peer->former_in_flight;
    answer_drain(*peer);
  }
  // Flushed, and certainly never left: something else on this NIC failed. It is as good as not yet posted.
  const bool again = current && c.status == Status::kCancelled && !c.landed_unknown && peer->connected();
  if (again) peer->session.resends.push_back({item->buffer, static_cast<uint32_t>(item->length), item->sequenced, op});
  else buffers_.give_back(item->buffer);
  items_.give_back(item);
  if (again) return schedule(*peer);
  if (op != nullptr) {
    --op->in_flight;
    const bool all_sent = op->position == op->length && op->queue == Queue::kNone;
    if (op->in_flight == 0 && (op->stopped || (all_sent && c.status == Status::kOk))) {
      if (!op->stopped) bump(peer->statistics.messages_sent);
      finish(op);
    } else if (c.status != Status::kOk && !op->stopped) {
      fail(op, Status::kPeerLost, "a message could not be delivered", c.provider_status, static_cast<int>(nic));
    }
  }
  if (!current || c.status == Status::kOk) return;
  if (peer->connected()) return lose(*peer, Status::kPeerLost, "a control message could not be delivered");
  // A hello that failed: some providers keep a broken connection behind an address, so the path is opened anew for the next try.
  Session& s = peer->session;
  if (!s.paths_open) return;
  provider_.close_path(kControlNic, s.paths[kControlNic]);
  PathId path = kNoPath;
  if (Error e = provider_.open_path(kControlNic, peer->address.nics[0], peer->address.generation, &path))
    return lose(*peer, Status::kPeerUnreachable, e.message().c_str());
  s.paths[kControlNic] = path;
}

bool Worker::post_resends(Peer& peer) {
  std::deque<Resend>& resends = peer.session.resends;
  bool posted = false;
  while (!resends.empty()) {
    const Resend& r = resends.front();
    if (r.operation != nullptr) --r.operation->in_flight;  // send_buffer counts it again
    if (!send_buffer(peer, r.buffer, r.length, r.operation != nullptr ? WorkKind::kMessage : WorkKind::kControl,
                     r.sequenced, r.operation)) {
      if (r.operation != nullptr) ++r.operation->in_flight;
      return posted;
    }
    resends.pop_front();
    posted = true;
  }
  return posted;
}

// The session is over: what waited to go out again never does.
void Worker::drop_resends(Peer& peer) {
  for (const Resend& r : peer.session.resends) {
    buffers_.give_back(r.buffer);
    if (r.operation != nullptr && --r.operation->in_flight == 0 && r.operation->stopped) finish(r.operation);
  }
  peer.session.resends.clear();
}

// Keeps as many receives posted as the peers' windows add up to, or as the provider has room for.
void Worker::post_receives() {
  while (receives_made_ < receives_wanted_) {
    Buffer* buffer = buffers_.take();
    if (buffer == nullptr) break;
    WorkItem* item = items_.take();
    item->kind = WorkKind::kReceive;
    item->buffer = buffer;
    item->peer = nullptr;
    idle_receives_.push_back(item);
    ++receives_made_;
  }
  while (!idle_receives_.empty() && receives_posted_ < most_receives_) {
    WorkItem* item = idle_receives_.back();
    const PostResult result =
        provider_.post_receive(kControlNic, item->buffer->data, fragment_bytes_, item->buffer->local_key, item);
    if (result.posted == 0) break;
    ++receives_posted_;
    idle_receives_.pop_back();
  }
}

void Worker::received(uint32_t nic, const Completion& c, WorkItem* item) {
  bump(nics_[nic].statistics.receives);
  --receives_posted_;
  Buffer* buffer = item->buffer;
  bool kept = false;
  MessageHeader header;
  if (c.status != Status::kOk) {
    bump(nics_[nic].statistics.errors);
  } else if (!read_header(std::span(buffer->data, std::min<uint64_t>(c.length, fragment_bytes_)), &header)) {
    bump(damaged_messages_);
  } else {
    buffer->length = static_cast<uint32_t>(c.length);
    const std::span<const uint8_t> body(buffer->data + kHeaderBytes, header.body_bytes);
    if (header.type == MessageType::kHello) {
      take_hello(body);
    } else {
      Peer* peer = engine_.peer_at(static_cast<int32_t>(header.target_index));
      const bool ours = peer != nullptr && peer->session.paths_open && peer->session.token == header.token;
      if (ours) {
        kept = receive_from(*peer, header, buffer);
      } else {
        bump(stray_messages_);
        if (peer != nullptr && !peer->session.paths_open) answer_stray(*peer);
      }
    }
  }
  if (kept) {  // until its turn: another buffer takes its place among the receives
    Buffer* fresh = buffers_.take();
    if (fresh == nullptr) {
      items_.give_back(item);
      --receives_made_;
      return;
    }
    item->buffer = fresh;
  }
  idle_receives_.push_back(item);
  post_receives();
}

// True when the buffer is kept.
bool Worker::receive_from(Peer& peer, const MessageHeader& header, Buffer* buffer) {
  const std::span<const uint8_t> body(buffer->data + kHeaderBytes, header.body_bytes);
  Session& s = peer.session;
  peer.last_heard_ns.store(now_, std::memory_order_relaxed);
  s.ping_out = false;
  s.last_message_ns = now_;
  if (header.type == MessageType::kHelloAck) return take_hello_ack(peer, body), false;
  if (header.type == MessageType::kReject) return take_reject(peer, body), false;
  // Cumulative: only news move it.
  if (static_cast<int32_t>(header.acknowledged - s.stream.acknowledged) > 0 &&
      header.acknowledged - s.stream.acknowledged <= s.stream.sent - s.stream.acknowledged)
    s.stream.acknowledged = header.acknowledged;
  if (header.consumed_bytes > peer.credits.bytes_consumed_by_them && header.consumed_bytes <= peer.credits.bytes_sent)
    peer.credits.bytes_consumed_by_them = header.consumed_bytes;
  if (!peer.messages.empty() || !s.stream.records.empty()) schedule(peer);
  switch (header.type) {
    case MessageType::kPing:
      s.pong_due = true;
      schedule(peer);
      [[fallthrough]];
    case MessageType::kPong:
    case MessageType::kAck:
      return take_counts(peer, body), false;
    default:
      break;
  }
  const uint32_t ahead = header.sequence - s.stream.received;
  if (ahead == 0 || ahead > s.stream.early.size()) {
    bump(stray_messages_);
    return false;
  }
  if (ahead > 1) {
    Buffer*& slot = s.stream.early[header.sequence % s.stream.early.size()];
    if (slot != nullptr) return false;  // a duplicate
    slot = buffer;
    return true;
  }
  const uint32_t session = s.number;
  take_sequenced(peer, header, body);
  while (s.number == session && s.paths_open) {
    Buffer*& next = s.stream.early[(s.stream.received + 1) % s.stream.early.size()];
    if (next == nullptr) break;
    Buffer* early = next;
    next = nullptr;
    MessageHeader early_header;
    if (read_header(std::span(early->data, early->length), &early_header))
      take_sequenced(peer, early_header, std::span(early->data + kHeaderBytes, early_header.body_bytes));
    buffers_.give_back(early);
  }
  if (peer.connected() && acknowledgement_due(peer)) schedule(peer);
  return false;
}

void Worker::take_sequenced(Peer& peer, const MessageHeader& header, std::span<const uint8_t> body) {
  ++peer.session.stream.received;
  if (header.type == MessageType::kRecords) take_records(peer, body);
  else take_fragment(peer, header, body);
}

// Records end or begin what immediates may use: ids, slots, sessions. A message overtakes immediates that landed before it on another
// NIC, or deeper in the queue, so records wait until every queue has been polled down once after they came (or has given as much as
// was in it then). Their order is kept.
void Worker::take_records(Peer& peer, std::span<const uint8_t> body) {
  Reader in(body);
  Record record;
  while (in.left() > 0) {
    if (!decode(&in, &record)) {
      bump(damaged_messages_);
      return;
    }
    if (peer.session.untaken.empty()) {
      with_untaken_.push_back(&peer);
      peer.session.untaken_since = rounds_;
    }
    peer.session.untaken.push_back(std::move(record));
  }
}

// After a round's polls; `all_empty`: each of them found its queue's end.
void Worker::take_untaken(bool all_empty) {
  const std::vector<Peer*> peers = with_untaken_;
  for (Peer* peer : peers) {
    if (std::find(with_untaken_.begin(), with_untaken_.end(), peer) == with_untaken_.end()) continue;  // lost meanwhile
    Session& s = peer->session;
    const uint64_t waited = rounds_ - s.untaken_since;
    if (waited == 0 || (!all_empty && waited < kMostRounds)) continue;
    std::deque<Record> records;
    records.swap(s.untaken);
    std::erase(with_untaken_, peer);
    const uint32_t session = s.number;
    for (const Record& record : records) {
      if (peer->session.number != session || !peer->session.paths_open) break;
      take_record(*peer, record);
    }
  }
}

void Worker::take_record(Peer& peer, const Record& record) {
  switch (record.type) {
    case RecordType::kAttachRegion:
      return take_attach_region(peer, record.serial);
    case RecordType::kRegionAttached:
      return take_region_attached(peer, record);
    case RecordType::kAttachCounter:
      return take_attach_counter(peer, record.serial);
    case RecordType::kCounterAttached:
      return take_counter_attached(peer, record);
    case RecordType::kRevokeRegion:
      return take_revoke_region(peer, record);
    case RecordType::kRegionRevoked:
    case RecordType::kCounterRevoked:
      return take_revoked(peer, record);
    case RecordType::kRevokeCounter:
      return take_revoke_counter(peer, record);
    case RecordType::kSlots:
      return take_slots(peer, record.ids);
    case RecordType::kRetireSlot:
      return take_retire_slot(peer, record);
    case RecordType::kWriteOff:
      if (record.nics < nic_count_) peer.credits.polled[record.nics] += record.index;
      return schedule(peer);
    case RecordType::kStageRequest:
      return take_stage_request(peer, record.index);
    case RecordType::kStageSlots:
      return take_stage_slots(peer, record.ids);
    case RecordType::kStageReturn:
      return take_stage_return(peer, record.ids, record.unknown);
    case RecordType::kStaged:
      return take_staged(peer, record);
    case RecordType::kStagedDone:
      return take_staged_done(peer, record);
    case RecordType::kFence:
      return take_fence(peer, record.serial);
    case RecordType::kFenced:
      return take_fenced(peer, record);
    case RecordType::kBye:
      return take_bye(peer, record.for_good);
    case RecordType::kByeDone:
      peer.session.bye_done = true;
      schedule(peer);
      return;
  }
}

void Worker::take_retire_slot(Peer& peer, const Record& record) {
  IdEntry& entry = ids_[record.id];
  if (entry.use != IdUse::kSlot || entry.peer != &peer || entry.retiring) {
    bump(stray_messages_);
    return;
  }
  if (record.unknown) {  // something may still arrive for it: this id is not used again in this session
    ids_.quarantine(record.id, &peer, now_);
    uint16_t fresh = 0;
    if (!ids_.take(IdUse::kSlot, &peer, nullptr, now_, &fresh)) return;
    std::replace(peer.session.granted_ids.begin(), peer.session.granted_ids.end(), record.id, fresh);
    peer.session.retired_ids.push_back(record.id);
    peer.session.slots_to_return.push_back(fresh);
  } else if (entry.seen >= record.delivered) {
    entry.seen = entry.parts = 0;
    peer.session.slots_to_return.push_back(record.id);
  } else {
    entry.retiring = true;
    entry.expected = record.delivered;
  }
  schedule(peer);
}

void Worker::take_fragment(Peer& peer, const MessageHeader& header, std::span<const uint8_t> body) {
  Assembly& assembly = peer.session.assembly;
  if (header.first_fragment) {
    std::free(assembly.data);  // an unfinished one: its sender gave up
    const uint64_t given_up = assembly.filled > 0 || assembly.open ? assembly.filled + kMessageOverhead : 0;
    peer.consumed_bytes.fetch_add(given_up, std::memory_order_relaxed);
    Reader in(body);
    const auto length = in.get<uint64_t>();
    assembly = Assembly{};
    if (!in.ok() || length > settings_.message_queue_bytes || in.left() > length) {
      bump(damaged_messages_);
      return;
    }
    assembly.data = length == 0 ? nullptr : static_cast<uint8_t*>(std::malloc(length));
    if (length > 0 && assembly.data == nullptr) return lose(peer, Status::kPeerLost, "no memory for a message");
    assembly.length = length;
    assembly.open = true;
    body = in.rest();
  } else if (!assembly.open || body.size() > assembly.length - assembly.filled) {
    bump(damaged_messages_);
    return;
  }
  if (!body.empty()) std::memcpy(assembly.data + assembly.filled, body.data(), body.size());
  assembly.filled += body.size();
  if (assembly.filled < assembly.length) return;
  bump(peer.statistics.messages_received);
  peer.unread.fetch_add(1, std::memory_order_relaxed);
  engine_.inbox_.push({&peer, peer.index, peer.session.number, assembly.data, assembly.length});
  engine_.events_.push_message();
  assembly = Assembly{};
}

void Worker::take_counts(Peer& peer, std::span<const uint8_t> body) {
  ImmediateCounts counts{};
  uint32_t nics = 0;
  if (!read_counts(body, &counts, &nics)) {
    bump(damaged_messages_);
    return;
  }
  Credits& credits = peer.credits;
  for (uint32_t i = 0; i < nics; ++i) {
    const auto news = static_cast<int32_t>(counts[i] - credits.polled_by_them[i]);
    const auto most = static_cast<int32_t>(credits.sent[i] - credits.polled_by_them[i]);  // more: see write_off
    if (news > 0 && most > 0) credits.polled_by_them[i] += static_cast<uint32_t>(std::min(news, most));
  }
  if (!peer.ready.empty()) schedule(peer);
}

}  // namespace te
