// A peer: another engine as this one knows it. The entry lives as long as the engine, under one index; a session is one
// acquaintance with it, and goes with the peer's loss. Apart from the atomics all of it belongs to the worker.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "native/control.h"
#include "proxy/buffers.h"
#include "proxy/operation.h"

namespace te {

// What the other side allowed us and how much of it is used; and the same the other way round.
struct Credits {
  // Immediates, per NIC of the receiver: sent minus polled stays within the window. 32-bit counts wrap; differences do not.
  Published<uint32_t> sent[TE_MAX_NICS], polled_by_them[TE_MAX_NICS];
  Published<uint32_t> their_window;
  ImmediateCounts polled{}, reported{};

  // User message bytes: sent minus consumed stays within the queue that the receiver keeps for us.
  uint64_t bytes_sent = 0, bytes_consumed_by_them = 0, their_queue_bytes = 0;
  uint64_t consumed_reported = 0;
};

// Sequenced messages in both directions.
struct Stream {
  uint32_t sent = 0;          // last sequence number used
  uint32_t acknowledged = 0;  // by them
  uint32_t their_window = 0;
  uint32_t fragment_bytes = 0;  // longest message they take, header included
  uint32_t received = 0;        // last number up to which all have come
  uint32_t reported = 0;        // last one acknowledged to them
  std::vector<Buffer*> early;   // [sequence % window]: came before their turn
  std::deque<Record> records;   // to be sent
};

// A message that was flushed before it left, because something else on its NIC failed: it goes out again.
struct Resend {
  Buffer* buffer;
  uint32_t length;
  bool sequenced;
  Operation* operation;
};

struct Assembly {  // of a user message from its fragments
  uint8_t* data = nullptr;
  uint64_t length = 0, filled = 0;
  bool open = false;  // the first fragment has come
};

struct Session {
  bool paths_open = false;
  uint32_t paths_coming = 0;  // connected_paths: that are not up yet; nothing is said before they are
  uint32_t paths_reopened = 0;
  uint32_t paths_down = 0;  // mask of our NICs that have no path to the peer for now
  // Connected paths that broke while others hold: made anew, again and again, until the NIC serves again.
  struct Broken {
    uint32_t nic, remote_nic;
    bool extra;  // one of extra_paths
    int64_t retry_at, wait;
  };
  std::vector<Broken> broken;
  bool hello_seen = false;   // we know their token
  bool saying_bye = false;   // they will post nothing more, or we asked them to drain
  bool bye_done = false;     // they said that they have drained
  bool their_bye = false;    // they asked us to drain
  int64_t doubt_until = 0;   // a work request failed as if the peer had died: until then its death may be proved
  bool drain_asked = false;  // they wait for the word that our former sessions have drained
  bool bye_said = false, bye_answered = false;
  bool ping_out = false, pong_due = false, acknowledge_due = false, hello_ack_due = false;
  PathId paths[TE_MAX_NICS] = {};  // per NIC of ours: to the peer's NIC that it is paired with
  // A peer with more NICs than ours sends from all of them, and some networks (EFA) take writes only from known senders: the
  // paths to those that none of ours is paired with.
  struct ExtraPath {
    uint32_t nic, remote_nic;
    PathId path;
  };
  std::vector<ExtraPath> extra_paths;
  uint32_t granted_window = 0;  // immediates in flight that the peer may have towards each of our NICs
  uint64_t token = 0, their_token = 0;
  uint32_t number = 0, their_number = 0, their_index = kNoIndex;
  int64_t last_message_ns = 0;  // when the peer last said anything in this session
  int64_t hello_at = 0, hello_wait = 0, deadline = 0, ping_at = 0;
  uint32_t unsequenced_out = 0;  // sends of that class not yet completed

  std::deque<Resend> resends;
  uint64_t untaken_since = 0;  // the round in which the first of them came
  std::deque<Record> untaken;  // records that wait for the queues to be polled down: see Worker::take_untaken
  Stream stream;
  Assembly assembly;
  std::vector<uint16_t> slots;  // that they granted and that are free
  struct Lent {
    uint16_t slot;
    const Operation* operation;  // null once it has ended well
  };
  std::vector<Lent> lent;               // that they granted and that they have not returned since
  std::vector<uint16_t> dropped_slots;  // retired with unknown outcome: a return that crossed the retirement is ignored
  std::vector<uint16_t> slots_to_return;  // of ours, seen complete
  std::vector<uint16_t> granted_ids;      // every id of ours that they may use
  std::vector<uint16_t> retired_ids;      // quarantined while the session lives
  std::vector<Counter*> counters;         // [counter index]: what they attached
  std::vector<Region*> regions;           // what they attached

