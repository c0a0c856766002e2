// Datagrams: sent, they are done; whether they arrive is another matter.
#include <algorithm>
#include <cstring>

#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"

namespace standin {
namespace {

// The forty bytes before the payload: a global route header, or its length with an IPv4 header in the end. What stands before that
// is undefined.
std::array<uint8_t, kGrhBytes> route_header(Fabric& f, const Datagram& d) {
  std::array<uint8_t, kGrhBytes> bytes{};
  const bool ipv4 = d.source.raw[10] == 0xff && d.source.raw[11] == 0xff;
  const auto length = static_cast<uint16_t>(d.payload.size());
  if (!ipv4) {
    bytes[0] = 0x60;
    bytes[4] = static_cast<uint8_t>(length >> 8);
    bytes[5] = static_cast<uint8_t>(length);
    bytes[6] = 17;
    bytes[7] = 64;
    std::memcpy(&bytes[8], d.source.raw, 16);
    std::memcpy(&bytes[24], d.target.raw, 16);
    return bytes;
  }
  for (size_t i = 1; i < 20; ++i) bytes[i] = static_cast<uint8_t>(f.random.word());
  bytes[20] = 0x45;
  bytes[22] = static_cast<uint8_t>(length >> 8);
  bytes[23] = static_cast<uint8_t>(length);
  bytes[28] = 64;
  bytes[29] = 17;
  std::memcpy(&bytes[32], d.source.raw + 12, 4);
  std::memcpy(&bytes[36], d.target.raw + 12, 4);
  return bytes;
}

// Who is not there, not ready, or has another key, does not notice.
Qp* receiver(Fabric& f, const Datagram& d) {
  Device* device = device_with(f, d.target);
  if (device == nullptr || !reachable(f, *d.from, *device)) return nullptr;
  const auto found = device->pairs.find(d.number);
  if (found == device->pairs.end()) return nullptr;
  Qp& pair = *found->second;
  const bool ready = pair.now == IBV_QPS_RTR || pair.now == IBV_QPS_RTS;
  const bool meant = pair.qp_type == IBV_QPT_UD && pair.attr.qkey == d.key;
  return ready && meant && !context_of(pair.context)->silent ? &pair : nullptr;
}

void deliver(Fabric& f, const Datagram& d) {
  Qp* pair = receiver(f, d);
  const std::optional<Receive> receive = pair != nullptr ? take_receive(f, *pair) : std::nullopt;
  if (!receive) {
    ++f.counts.datagrams_dropped;
    return;
  }
  const std::array<uint8_t, kGrhBytes> header = route_header(f, d);
  std::vector<uint8_t> bytes(header.begin(), header.end());
  bytes.insert(bytes.end(), d.payload.begin(), d.payload.end());
  const ibv_wc_status status = fill(f, *pair, *receive, bytes.data(), bytes.size());
  ibv_wc wc{};
  wc.opcode = IBV_WC_RECV;
  wc.byte_len = static_cast<uint32_t>(bytes.size());
  wc.src_qp = d.source_number;
  wc.wc_flags = IBV_WC_GRH | (d.with_immediate ? IBV_WC_WITH_IMM : 0);
  if (d.with_immediate) wc.imm_data = d.immediate;
  complete_receive(f, *pair, receive->id, status, wc, d.solicited);
  if (status == IBV_WC_SUCCESS) return;
  violate("a receive of queue pair %u is %s for a datagram of %zu bytes", pair->qp_num,
          status == IBV_WC_LOC_LEN_ERR ? "too short" : "not registered for writing", bytes.size());
  break_pair(f, *pair);
}

void launch(Fabric& f, Datagram d) {
  ++f.counts.datagrams;
  if (f.random.chance(f.options.ud_loss)) {
    ++f.counts.datagrams_lost;
    return;
  }
  d.due = f.now;
  if (f.random.chance(f.options.ud_delay)) d.due += 1 + f.random.below(f.options.ud_delay_ticks);
  if (f.random.chance(f.options.ud_reorder)) d.due += 1 + f.random.below(16);
  if (d.due > f.now) f.air.push_back(std::move(d));
  else deliver(f, d);
}

bool gather(Fabric& f, const Qp& pair, const Send& work, std::vector<uint8_t>* out) {
  if (work.inlined) {
    *out = work.payload;
    return true;
  }
  for (size_t i = 0; i < work.part_count; ++i) {
    const ibv_sge& part = work.parts[i];
    if (part.length == 0) continue;
    const Mr* mr = local_memory(f, pair.pd, part, 0);
    if (mr == nullptr) return false;
    const uint8_t* bytes = bytes_at(*mr, part.addr);
    out->insert(out->end(), bytes, bytes + part.length);
  }
  return true;
}

}  // namespace

void step_datagram(Fabric& f, Qp& pair) {
  const Send work = std::move(pair.sends.front());
  pair.sends.pop_front();
  Datagram d;
  const bool fits = work.length <= f.options.mtu;
  const bool readable = fits && gather(f, pair, work, &d.payload);
  if (!readable) {
    if (!fits)
      violate("a datagram of %u bytes was posted; the port takes %lu", work.length,
              static_cast<unsigned long>(f.options.mtu));
    complete_send(f, pair, work, fits ? IBV_WC_LOC_PROT_ERR : IBV_WC_LOC_LEN_ERR);
    return break_pair(f, pair);
  }
  d.from = pair.device;
  d.source = pair.device->gids[work.to.grh.sgid_index];
  d.target = work.to.grh.dgid;
  d.source_number = pair.qp_num;
  d.number = work.to_number;
  d.key = work.to_key;
  d.with_immediate = work.with_immediate;
  d.immediate = work.immediate;
  d.solicited = work.solicited;
  complete_send(f, pair, work, IBV_WC_SUCCESS);
  if (f.random.chance(f.options.ud_dup)) launch(f, d);
  launch(f, std::move(d));
}

void deliver_due(Fabric& f) {
  for (size_t i = 0; i < f.air.size();) {
    if (f.air[i].due > f.now) {
      ++i;
      continue;
    }
    const Datagram d = std::move(f.air[i]);
    f.air.erase(f.air.begin() + static_cast<ptrdiff_t>(i));
    deliver(f, d);
  }
}

}  // namespace standin
