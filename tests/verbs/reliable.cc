// Reliable connections: messages of one queue pair are placed in the order posted, piece by piece, and acknowledged later.
#include <algorithm>
#include <cstring>

#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"

namespace standin {
namespace {

void acknowledge(Fabric& f, Qp& pair, size_t count) {
  for (; count > 0; --count, --pair.placed) {
    const Send work = std::move(pair.sends.front());
    pair.sends.pop_front();
    complete_send(f, pair, work, IBV_WC_SUCCESS);
  }
}

// The message that is being placed ends with an error; those before it have arrived.
void fail(Fabric& f, Qp& pair, ibv_wc_status status) {
  acknowledge(f, pair, pair.placed);
  const Send work = std::move(pair.sends.front());
  pair.sends.pop_front();
  complete_send(f, pair, work, status);
  break_pair(f, pair);
}

// No answer: whether what was placed arrived is not known, so the first that is not acknowledged has the error.
void unanswered(Fabric& f, Qp& pair) {
  if (pair.attr.timeout != 0 && pair.retries >= pair.attr.retry_cnt) {
    pair.placed = 0;
    return fail(f, pair, IBV_WC_RETRY_EXC_ERR);
  }
  ++f.counts.retries;
  ++pair.retries;
  f.wait(pair, f.options.retry_ticks);
}

// The other side is not ready: everything before has arrived.
void not_ready(Fabric& f, Qp& pair) {
  ++f.counts.rnr;
  acknowledge(f, pair, pair.placed);
  if (pair.attr.rnr_retry != 7 && pair.rnr_retries >= pair.attr.rnr_retry)
    return fail(f, pair, IBV_WC_RNR_RETRY_EXC_ERR);
  ++pair.rnr_retries;
  f.wait(pair, f.options.rnr_ticks);
}

const ibv_gid& own_gid(const Qp& pair) { return pair.device->gids[pair.attr.ah_attr.grh.sgid_index]; }

bool same(const ibv_gid& a, const ibv_gid& b) { return std::memcmp(a.raw, b.raw, sizeof a.raw) == 0; }

// The queue pair at the other end, if it would answer.
Qp* responder(Fabric& f, const Qp& pair) {
  Device* device = device_with(f, pair.attr.ah_attr.grh.dgid);
  if (device == nullptr || !reachable(f, *pair.device, *device)) return nullptr;
  const auto found = device->pairs.find(pair.attr.dest_qp_num);
  if (found == device->pairs.end()) return nullptr;
  Qp& other = *found->second;
  const bool ready = other.now == IBV_QPS_RTR || other.now == IBV_QPS_RTS;
  if (other.qp_type != IBV_QPT_RC || !ready || context_of(other.context)->silent) return nullptr;
  const bool paired = other.attr.dest_qp_num == pair.qp_num && same(other.attr.ah_attr.grh.dgid, own_gid(pair)) &&
                      same(pair.attr.ah_attr.grh.dgid, own_gid(other));
  return paired ? &other : nullptr;
}

// The responder answers with an error and is broken itself.
void refuse(Fabric& f, Qp& pair, Qp& other, ibv_wc_status status, ibv_event_type event) {
  emit(f, other, event);
  break_pair(f, other);
  fail(f, pair, status);
}

void copy_out(Fabric& f, Qp& pair, const Send& work, uint32_t from, uint32_t length, uint8_t* to) {
  if (work.inlined) {
    if (length > 0) std::memcpy(to, work.payload.data() + from, length);
    return;
  }
  for (size_t i = 0; i < work.part_count && length > 0; ++i) {
    const ibv_sge& part = work.parts[i];
    if (from >= part.length) {
      from -= part.length;
      continue;
    }
    const uint32_t taken = std::min(length, part.length - from);
    const Mr* mr = local_memory(f, pair.pd, part, 0);
    std::memcpy(to, bytes_at(*mr, part.addr) + from, taken);
    to += taken;
    length -= taken;
    from = 0;
  }
}

void copy_in(Fabric& f, Qp& pair, const Send& work, const uint8_t* bytes) {
  for (size_t i = 0; i < work.part_count; ++i) {
    const ibv_sge& part = work.parts[i];
    if (part.length == 0) continue;
    const Mr* mr = local_memory(f, pair.pd, part, IBV_ACCESS_LOCAL_WRITE);
    std::memcpy(bytes_at(*mr, part.addr), bytes, part.length);
    bytes += part.length;
  }
}

bool local_memory_is_good(Fabric& f, Qp& pair, const Send& work) {
  if (work.inlined) return true;
  const unsigned access = work.opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
  for (size_t i = 0; i < work.part_count; ++i)
    if (work.parts[i].length > 0 && local_memory(f, pair.pd, work.parts[i], access) == nullptr) return false;
  return true;
}

bool is_send(const Send& work) { return work.opcode == IBV_WR_SEND || work.opcode == IBV_WR_SEND_WITH_IMM; }

ibv_wc arrival(const Send& work, ibv_wc_opcode opcode) {
  ibv_wc wc{};
  wc.opcode = opcode;
  wc.byte_len = work.length;
  if (work.with_immediate) {
    wc.imm_data = work.immediate;
    wc.wc_flags = IBV_WC_WITH_IMM;
  }
  return wc;
}

// The whole message has been placed.
void finish(Fabric& f, Qp& pair, Qp& other) {
  Send& work = pair.sends[pair.placed];
  const uint32_t steps = packets(work.length, pair.attr.path_mtu);
  pair.send_psn = (pair.send_psn + steps) & 0xffffff;
  other.expect_psn = (other.expect_psn + steps) & 0xffffff;
  const auto injected = static_cast<ibv_wc_status>(work.injected);
  if (injected != IBV_WC_SUCCESS) return fail(f, pair, injected);
  ++pair.placed;
}

void place_send(Fabric& f, Qp& pair, Qp& other) {
  const Send& work = pair.sends[pair.placed];
  const std::optional<Receive> receive = take_receive(f, other);
  if (!receive) return not_ready(f, pair);
  std::vector<uint8_t> bytes(work.length);
  copy_out(f, pair, work, 0, work.length, bytes.data());
  const ibv_wc_status status = fill(f, other, *receive, bytes.data(), bytes.size());
  complete_receive(f, other, receive->id, status, arrival(work, IBV_WC_RECV), work.solicited);
  if (status == IBV_WC_SUCCESS) {
    f.counts.bytes += work.length;
    return finish(f, pair, other);
  }
  violate("a receive of queue pair %u is %s for a message of %u bytes", other.qp_num,
          status == IBV_WC_LOC_LEN_ERR ? "too short" : "not registered for writing", work.length);
  refuse(f, pair, other, status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR,
         IBV_EVENT_QP_REQ_ERR);
}

void place_read(Fabric& f, Qp& pair, Qp& other) {
  const Send& work = pair.sends[pair.placed];
  if ((other.attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) == 0 || other.attr.max_dest_rd_atomic == 0) {
    violate("queue pair %u serves no reads", other.qp_num);
    return refuse(f, pair, other, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
  }
  arrive(f, other);
  if (work.length > 0) {
    const Mr* mr =
        remote_memory(f, other.pd, work.remote_address, work.length, work.remote_key, IBV_ACCESS_REMOTE_READ);
    if (mr == nullptr) return refuse(f, pair, other, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
    copy_in(f, pair, work, bytes_at(*mr, work.remote_address));
  }
  finish(f, pair, other);
}

// The next bytes of the message that is being placed, into the memory of the other side.
void put(Fabric& f, Qp& pair, Qp& other, const Mr& mr, uint64_t address, uint32_t length) {
  const Send& work = pair.sends[pair.placed];
  if (punctual(f, other, mr)) return copy_out(f, pair, work, work.placed, length, bytes_at(mr, address));
  Late late;
  late.target = &other;
  late.key = mr.rkey;
  late.relaxed = (mr.access & IBV_ACCESS_RELAXED_ORDERING) != 0;
  late.address = address;
  late.bytes.resize(length);
  copy_out(f, pair, work, work.placed, length, late.bytes.data());
  keep(f, std::move(late));
}

void place_write(Fabric& f, Qp& pair, Qp& other) {
  Send& work = pair.sends[pair.placed];
  if ((other.attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0) {
    violate("queue pair %u takes no writes", other.qp_num);
    return refuse(f, pair, other, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
  }
  const uint32_t rest = work.length - work.placed, unit = mtu_bytes(pair.attr.path_mtu);
  const uint32_t taken = work.pieces == 1 ? rest : std::min(rest, std::max(unit, rest / work.pieces / unit * unit));
  const uint64_t address = work.remote_address + work.placed;
  const Mr* mr = nullptr;
  if (taken > 0) {
    // All that is still to come is checked at once, as a device does when the message begins.
    mr = remote_memory(f, other.pd, address, rest, work.remote_key, IBV_ACCESS_REMOTE_WRITE);
    if (mr == nullptr) return refuse(f, pair, other, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
  }
  std::optional<Receive> receive;
  if (work.pieces == 1 && work.with_immediate) {
    receive = take_receive(f, other);
    if (!receive) return not_ready(f, pair);
  }
  if (taken > 0) {
    if (!pair.fast.on) put(f, pair, other, *mr, address, taken);
    work.placed += taken;
    f.counts.bytes += taken;
  }
  if (--work.pieces > 0) return;
  if (receive)
    complete_receive(f, other, receive->id, IBV_WC_SUCCESS, arrival(work, IBV_WC_RECV_RDMA_WITH_IMM), work.solicited);
  finish(f, pair, other);
}

// A message is begun when nothing of it has been placed yet. false: this step is over.
bool begin(Fabric& f, Qp& pair, Qp& other) {
  Send& work = pair.sends[pair.placed];
  if (pair.attr.path_mtu != other.attr.path_mtu) {
    violate("queue pair %u has a path MTU of %u, its peer %u has %u", pair.qp_num, mtu_bytes(pair.attr.path_mtu),
            other.qp_num, mtu_bytes(other.attr.path_mtu));
    if (pair.attr.path_mtu > other.attr.path_mtu) {
      refuse(f, pair, other, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
      return false;
    }
  }
  const uint64_t most =
      std::min<uint64_t>(packets(work.length, pair.attr.path_mtu), std::max<uint64_t>(f.options.pieces, 1));
  work.pieces = 1 + static_cast<uint32_t>(f.random.below(most));
  return true;
}

void place(Fabric& f, Qp& pair) {
  Send& work = pair.sends[pair.placed];
  if (work.injected != 0 && !work.injected_late) return fail(f, pair, static_cast<ibv_wc_status>(work.injected));
  if (work.length > f.options.max_msg) {
    violate("a message of %u bytes was posted; the port takes %lu", work.length,
            static_cast<unsigned long>(f.options.max_msg));
    return fail(f, pair, IBV_WC_LOC_LEN_ERR);
  }
  if (!local_memory_is_good(f, pair, work)) return fail(f, pair, IBV_WC_LOC_PROT_ERR);
  Qp* other = responder(f, pair);
  if (other == nullptr) return unanswered(f, pair);
  if (pair.send_psn != other->expect_psn) {
    if (pair.retries == 0)
      violate("queue pair %u sends with packet sequence number %u, its peer %u expects %u", pair.qp_num, pair.send_psn,
              other->qp_num, other->expect_psn);
    return unanswered(f, pair);
  }
  if (work.pieces == 0 && !begin(f, pair, *other)) return;
  pair.retries = 0;
  if (other->now == IBV_QPS_RTR && !other->established) {
    other->established = true;
    emit(f, *other, IBV_EVENT_COMM_EST);
  }
  if (is_send(work)) place_send(f, pair, *other);
  else if (work.opcode == IBV_WR_RDMA_READ) place_read(f, pair, *other);
  else place_write(f, pair, *other);
  if (pair.wake == 0) pair.rnr_retries = 0;
}

}  // namespace

void step_reliable(Fabric& f, Qp& pair) {
  const bool more = pair.placed < pair.sends.size();
  if (pair.placed == 0 || (more && f.random.below(2) == 0)) return place(f, pair);
  if (responder(f, pair) == nullptr) return unanswered(f, pair);
  acknowledge(f, pair, 1 + f.random.below(pair.placed));
}

void leave_ghosts(Fabric& f, Qp& pair) {
  if (pair.qp_type != IBV_QPT_RC || pair.now != IBV_QPS_RTS || pair.placed >= pair.sends.size()) return;
  const Send& work = pair.sends[pair.placed];
  const bool writes = work.opcode == IBV_WR_RDMA_WRITE || work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  if (!writes || work.injected != 0 || work.length > f.options.max_msg || !f.random.chance(f.options.ghosts)) return;
  Qp* other = responder(f, pair);
  if (other == nullptr || pair.send_psn != other->expect_psn || !local_memory_is_good(f, pair, work)) return;
  Ghost ghost;
  ghost.target = other;
  ghost.psn = other->expect_psn;
  ghost.key = work.remote_key;
  ghost.address = work.remote_address + work.placed;
  ghost.due = f.now + 1 + f.random.below(f.options.ud_delay_ticks);
  ghost.bytes.resize(std::min(work.length - work.placed, 4 * mtu_bytes(pair.attr.path_mtu)));
  copy_out(f, pair, work, work.placed, static_cast<uint32_t>(ghost.bytes.size()), ghost.bytes.data());
  f.ghosts.push_back(std::move(ghost));
}

}  // namespace standin
