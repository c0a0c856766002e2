// The objects behind the handles: each is the public structure with the stand-in's own state behind it. All of it is
// guarded by the fabric's mutex, except what free.h says.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "tests/fabric/free.h"

namespace srd {

inline constexpr uint64_t kNever = ~uint64_t{0};

// EFA's completion statuses (enum efa_io_comp_status of efa_io_defs.h), which libfabric passes on as prov_errno.
enum Status : uint32_t {
  kDone = 0,
  kFlushed = 1,
  kBadHandle = 4,
  kBadLocalKey = 5,
  kBadLocalLength = 6,
  kBadRemoteAddress = 7,
  kRemoteAbort = 8,
  kBadQueuePair = 9,
  kNoReceive = 10,
  kBadRemoteLength = 11,
  kUnresponsive = 13,
  kUnknownPeer = 14,
  kUnreachable = 15,
};

struct Endpoint;

// What fi_getname gives: GID, queue pair number, queue key, as EFA's addresses are laid out.
struct Address {
  uint8_t gid[16] = {};
  uint16_t number = 0, reserved = 0;
  uint32_t key = 0;
  uint64_t unused = 0;

  auto operator<=>(const Address&) const = default;
};
static_assert(sizeof(Address) == 32);

struct Device {
  uint32_t index = 0;
  bool lost = false;
  std::map<uint16_t, Endpoint*> endpoints;  // by queue pair number
};

struct Fabrication : fid_fabric {  // of the fabric efa-direct or efa
  bool direct = true;
  uint32_t uses = 0;
};

struct Domain : fid_domain {
  Fabrication* fabric = nullptr;
  Device* device = nullptr;
  uint32_t uses = 0;
};

struct Region : fid_mr {
  Domain* domain = nullptr;
  uint8_t* base = nullptr;
  uint64_t length = 0, access = 0;
};

struct Vector : fid_av {
  Domain* domain = nullptr;
  uint32_t uses = 0;
  std::map<Address, fi_addr_t> known;
  std::vector<const Address*> entries;  // by fi_addr_t; null: removed
};

// An entry of a completion queue.
struct Entry {
  fi_cq_err_entry public_part{};
  Endpoint* endpoint = nullptr;
  bool transmit = false;
  bool used_receive = false;
};

struct Queue : fid_cq {
  Domain* domain = nullptr;
  uint32_t uses = 0;
  size_t size = 0;
  fi_cq_format format = FI_CQ_FORMAT_DATA;
  std::deque<Entry> entries;
  int descriptor = -1;  // readable: a completion came after it was armed
  bool armed = false, overrun = false;
  FreeQueue free;
};

struct Receive {
  uint8_t* buffer = nullptr;
  uint64_t length = 0, descriptor = 0;
  void* context = nullptr;
};

enum class Kind : uint8_t { kWrite, kRead, kSend };

// A work request from its post until its completion is in the queue.
struct Request {
  Kind kind = Kind::kWrite;
  bool with_immediate = false;
  bool placed = false;  // wholly, immediate included: what is left is the acknowledgement
  bool landed = false;  // the injected error comes after all is placed
  uint32_t immediate = 0;
  uint32_t injected = kDone;
  Endpoint* endpoint = nullptr;
  Address target{};
  uint8_t* local = nullptr;
  uint64_t length = 0, descriptor = 0, remote = 0, key = 0;
  void* context = nullptr;
  uint32_t pieces = 1, missing = 1;  // how many, and a bit for each that is not placed
  uint64_t tries = 0;
  uint64_t wake = 0;        // waits until this tick
  size_t place = SIZE_MAX;  // among the active
};

struct Endpoint : fid_ep {
  Domain* domain = nullptr;
  Device* device = nullptr;
  Vector* vector = nullptr;
  Queue *transmit = nullptr, *receive = nullptr;
  Address address{};
  uint64_t serial = 0;
  bool direct = true, enabled = false, silent = false;
  bool unsolicited = false;  // immediates use no receive
  size_t transmit_size = 0, receive_size = 0;
  size_t transmits = 0, receives_used = 0;  // until their completions are read
  std::deque<Request*> posted;              // in that order, whose completions are not in the queue
  std::vector<Request*> held;               // by FI_MORE
  std::deque<Receive> receives;
  bool free = false;
};

}  // namespace srd
