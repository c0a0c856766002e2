// What engines say to each other over SEND/RECV: a header and a body. Pure encoding; who says what and when is the worker's
// business (proxy/). Every reader here takes bytes from the network: lengths are checked, unknown kinds are refused.
//
// Two classes of messages:
//   sequenced    records and fragments of user messages. At most `window` of them are unacknowledged, and the receiver keeps as
//                many buffers. Order is restored by sequence number, since some transports deliver out of order.
//   unsequenced  hello, acknowledgements, signs of life. Their content is cumulative or repeated, so order does not matter.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "native/provider.h"
#include "native/wire.h"

namespace te {

inline constexpr uint16_t kMessageMagic = 0x7E51;
inline constexpr uint8_t kMessageVersion = 2;
inline constexpr uint32_t kHeaderBytes = 40;
inline constexpr uint32_t kNoIndex = 0xFFFFFFFFu;

enum class MessageType : uint8_t {
  kHello = 1,
  kHelloAck = 2,
  kReject = 3,
  kRecords = 4,   // sequenced
  kFragment = 5,  // sequenced
  kAck = 6,
  kPing = 7,
  kPong = 8
};

struct MessageHeader {
  MessageType type = MessageType::kAck;
  bool first_fragment = false;       // kFragment: the body begins with the message's length
  uint32_t target_index = kNoIndex;  // the receiver's index of the sender, as it said in its hello
  uint64_t token = 0;                // the receiver's token of this session: strays and ghosts do not know it
  uint32_t sequence = 0;             // sequenced types
  uint32_t acknowledged = 0;         // all sequence numbers up to this one were received
  uint64_t consumed_bytes = 0;       // user message bytes that the application has taken, ever, in this session
  uint32_t body_bytes = 0;
};

// Writes into a span that the caller sized for the worst case (see the sizes below).
void write_header(const MessageHeader& header, std::span<uint8_t> out);
bool read_header(std::span<const uint8_t> bytes, MessageHeader* header);

// The opening of a session, and its answer. Both sides say the same things of themselves.
struct Hello {
  uint8_t target_identity[16] = {};  // whom the sender means: a restarted engine at this address answers kReject
  uint64_t target_generation = 0;
  te_address sender{};
  uint32_t sender_index = kNoIndex;  // to be used as target_index towards the sender
  uint64_t sender_token = 0;
  uint64_t echo_token = 0;  // kHelloAck: the token of the hello that it answers
  uint32_t session = 0;     // rises with each session that the sender opens with anybody
  uint32_t immediate_window = 0;
  uint32_t message_window = 0;
  uint32_t fragment_bytes = 0;  // length of the sender's receive buffers
  uint64_t message_queue_bytes = 0;
  uint64_t max_message_bytes = 0;
  std::vector<uint16_t> slots;  // assembly slots granted
};
inline constexpr uint32_t kMaxHelloSlots = 64;

enum class RejectReason : uint8_t { kRestarted = 1, kFull = 2, kUnknownSession = 3 };
struct Reject {
  RejectReason reason = RejectReason::kRestarted;
  uint64_t echo_token = 0;
  uint8_t identity[16] = {};  // who answers
  uint64_t generation = 0;
};

std::vector<uint8_t> encode(const Hello& hello);
std::vector<uint8_t> encode(const Reject& reject);
bool decode(std::span<const uint8_t> body, Hello* hello);
bool decode(std::span<const uint8_t> body, Reject* reject);

// Body of kAck, kPing, kPong: how many immediates this side has polled, per NIC of its own.
using ImmediateCounts = std::array<uint32_t, TE_MAX_NICS>;
uint32_t write_counts(const ImmediateCounts& counts, uint32_t nics, std::span<uint8_t> out);
bool read_counts(std::span<const uint8_t> body, ImmediateCounts* counts, uint32_t* nics);

enum class RecordType : uint8_t {
  kAttachRegion = 1,     // serial
  kRegionAttached = 2,   // serial, granted, length, slot bytes, keys (of the slots, where the region has slot bytes)
  kAttachCounter = 3,    // serial
  kCounterAttached = 4,  // serial, granted, id, index
  kRevokeRegion = 5,     // serial, temporary: the holder may attach again
  kRegionRevoked = 6,    // serial: nothing of the holder is in flight any more
  kRevokeCounter = 7,    // serial
  kCounterRevoked = 8,   // serial
  kSlots = 9,            // ids that the holder may use (again)
  kRetireSlot = 10,      // id, delivered, unknown
  kFence = 11,   // serial: make sure that nothing of mine lands in this region any more; 0: tell me when all that you
                 // posted towards me in former sessions has ended
  kFenced = 12,  // serial, granted
  kBye = 13,     // for_good; no more work from here; drain towards me and say so
  kByeDone = 14,
  kWriteOff =
      15,  // nics (which of the receiver's), index (how many): immediates whose work requests failed; they may never come
  // Regions that the NICs do not reach: see proxy/staging.h.
  kStageRequest = 16,  // index: slots that the sender has work for, beyond those it has
  kStageSlots = 17,    // ids of slots: granted to the receiver of this record
  kStageReturn = 18,   // ids of slots, unknown: not needed after all; or a write to them may still land in this session
  kStaged = 19,        // serial, token, slot (or kNoSlot), offset, length, id, count
  kStagedDone = 20     // token, granted: it is where it belongs, or never will be
};
inline constexpr uint16_t kNoSlot = 0xFFFF;

enum class Grant : uint8_t { kRefused = 0, kGranted = 1, kExhausted = 2 };

struct Record {
  RecordType type = RecordType::kBye;
  Grant granted = Grant::kRefused;
  bool temporary = false;
  bool for_good = false;  // kBye: this engine closes; it will not be back under this generation
  bool unknown = false;   // kRetireSlot: some part may or may not have landed
  uint8_t delivered = 0;  // kRetireSlot: parts whose immediate certainly arrives
  uint8_t nics = 0;
  uint16_t id = 0;
  uint16_t index = 0;
  uint16_t slot = kNoSlot;  // kStaged
  uint32_t token = 0;       // kStaged, kStagedDone
  uint32_t slot_bytes = 0;  // kRegionAttached: not 0 for a region that is reached through slots of so many bytes
  uint32_t count = 0;       // kStaged: how much the counter `id` rises; 0: none does
  uint64_t serial = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  std::array<uint64_t, TE_MAX_NICS> base{}, key{};
  std::vector<uint16_t> ids;  // kSlots, kStageSlots, kStageReturn
};

std::vector<uint8_t> encode(const Record& record);
// Takes one record off the reader; false when malformed.
bool decode(Reader* in, Record* record);

}  // namespace te
