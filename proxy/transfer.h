// te_transfer: the outcome of one operation, as the caller sees it. Separate from the operation (proxy/operation.h), which lives in a
// fixed slab and goes back as soon as its work requests are drained: an application may keep as many ended transfers as it likes.
//
// State is one word of bits, so that "has it ended?" and "tell me when" cannot miss each other:
//   the worker  fills in the result, then ORs kDone in (acq_rel); if the old value had kNotify it queues an event, if kSleeper it wakes.
//   a caller    ORs kNotify or kSleeper in (acq_rel); if the old value had kDone it acts at once, and no event will come.
// Both are read-modify-write operations on one word, hence totally ordered: exactly one of the two sees the other's bit.
// The result fields are written before kDone (release) and read after it was seen (acquire).
//
// Records come from one process-wide pool that never shrinks (their number is bounded by what callers hold at once), so a
// record may outlive its engine.
#pragma once

#include <atomic>
#include <cstdint>

#include "native/status.h"
#include "native/system.h"
#include "native/te.h"

namespace te {
class Engine;
struct Trigger;
}  // namespace te

struct te_transfer {
  enum : uint32_t { kDone = 1, kNotify = 2, kSleeper = 4, kQuiesced = 8 };

  std::atomic<uint32_t> state{0};
  std::atomic<uint32_t> references{0};  // the caller's, and one for the engine until everything is drained
  std::atomic<bool> cancel_requested{false};
  te::Engine* engine = nullptr;  // valid until kDone
  int64_t submitted_ns = 0;
  int64_t finished_ns = 0;

  // Worker only.
  uint32_t unfinished = 0;                     // operations that have not ended
  uint32_t undrained = 0;                      // operations with work requests that may still land
  std::atomic<uint32_t>* under_way = nullptr;  // counts it until it ends; see Target
  te::Trigger* trigger = nullptr;              // whose firing this is, until it ends
  bool trigger_posted = false;                 // and has been told that it went out

  // The result: written before kDone.
  te::Status status = te::Status::kOk;
  int32_t provider_status = 0;
  int16_t nic = -1;
  int32_t peer = -1;
  char detail[160] = {};

  // Scatters only: the members whose part failed; and when the worker came by, by CLOCK_MONOTONIC.
  struct FailedMember {
    uint32_t member;
    te_error error;
    FailedMember* next;
  };
  FailedMember *first_failed = nullptr, *last_failed = nullptr;
  int64_t taken_ns = 0, first_post_ns = 0, posted_ns = 0;

  uint64_t user = 0;
  te_transfer* next = nullptr;  // in the engine's event stack, or the pool's free list

  bool ended() const { return (state.load(std::memory_order_acquire) & kDone) != 0; }
};

namespace te {

// A record with `references` set to 2; null only when memory is exhausted.
te_transfer* acquire_transfer(Engine* engine, uint32_t operations);
void release_transfer(te_transfer* transfer);
uint32_t transfers_alive();

// The first failure decides; later ones of the same transfer are consequences. Worker thread, before finish.
void note_failure(te_transfer* transfer, Status status, int provider_status, int nic, int peer, const char* detail);
// Worker thread, before finish.
void note_member(te_transfer* transfer, uint32_t member, Status status, int provider_status, int nic, int peer,
                 int64_t now_ns, const char* detail);
// Spins briefly, then sleeps, until one of `bits` is set. True when it is.
bool wait_for_bits(te_transfer* transfer, uint32_t bits, int64_t timeout_ns);
void export_result(const te_transfer& transfer, te_error* out);

}  // namespace te
