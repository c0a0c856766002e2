#include "cx7/switchboard.h"

#include <algorithm>
#include <cstring>

namespace te::cx7 {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kFirstWait = 4 * kMillisecond;
constexpr int64_t kLongestWait = 256 * kMillisecond;

}  // namespace

const char* loss_text(Loss loss) {
  switch (loss) {
    case Loss::kUnreachable:
      return "no answer to the connection handshake: is the peer's engine open, and can datagrams (UDP port 4791 on "
             "RoCE) "
             "pass in both directions?";
    case Loss::kRestarted:
      return "another engine (a restarted one) lives at the peer's address: use the descriptors that it publishes now";
    case Loss::kFull:
      return "the peer's NIC has no room for another connection";
    case Loss::kVersion:
      return "the peer speaks another version of the connection handshake: use the same release on both sides";
    case Loss::kReplaced:
      return "the peer lost this connection and opened a new one";
    case Loss::kClosed:
      return "the peer closed the connection";
    case Loss::kFailed:
      return "the queue pairs of the connection failed";
  }
  return "";
}

Status loss_status(Loss loss) {
  switch (loss) {
    case Loss::kUnreachable:
    case Loss::kFull:
    case Loss::kVersion:
      return Status::kPeerUnreachable;
    case Loss::kRestarted:
      return Status::kPeerRestarted;
    case Loss::kReplaced:
    case Loss::kClosed:
    case Loss::kFailed:
      break;
  }
  return Status::kPeerLost;
}

// Connections are few hundred, and this is not the data path.
uint32_t Switchboard::find(const NicAddress& remote) const {
  for (uint32_t i = 0; i < connections_.size(); ++i) {
    const Connection& c = connections_[i];
    if (c.state != State::kFree && c.state != State::kDown && c.remote == remote) return i;
  }
  return kNone;
}

void Switchboard::set_state(Connection* c, State state) {
  const auto waits = [](const Connection& x) {
    return x.state == State::kOffering || x.state == State::kBound || (x.state == State::kUp && x.owners == 0);
  };
  pending_ -= waits(*c);
  c->state = state;
  pending_ += waits(*c);
}

Error Switchboard::open(const NicAddress& remote, uint64_t generation, int64_t now, uint32_t* connection) {
  uint32_t index = find(remote);
  if (index == kNone) {
    if (Error error = begin(remote, generation, now, &index)) return error;
    --strangers_;
    connections_[index].owners = 1;
    *connection = index;
    if (remote == options_.own) {  // a queue pair may be connected to itself
      HandshakeMessage self;
      self.attempt = connections_[index].attempt;
      self.pairs = connections_[index].pairs;
      bind(index, self);
      if (connections_[index].state == State::kBound) go_up(index);
    } else {
      offer(index);
    }
    return {};
  }
  Connection& c = connections_[index];
  if (c.owners == 0) {
    --strangers_;
    pending_ -= c.state == State::kUp;
    c.deadline = now + options_.patience_ns;
  }
  ++c.owners;
  *connection = index;
  if (c.state == State::kUp) effects_.up(index);
  return {};
}

Error Switchboard::begin(const NicAddress& remote, uint64_t generation, int64_t now, uint32_t* index) {
  uint32_t i = static_cast<uint32_t>(connections_.size());
  if (!free_.empty()) {
    i = free_.back();
    free_.pop_back();
  } else {
    connections_.emplace_back();
  }
  QueuePairs pairs;
  if (!effects_.make(i, &pairs)) {
    free_.push_back(i);
    return Error(Status::kExhausted, "the device gave no queue pair for another connection");
  }
  Connection& c = connections_[i];
  c = Connection{};
  c.remote = remote;
  c.generation = generation;
  c.attempt = ++last_attempt_;
  c.pairs = pairs;
  c.deadline = now + options_.patience_ns;
  c.wait = kFirstWait;
  c.repeat_at = now + c.wait;
  set_state(&c, State::kOffering);
  ++strangers_;
  *index = i;
  return {};
}