  // Staging (proxy/staging.h). As a sender: slots that they granted, and how many they were asked for beyond these.
  std::vector<uint16_t> stage_slots;
  uint32_t stage_asked = 0;
  // As their receiver: what they asked for and did not get yet, what they hold, and tails that wait for copies to end.
  uint32_t stage_wanted = 0, stage_held = 0;
  std::vector<Record> stage_tails;
};

// Why an engine of that identity and generation will not be back, once that is known.
enum class Fate : uint32_t { kMayReturn, kRestarted, kClosed };
inline constexpr const char* kRestartedText =
    "another engine (a restarted one) lives at the peer's address: use the descriptors that it publishes now";
inline constexpr const char* kDeadText = "the peer's process has ended";
inline constexpr const char* kClosedText = "the peer closed its engine: a new one has a new address";

struct Peer {
  // Shared.
  int32_t index = -1;
  te_address address{};
  std::atomic<uint32_t> state{TE_PEER_IDLE};
  std::atomic<Fate> fate{Fate::kMayReturn};
  std::atomic<uint32_t> unread{0};      // messages received and not yet released by the application
  std::atomic<uint32_t> operations{0};  // submitted and not yet drained
  std::atomic<int64_t> last_heard_ns{0};
  std::atomic<uint64_t> consumed_bytes{0};  // of user messages, in this session
  std::atomic<uint32_t> session_number{0};  // tells old messages' consumption from new
  struct Statistics {
    std::atomic<uint64_t> writes{0}, write_bytes{0}, messages_sent{0}, messages_received{0}, immediates{0}, errors{0};
  } statistics;
  // Per NIC of ours: work requests of this session, and their bytes.
  Published<uint32_t> in_flight[TE_MAX_NICS];
  Published<uint64_t> bytes_in_flight[TE_MAX_NICS];

  Credits credits;  // of the session; the published parts of it are for everybody

  // Worker only.
  Link<Peer> scheduled_link;
  Link<Peer> known_link;                            // has or had a session
  List<Operation, &Operation::queue_link> waiting;  // for a connection or an attachment
  List<Operation, &Operation::queue_link> ready;
  List<Operation, &Operation::queue_link> messages;
  std::vector<Operation*> connects;  // te_peer_connect, te_peer_disconnect and te_peer_fence under way
  std::vector<Operation*> disconnects;
  std::vector<Operation*> fences;
  std::unordered_map<uint64_t, RemoteRegion*> remote_regions;  // by serial; filled at admission
  std::unordered_map<uint64_t, RemoteCounter*> remote_counters;
  uint64_t epoch = 1;                    // grows with everything that a Template (proxy/group.h) depends on
  uint32_t staged_arriving = 0;          // copies of what it sent that are under way, of all sessions
  uint32_t staged_former = 0;            // those of former ones
  uint32_t staged_own = 0;               // slots of ours that hold bytes for it
  uint32_t former_in_flight = 0;         // work requests of ended sessions that have not completed
  bool retired = false;                  // forgotten: see Worker::sweep_peers
  bool outcome_unknown = false;          // some request failed in a way after which its bytes may land later
  uint32_t next_nic = 0;                 // rotation of small writes
  uint32_t last_their_index = kNoIndex;  // of the session before this one
  uint64_t last_their_token = 0;
  int64_t stray_answered_ns = 0;
  Session session;

  bool gone() const { return fate.load(std::memory_order_relaxed) != Fate::kMayReturn; }
  Status gone_status() const { return restarted() ? Status::kPeerRestarted : Status::kPeerLost; }
  const char* gone_text() const { return restarted() ? kRestartedText : kClosedText; }
  bool restarted() const { return fate.load(std::memory_order_relaxed) == Fate::kRestarted; }
  bool connected() const { return state.load(std::memory_order_relaxed) == TE_PEER_CONNECTED; }
};

}  // namespace te
