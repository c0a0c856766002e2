#include "tests/verbs/execution.h"

#include <algorithm>
#include <cstring>

#include "tests/verbs/completions.h"

namespace standin {
namespace {

bool inside(uint64_t address, uint64_t length, uint64_t begin, uint64_t size) {
  return address >= begin && address - begin <= size && length <= size - (address - begin);
}

Mr* memory(const std::unordered_map<uint32_t, Mr*>& keys, const ibv_pd* domain, uint64_t address, uint64_t length,
           uint32_t key, unsigned access) {
  const auto found = keys.find(key);
  if (found == keys.end()) return nullptr;
  Mr* mr = found->second;
  const bool allowed = (mr->access & access) == access;
  return mr->pd == domain && allowed && inside(address, length, mr->iova, mr->length) ? mr : nullptr;
}

// One completion of what a broken queue pair still held.
void flush(Fabric& f, Qp& pair) {
  if (!pair.sends.empty()) {
    const Send work = std::move(pair.sends.front());
    pair.sends.pop_front();
    complete_send(f, pair, work, IBV_WC_WR_FLUSH_ERR);
  } else if (!pair.receives.empty()) {
    const uint64_t id = pair.receives.front().id;
    pair.receives.pop_front();
    complete_receive(f, pair, id, IBV_WC_WR_FLUSH_ERR, {}, false);
  }
}

void haunt(Fabric& f, const Ghost& ghost) {
  Qp& target = *ghost.target;
  if (target.now != IBV_QPS_RTR && target.now != IBV_QPS_RTS) return;
  if (target.expect_psn != ghost.psn || !target.device->up || target.device->fatal) return;
  const Mr* mr = remote_memory(f, target.pd, ghost.address, ghost.bytes.size(), ghost.key, IBV_ACCESS_REMOTE_WRITE);
  if (mr == nullptr) return;
  ++f.counts.ghosts;
  std::memcpy(bytes_at(*mr, ghost.address), ghost.bytes.data(), ghost.bytes.size());
}

}  // namespace

bool has_work(const Qp& pair) {
  const Context& context = *context_of(pair.context);
  if (context.silent || pair.device->fatal) return false;
  if (pair.now == IBV_QPS_ERR) return !pair.sends.empty() || !pair.receives.empty();
  return pair.now == IBV_QPS_RTS && !pair.sends.empty();
}

void step(Fabric& f, Qp& pair) {
  if (pair.now == IBV_QPS_ERR) return flush(f, pair);
  if (pair.qp_type == IBV_QPT_UD) return step_datagram(f, pair);
  step_reliable(f, pair);
}

void break_pair(Fabric& f, Qp& pair) {
  if (pair.now == IBV_QPS_ERR) return;
  leave_ghosts(f, pair);
  arrive(f, pair);
  pair.now = IBV_QPS_ERR;
  pair.fast.usable = false;
  pair.placed = 0;
  if (pair.wake != 0) std::erase(f.waiting, &pair);
  pair.wake = 0;
  if (pair.srq != nullptr) emit(f, pair, IBV_EVENT_QP_LAST_WQE_REACHED);
  f.schedule(pair);
}

// --- memory ---------------------------------------------------------------------------------------------------------

Mr* local_memory(Fabric& f, const ibv_pd* domain, const ibv_sge& part, unsigned access) {
  return memory(f.local_keys, domain, part.addr, part.length, part.lkey, access);
}

Mr* remote_memory(Fabric& f, const ibv_pd* domain, uint64_t address, uint64_t length, uint32_t key, unsigned access) {
  return memory(f.remote_keys, domain, address, length, key, access);
}

// --- receives -------------------------------------------------------------------------------------------------------

std::optional<Receive> take_receive(Fabric& f, Qp& pair) {
  Srq* shared = static_cast<Srq*>(pair.srq);
  std::deque<Receive>& queue = shared != nullptr ? shared->queue : pair.receives;
  if (queue.empty()) return std::nullopt;
  const bool shuffle = shared != nullptr && f.options.srq_shuffle != 0;
  const auto chosen =
      queue.begin() + (shuffle ? static_cast<ptrdiff_t>(f.random.below(std::min<size_t>(queue.size(), 4))) : 0);
  Receive receive = std::move(*chosen);
  queue.erase(chosen);
  if (shared != nullptr) shared->begun = true;
  if (shared != nullptr && shared->attributes.srq_limit > queue.size()) {
    shared->attributes.srq_limit = 0;
    emit(f, *shared, IBV_EVENT_SRQ_LIMIT_REACHED);
  }
  return receive;
}

ibv_wc_status fill(Fabric& f, Qp& pair, const Receive& receive, const uint8_t* bytes, size_t length) {
  const ibv_pd* domain = pair.srq != nullptr ? pair.srq->pd : pair.pd;
  for (const ibv_sge& part : receive.parts) {
    const size_t taken = std::min<size_t>(part.length, length);
    if (taken == 0) continue;
    const Mr* mr = local_memory(f, domain, part, IBV_ACCESS_LOCAL_WRITE);
    if (mr == nullptr) return IBV_WC_LOC_PROT_ERR;
    std::memcpy(bytes_at(*mr, part.addr), bytes, taken);
    bytes += taken;
    length -= taken;
  }
  return length > 0 ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

// --- the network ----------------------------------------------------------------------------------------------------

Device* device_with(Fabric& f, const ibv_gid& gid) {
  if (gid.global.subnet_prefix == 0 && gid.global.interface_id == 0) return nullptr;  // as are empty slots
  for (const auto& device : f.devices)
    for (const ibv_gid& own : device->gids)
      if (std::memcmp(own.raw, gid.raw, sizeof gid.raw) == 0) return device.get();
  return nullptr;
}

bool reachable(const Fabric& f, const Device& from, const Device& to) {
  return from.up && to.up && !from.fatal && !to.fatal && !f.faults.cuts.contains(std::minmax(from.index, to.index));
}

uint32_t packets(uint32_t length, ibv_mtu mtu) { return length == 0 ? 1 : (length - 1) / mtu_bytes(mtu) + 1; }

void haunt_due(Fabric& f) {
  for (size_t i = 0; i < f.ghosts.size();) {
    if (f.ghosts[i].due > f.now) {
      ++i;
      continue;
    }
    const Ghost ghost = std::move(f.ghosts[i]);
    f.ghosts.erase(f.ghosts.begin() + static_cast<ptrdiff_t>(i));
    haunt(f, ghost);
  }
}

}  // namespace standin