// Not up, and bound to queue pairs that are no more: new ones, under the same index, so that its owners need not know.
bool Switchboard::restart(uint32_t index, int64_t now) {
  ++statistics_.restarts;
  Connection& c = connections_[index];
  if (!effects_.make(index, &c.pairs)) {
    go_down(index, Loss::kFailed, true);
    return false;
  }
  c.attempt = ++last_attempt_;
  c.wait = kFirstWait;
  c.repeat_at = now + c.wait;
  set_state(&c, State::kOffering);
  return true;
}

void Switchboard::close(uint32_t index) {
  Connection& c = connections_[index];
  if (--c.owners > 0) return;
  ++strangers_;
  pending_ += c.state == State::kUp;  // as set_state counts
  if (c.state != State::kDown) go_down(index, Loss::kClosed, true);
  else release(index);
}

void Switchboard::fail(uint32_t index) { go_down(index, Loss::kFailed, true); }

void Switchboard::fail_all() {
  for (uint32_t i = 0; i < connections_.size(); ++i) go_down(i, Loss::kFailed, false);
}

void Switchboard::heard(uint32_t index) {
  if (connections_[index].state == State::kBound) go_up(index);
}

// --- messages ------------------------------------------------------------------------------------------------------------------

void Switchboard::receive(std::span<const uint8_t> datagram, int64_t now) {
  HandshakeMessage m;
  switch (decode(datagram, &m)) {
    case Readable::kNo:
      ++statistics_.damaged;
      return;
    case Readable::kOtherVersion:
      if (m.target_cookie == options_.own.cookie) refuse(m, Refusal::kVersion);
      return;
    case Readable::kYes:
      break;
  }
  ++statistics_.taken;
  if (m.sender == options_.own) {
    ++statistics_.foreign;
    return;
  }
  const bool meant = m.target_cookie == options_.own.cookie &&
                     (m.target_generation == 0 || m.target_generation == options_.generation);
  if (!meant) {
    ++statistics_.foreign;
    if (m.kind == HandshakeKind::kOffer) refuse(m, Refusal::kStale);
    return;
  }
  if (m.kind == HandshakeKind::kOffer) return take_offer(m, now);
  const uint32_t index = find(m.sender);
  if (index == kNone) return;
  if (m.kind == HandshakeKind::kRefuse) return take_refusal(index, m, now);
  const Connection& c = connections_[index];  // kBye
  if (c.theirs == m.attempt && (m.echo == 0 || m.echo == c.attempt)) go_down(index, Loss::kClosed, false);
}

void Switchboard::take_offer(const HandshakeMessage& m, int64_t now) {
  uint32_t index = find(m.sender);
  if (index != kNone && m.attempt < connections_[index].theirs) {
    ++statistics_.stale;
    return;
  }
  // A side has one live connection to a NIC: a newer attempt says that the older one is dead.
  if (index != kNone && connections_[index].theirs != 0 && m.attempt > connections_[index].theirs) {
    if (connections_[index].state == State::kUp) {
      go_down(index, Loss::kReplaced, false);
      index = kNone;
    } else if (connections_[index].state == State::kBound) {
      if (!restart(index, now)) return;
    }
  }
  if (m.echo != 0 && (index == kNone || m.echo != connections_[index].attempt)) {
    ++statistics_.stale;
    refuse(m, Refusal::kUnknown);
    if (index != kNone && connections_[index].state == State::kOffering) offer(index);
    return;
  }
  if (index == kNone) {
    if (strangers_ >= options_.most_strangers) return refuse(m, Refusal::kFull);
    if (begin(m.sender, m.generation, now, &index)) return refuse(m, Refusal::kFull);
  }
  if (connections_[index].state == State::kOffering) bind(index, m);
  Connection& c = connections_[index];
  if (c.state == State::kBound && m.echo == c.attempt) go_up(index);
  // An offer is answered unless its sender is content, and repeated at once after a restart.
  if (c.state == State::kBound || (c.state == State::kUp && !m.ready)) offer(index);
}

