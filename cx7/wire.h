// What travels before two NICs have a connection: the address of a NIC and the messages of the handshake. Pure encoding, of
// foreign bytes too: lengths are checked, a checksum closes each message, unknown kinds are refused.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "native/wire.h"

namespace te::cx7 {

// Where a NIC's bootstrap queue pair (UD) listens. The cookie is random per start: it tells two engines apart that were given the
// same queue pair number one after the other.
struct NicAddress {
  uint8_t gid[16] = {};
  uint16_t lid = 0;
  bool ethernet = true;
  uint32_t queue_pair = 0;
  uint32_t queue_key = 0;
  uint64_t cookie = 0;

  bool operator==(const NicAddress&) const = default;
};

te_nic_address encode(const NicAddress& address);
bool decode(const te_nic_address& bytes, NicAddress* address);

// The two reliable queue pairs of a connection, as the other side must know them.
enum : uint8_t { kMessages = 0, kWrites = 1, kPairs = 2 };
struct QueuePairs {
  std::array<uint32_t, kPairs> number{};
  std::array<uint32_t, kPairs> sequence{};  // first packet sequence number that will be sent
  uint8_t mtu = 0;                          // enum ibv_mtu: the longest packet that the port takes
  uint8_t reads = 0;                        // RDMA reads that it serves at a time

  bool operator==(const QueuePairs&) const = default;
};

enum class HandshakeKind : uint8_t {
  kOffer = 1,  // here are my queue pairs; see Handshake for when it is repeated and answered
  kBye = 2,    // I have closed the attempt `attempt`
  kRefuse = 3  // I cannot or do not want to: `refusal`
};

enum class Refusal : uint8_t {
  kStale = 1,    // the message was meant for an engine that is no longer here
  kUnknown = 2,  // `echo` is no attempt of mine that lives: begin again
  kFull = 3,     // no room for another connection
  kVersion = 4   // I speak another version
};

struct HandshakeMessage {
  HandshakeKind kind = HandshakeKind::kOffer;
  uint8_t version = 0;        // as received; written always as ours
  uint8_t identity[16] = {};  // of the engine that sends
  uint64_t generation = 0;    // likewise
  NicAddress sender;
  uint64_t target_cookie = 0;      // whom it means
  uint64_t target_generation = 0;  // likewise; 0: not known
  uint64_t attempt = 0;            // of the sender: rises with each pair of queue pairs that it makes
  uint64_t echo = 0;               // the receiver's attempt to which the sender's queue pairs are bound; 0: to none yet
  bool ready = false;              // the sender knows that the receiver is bound to it
  QueuePairs pairs;
  Refusal refusal = Refusal::kStale;
};

inline constexpr uint32_t kHandshakeMagic = 0x51'58'37'74;
inline constexpr uint8_t kHandshakeVersion = 1;
inline constexpr size_t kHandshakeBytes = 128;
using HandshakeBytes = std::array<uint8_t, kHandshakeBytes>;

enum class Readable : uint8_t { kYes, kOtherVersion, kNo };
HandshakeBytes encode(const HandshakeMessage& message);
// All versions have the sender, whom it means, attempt and echo in the same places. kOtherVersion: an offer of which only these
// can be relied on. A refusal for the version (kVersion) is understood whoever says it, or its sender could not be told.
Readable decode(std::span<const uint8_t> bytes, HandshakeMessage* message);

}  // namespace te::cx7
