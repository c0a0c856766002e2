// The objects behind the handles: each is the public structure with the stand-in's own state behind it. All of it is guarded by the
// fabric's mutex, except what fast.h says.
#pragma once

#include <infiniband/verbs.h>
// The names of the functions are wanted, not the macros before them.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tests/verbs/fast.h"

namespace standin {

inline constexpr int kGids = 4;  // slots of a port's table; the last two are empty
inline constexpr size_t kSges = 8;
inline constexpr uint8_t kNetwork = 88;  // of the IPv4 addresses, 10.88.0.0
inline constexpr uint32_t kGrhBytes = 40;
inline constexpr uint32_t kFirstNumber = 0x100;  // of queue pairs

struct Context;
struct Qp;

// Destroyed objects are kept for a while, so that their use can be told from the use of living ones.
struct Object {
  virtual ~Object() = default;
  bool alive = true;
};

struct Device : ibv_device {
  uint32_t index = 0;
  bool up = true, fatal = false;
  ibv_gid gids[kGids] = {};
  uint32_t next_number = kFirstNumber;
  std::unordered_map<uint32_t, Qp*> pairs;
  std::vector<Context*> contexts;
};

struct Context : verbs_context, Object {
  Device* owner = nullptr;
  uint64_t serial = 0;  // how many were opened before
  bool silent = false;
  uint32_t uses = 0;  // protection domains, completion queues, channels
  std::deque<ibv_async_event> events;
};

struct Pd : ibv_pd, Object {
  uint32_t uses = 0;
};

struct Mr : ibv_mr, Object {
  uint8_t* bytes = nullptr;  // what `iova` stands for
  uint64_t iova = 0;
  unsigned access = 0;
  void* mapping = nullptr;  // of a dma-buf
  size_t mapping_bytes = 0;
};

struct Ah : ibv_ah, Object {
  ibv_ah_attr attributes{};
};

struct Cq;
struct Channel : ibv_comp_channel, Object {
  uint32_t uses = 0;
  std::deque<Cq*> events;
};

struct Completion {
  ibv_wc wc{};
  Qp* pair = nullptr;
  bool send = false;
  uint64_t index = 0;  // of the work request in its send queue
};

struct Cq : ibv_cq, Object {
  uint32_t uses = 0;
  std::deque<Completion> entries;
  bool armed_solicited = false;
  bool overrun = false;
  uint64_t events_taken = 0, events_acknowledged = 0;
  uint64_t async_taken = 0, async_acknowledged = 0;
  FastQueue fast;
};

struct Receive {
  uint64_t id = 0;
  std::vector<ibv_sge> parts;
};

struct Srq : ibv_srq, Object {
  uint32_t uses = 0;
  ibv_srq_attr attributes{};
  std::deque<Receive> queue;
  bool begun = false;  // a receive has been used
  uint64_t async_taken = 0, async_acknowledged = 0;
};

// A posted send work request.
struct Send {
  uint64_t id = 0, index = 0;
  ibv_wr_opcode opcode = IBV_WR_SEND;
  bool signalled = false, solicited = false, inlined = false, with_immediate = false;
  __be32 immediate = 0;
  uint64_t remote_address = 0;
  uint32_t remote_key = 0;
  uint32_t length = 0, placed = 0;
  uint32_t pieces = 0;         // left; 0: not begun
  uint32_t injected = 0;       // a status that it is to end with
  bool injected_late = false;  // after it was placed
  size_t part_count = 0;
  std::array<ibv_sge, kSges> parts{};
  std::vector<uint8_t> payload;  // inlined
  ibv_ah_attr to{};              // datagrams
  uint32_t to_number = 0, to_key = 0;
};

struct Qp : ibv_qp, Object {
  uint64_t serial = 0;               // how many were created before
  ibv_qp_state now = IBV_QPS_RESET;  // ibv_qp::state is what the owner was told last
  ibv_qp_cap cap{};
  bool signal_all = false;
  ibv_qp_attr attr{};
  Device* device = nullptr;

  // sends[0, placed) are placed and not yet acknowledged; sends[placed] is the one that is being placed.
  std::deque<Send> sends;
  size_t placed = 0;
  uint64_t posted = 0, freed = 0;  // slots of the send queue: taken, given back by a polled completion
  std::deque<Receive> receives;    // without a shared receive queue
  uint32_t send_psn = 0, expect_psn = 0;
  uint32_t retries = 0, rnr_retries = 0;
  bool established = false;  // IBV_EVENT_COMM_EST was given
  uint64_t async_taken = 0, async_acknowledged = 0;

  size_t place = kNowhere;  // in Fabric::active
  uint64_t wake = 0;        // tick; 0: does not wait
  static constexpr size_t kNowhere = ~size_t{0};
  FastPair fast;
};

inline Context* context_of(ibv_context* context) {
  return static_cast<Context*>(
      reinterpret_cast<verbs_context*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context)));
}

}  // namespace standin