void Switchboard::bind(uint32_t index, const HandshakeMessage& m) {
  Connection& c = connections_[index];
  c.theirs = m.attempt;
  if (!effects_.bind(index, c.remote, m.pairs)) return go_down(index, Loss::kFailed, true);
  set_state(&c, State::kBound);
}

void Switchboard::take_refusal(uint32_t index, const HandshakeMessage& m, int64_t now) {
  const Connection& c = connections_[index];
  if (m.echo != c.attempt) {
    ++statistics_.stale;
    return;
  }
  ++statistics_.refused;
  if (m.refusal == Refusal::kUnknown) {
    if (c.state == State::kUp || c.owners == 0) return go_down(index, Loss::kReplaced, false);
    if (restart(index, now)) offer(index);
    return;
  }
  if (c.state == State::kUp) return;  // it has offered since
  go_down(index,
          m.refusal == Refusal::kFull      ? Loss::kFull
          : m.refusal == Refusal::kVersion ? Loss::kVersion
                                           : Loss::kRestarted,
          false);
}

void Switchboard::offer(uint32_t index) { say(index, HandshakeKind::kOffer); }

void Switchboard::say(uint32_t index, HandshakeKind kind) {
  const Connection& c = connections_[index];
  HandshakeMessage m;
  m.kind = kind;
  std::copy(std::begin(options_.identity), std::end(options_.identity), std::begin(m.identity));
  m.generation = options_.generation;
  m.sender = options_.own;
  m.target_cookie = c.remote.cookie;
  m.target_generation = c.generation;
  m.attempt = c.attempt;
  m.echo = c.state == State::kOffering ? 0 : c.theirs;
  m.ready = c.state == State::kUp;
  m.pairs = c.pairs;
  ++statistics_.sent;
  effects_.send(c.remote, m);
}

// The echo names the attempt that is refused.
void Switchboard::refuse(const HandshakeMessage& m, Refusal refusal) {
  HandshakeMessage answer;
  answer.kind = HandshakeKind::kRefuse;
  answer.refusal = refusal;
  std::copy(std::begin(options_.identity), std::end(options_.identity), std::begin(answer.identity));
  answer.generation = options_.generation;
  answer.sender = options_.own;
  // Whoever means an engine that is gone knows the old address: it is answered from there, or it could not tell whose answer it is.
  answer.sender.cookie = m.target_cookie;
  answer.target_cookie = m.sender.cookie;
  answer.echo = m.attempt;
  ++statistics_.sent;
  effects_.send(m.sender, answer);
}

// --- ends ----------------------------------------------------------------------------------------------------------------------

void Switchboard::go_up(uint32_t index) {
  Connection& c = connections_[index];
  set_state(&c, State::kUp);
  if (c.owners > 0) effects_.up(index);
}

void Switchboard::go_down(uint32_t index, Loss loss, bool tell) {
  Connection& c = connections_[index];
  if (c.state == State::kFree || c.state == State::kDown) return;
  if (tell && !(c.remote == options_.own)) say(index, HandshakeKind::kBye);
  set_state(&c, State::kDown);
  if (c.owners == 0) return release(index);
  effects_.down(index, loss);
}

void Switchboard::release(uint32_t index) {
  set_state(&connections_[index], State::kFree);
  --strangers_;
  effects_.destroy(index);
  free_.push_back(index);
}

void Switchboard::tick(int64_t now) {
  if (pending_ == 0) return;
  for (uint32_t i = 0; i < connections_.size(); ++i) {
    const Connection& c = connections_[i];
    const bool waits = c.state == State::kOffering || c.state == State::kBound;
    if (!waits && !(c.state == State::kUp && c.owners == 0)) continue;
    if (now >= c.deadline) {
      go_down(i, Loss::kUnreachable, true);
    } else if (waits && now >= c.repeat_at) {
      Connection& mine = connections_[i];
      mine.wait = std::min(2 * mine.wait, kLongestWait);
      mine.repeat_at = now + mine.wait;
      offer(i);
    }
  }
}

}  // namespace te::cx7
