// Staging: how memory that the NICs do not reach (a GPU's, on tcp and shm) takes part in transfers all the same.
//
// Each engine that has such a region keeps two sets of pinned slots, registered with its NICs. A transfer with a staged end is cut into
// *pieces* of at most one slot. The way of a piece:
//
//   source staged:  the copier fills a slot of ours from the device
//   then            one RDMA write, into the target itself, or, target staged, into a slot that its owner granted us
//   target staged:  a record (kStaged) says where the bytes belong; the owner's copier puts them there; its word (kStagedDone) comes back
//
// When all pieces have come to their end, and a counter is to rise, a *tail* follows: a kStaged record without bytes. So the counter rises
// when the bytes are in the memory of the receiving device, by exactly what the operation is worth, and never for one that failed.
//
// What holds:
//   - A piece counts as in flight (Operation::in_flight, Remote::in_flight) from its start to its end, whatever it is doing. So revocation,
//     close, goodbye, deadlines and quiescence work as for plain writes: nothing of a transfer that is quiesced is copied later.
//   - A slot has one user: it is granted to one peer, used for one write, and free again when its bytes were copied out. Those of a lost
//     peer are not used again before it is proven that the peer cannot write to them any more (Ghost::slots).
//   - Slots are few, and asked for by those who need them: so a peer takes part in turn, and their number does not grow with the peers.
//   - A session's loss leaves open whether the last pieces arrived. They stay in flight until the peer is proven dead, or its next session
//     answers a tail that counts nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "native/gpu/copier.h"
#include "native/provider.h"

namespace te {

struct Operation;
struct Peer;
struct Region;

// The slots and the copier. Made by a caller's thread, then constant until the engine closes.
struct Staging {
  const gpu::Cuda* cuda = nullptr;
  gpu::CuContext context = nullptr;
  uint8_t* memory = nullptr;  // `count` slots to send from, then as many to receive into
  uint32_t slot_bytes = 0, count = 0;
  MemoryKey keys[TE_MAX_NICS];
  uint32_t registered = 0;  // NICs
  std::unique_ptr<gpu::Copier> copier;

  uint64_t length() const { return uint64_t{2} * count * slot_bytes; }
  uint8_t* outgoing(uint32_t slot) const { return memory + uint64_t{slot} * slot_bytes; }
  uint8_t* incoming(uint32_t slot) const { return outgoing(count + slot); }
};

struct StagedCopy : gpu::CopyJob {
  explicit StagedCopy(bool piece) : is_piece(piece) {}
  const bool is_piece;
};

// The sender's half.
struct Piece : StagedCopy {
  Piece() : StagedCopy(true) {}
  enum class State : uint8_t { kIdle, kCopying, kReady, kWriting, kWaiting };  // kWaiting: for the owner's word
  static constexpr uint16_t kNone = 0xFFFF;

  State state = State::kIdle;
  bool empty = false;   // begun as a tail: nothing of it can be copied
  bool counts = false;  // its record raises the operation's counter
  uint32_t number = 0;  // its own, see StagingState::piece
  uint16_t own_slot = kNone, their_slot = kNone;
  uint32_t token = 0;
  uint32_t session = 0;  // of the peer
  Operation* operation = nullptr;
  Peer* peer = nullptr;
  void* from = nullptr;
  uint64_t target_offset = 0;
};

// The receiver's half: what comes into one slot.
struct Arrival : StagedCopy {
  Arrival() : StagedCopy(false) {}
  enum class Use : uint8_t {
    kFree,
    kGranted,
    kRetired,
    kGhost
  };  // kRetired: for this session, some write to it is in doubt
  Use use = Use::kFree;
  bool copying = false;
  Peer* peer = nullptr;  // kGranted: who may write to it
  Region* region = nullptr;
  Peer* from = nullptr;  // copying: whose bytes
  uint32_t session = 0, token = 0;
};

// Of the worker.
struct StagingState {
  static constexpr uint32_t kChunk = 256;           // pieces that are made at a time
  static constexpr uint32_t kMostPieces = 1 << 16;  // of which most wait for the word of peers that are gone
  static constexpr uint32_t kMostSlots = 8;         // that one peer may have at a time

  Piece& piece(uint32_t number) { return chunks[number / kChunk][number % kChunk]; }
  uint32_t made() const { return static_cast<uint32_t>(chunks.size()) * kChunk; }
  // False: there are no more.
  bool have_piece() {
    if (!free_pieces.empty()) return true;
    if (made() == kMostPieces) return false;
    const uint32_t first = made();
    chunks.emplace_back(new Piece[kChunk]);
    for (uint32_t i = kChunk; i > 0; --i) {
      Piece& made_now = chunks.back()[i - 1];
      made_now.number = made_now.token = first + i - 1;
      free_pieces.push_back(made_now.number);
    }
    return true;
  }

  std::vector<std::unique_ptr<Piece[]>> chunks;
  std::vector<uint32_t> free_pieces;
  std::deque<Piece*> ready;  // to be written
  std::vector<uint16_t> free_own;
  bool own_known = false;  // free_own was filled in
  uint32_t copying = 0;

  std::unique_ptr<Arrival[]> arrivals;
  std::vector<uint16_t> free_slots;
  std::deque<Peer*> asking;
};

}  // namespace te
