// The handshake: how two NICs come to have a connection of two reliable queue pairs each, over datagrams that may be lost,
// doubled, overtaken or forged. A pure state machine: time and messages come in, effects go out through an interface, so that every
// schedule can be tried without a NIC.
//
// A side makes its queue pairs, numbers the attempt, and *offers* it; an offer is repeated with back-off until it is answered. Who
// gets an offer makes queue pairs too (if it has none for that NIC), *binds* them to the offered ones, and offers in return,
// with an echo: the number of the attempt that it is bound to. There is no client and no server, so crossed offers need no rule.
//
// Why it converges, and never on a wrong pairing:
//   1. Queue pairs are bound once, to the pairs of one attempt of the other side, and attempts are never reused.
//   2. A side is *up* when it is bound to an attempt whose owner has said (by echo, or by traffic over the queue pairs) that it is bound
//      to ours. So if A is up on (a, b), then B was bound to a with attempt b, and nothing else can ever be bound to these.
//   3. While a side is not up it repeats its offer, and an offer that is not marked `ready` is always answered. So a lost
//      message costs one repetition, and once both are up nothing is sent any more.
//   4. Attempts only rise. An offer older than the one we are bound to is a late copy and ignored. A newer one means that the
//      other side has begun again: a connection that was up is down, one that was not is begun again under a new attempt.
//   5. An echo of an attempt that is not ours (any more) means that the other side is bound to the dead: it is refused (kUnknown) and
//      begins again, if its attempt is still the one that the refusal names.
// A restarted engine has another cookie, in its address and in every message; whoever means the old one is refused (kStale).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cx7/wire.h"
#include "native/status.h"

namespace te::cx7 {

enum class Loss : uint8_t {
  kUnreachable,  // no answer until the deadline
  kRestarted,    // another engine lives there
  kFull,         // the other side has no room
  kVersion,      // it speaks another version
  kReplaced,     // it has begun a new connection: this one is dead to it
  kClosed,       // it has closed the connection
  kFailed        // our own queue pairs failed
};
const char* loss_text(Loss loss);
Status loss_status(Loss loss);

// What the machine makes happen. `connection` is an index, used again after destroy.
class Effects {
 public:
  virtual ~Effects() = default;
  // Makes fresh queue pairs (destroying older ones of this connection); false: none can be had.
  virtual bool make(uint32_t connection, QueuePairs* ours) = 0;
  // Connects them: ready to receive and to send. false: the device refused.
  virtual bool bind(uint32_t connection, const NicAddress& remote, const QueuePairs& theirs) = 0;
  virtual void destroy(uint32_t connection) = 0;
  virtual void send(const NicAddress& to, const HandshakeMessage& message) = 0;
  // For the owners of a connection. Down comes once; after it only close() is left.
  virtual void up(uint32_t connection) = 0;
  virtual void down(uint32_t connection, Loss loss) = 0;
};

class Switchboard {
 public:
  struct Options {
    uint8_t identity[16] = {};
    uint64_t generation = 0;
    NicAddress own;
    int64_t patience_ns = 10'000'000'000;  // with an offer that is not answered
    uint32_t most_strangers = 1024;        // connections that the other side began and nobody here has opened
  };
  struct Statistics {
    uint64_t sent = 0, taken = 0, damaged = 0, foreign = 0, stale = 0, refused = 0, restarts = 0;
  };

  Switchboard(const Options& options, Effects* effects) : options_(options), effects_(*effects) {}

  // Finds or begins the connection to that NIC, for one more owner. Effects::up or ::down follows, perhaps inside.
  Error open(const NicAddress& remote, uint64_t generation, int64_t now, uint32_t* connection);
  // The last owner's close tells the other side and destroys.
  void close(uint32_t connection);
  // The data path saw it fail.
  void fail(uint32_t connection);
  void fail_all();
  // Something came over its queue pairs: the other side is bound.
  void heard(uint32_t connection);
  void receive(std::span<const uint8_t> datagram, int64_t now);
  // Repeats offers, gives up, forgets strangers. Cheap when nothing is due; to be called about once a millisecond.
  void tick(int64_t now);
  bool busy() const { return pending_ > 0; }  // tick() has something to wait for

  bool is_up(uint32_t connection) const {
    return connection < connections_.size() && connections_[connection].state == State::kUp;
  }
  bool is_coming(uint32_t connection) const {
    const State state = connections_[connection].state;
    return state == State::kOffering || state == State::kBound;
  }
  const NicAddress& remote(uint32_t connection) const { return connections_[connection].remote; }
  const Statistics& statistics() const { return statistics_; }

 private:
  enum class State : uint8_t { kFree, kOffering, kBound, kUp, kDown };
  struct Connection {
    State state = State::kFree;
    uint32_t owners = 0;
    NicAddress remote;
    uint64_t generation = 0;
    uint64_t attempt = 0, theirs = 0;  // theirs: the attempt we are bound to, or the newest one seen
    QueuePairs pairs;
    int64_t deadline = 0, repeat_at = 0, wait = 0;
  };

  Error begin(const NicAddress& remote, uint64_t generation, int64_t now, uint32_t* index);
  bool restart(uint32_t index, int64_t now);
  void take_offer(const HandshakeMessage& message, int64_t now);
  void take_refusal(uint32_t index, const HandshakeMessage& message, int64_t now);
  void bind(uint32_t index, const HandshakeMessage& message);
  void offer(uint32_t index);
  void say(uint32_t index, HandshakeKind kind);
  void refuse(const HandshakeMessage& message, Refusal refusal);
  void go_up(uint32_t index);
  void go_down(uint32_t index, Loss loss, bool tell);
  void release(uint32_t index);
  void set_state(Connection* connection, State state);
  uint32_t find(const NicAddress& remote) const;

  static constexpr uint32_t kNone = ~0u;
  const Options options_;
  Effects& effects_;
  std::vector<Connection> connections_;
  std::vector<uint32_t> free_;
  uint64_t last_attempt_ = 0;
  uint32_t pending_ = 0;    // connections that are neither free, nor up with an owner, nor down
  uint32_t strangers_ = 0;  // connections without an owner
  Statistics statistics_;
};

}  // namespace te::cx7
