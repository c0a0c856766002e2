#include "cx7/limits.h"

#ifdef TE_HAVE_VERBS
#include <algorithm>
#include <bit>
#include <cerrno>

namespace te::cx7 {
namespace {

constexpr uint32_t kDefaultSends = 512;
constexpr uint32_t kFewestSends = 16;
constexpr uint32_t kFewestReceives = 16;
constexpr uint32_t kMarkers = 8;  // entries for requests of our own (datapath.cc)
constexpr uint32_t kFewestCompletions = 2 * (kFewestSends + kMarkers) + kFewestReceives;
constexpr uint32_t kIncoming = 128, kOutgoing = 64, kDatagramEntries = 512;

struct Need {
  const char* limit;
  int has;
  uint32_t needed;
  const char* why;
};

}  // namespace

Error fit_queues(const std::string& nic, const ibv_device_attr& device, uint32_t sends, uint32_t completions,
                 QueueSizes* out) {
  const Need needs[] = {
      {"max_qp", device.max_qp, 3, "queue pairs: one for datagrams, two for a connection"},
      {"max_cq", device.max_cq, 2, "completion queues"},
      {"max_srq", device.max_srq, 2, "shared receive queues"},
      {"max_sge", device.max_sge, 1, "pieces of memory in a work request"},
      {"max_srq_sge", device.max_srq_sge, 1, "pieces of memory in a shared receive"},
      {"max_qp_wr", device.max_qp_wr, kFewestSends, "work requests in a queue pair"},
      {"max_srq_wr", device.max_srq_wr, kFewestReceives, "receives in a shared receive queue"},
      {"max_cqe", device.max_cqe, kFewestCompletions, "entries in a completion queue"},
  };
  for (const Need& need : needs) {
    if (need.has >= 0 && static_cast<uint32_t>(need.has) >= need.needed) continue;
    return Error(Status::kTransportUnavailable,
                 format("NIC %s cannot be used: its device has %s = %d, and transport cx7 needs at least %u (%s)",
                        nic.c_str(), need.limit, need.has, need.needed, need.why),
                 EINVAL);
  }
  const auto most = [](int limit, uint32_t wanted) { return std::min(static_cast<uint32_t>(limit), wanted); };
  QueueSizes q;
  const uint32_t wanted = std::bit_ceil(sends == 0 ? kDefaultSends : sends + 1);
  // The completion queue must hold all of a NIC's requests and both queues of receives at once: it cannot be seen to overrun, and an overrun
  // is the end of every connection. So at most half of what there is goes to requests.
  q.sends =
      std::max(kFewestSends, std::min(most(device.max_qp_wr, wanted), most(device.max_cqe, UINT32_MAX) / 2 - kMarkers));
  q.completions = most(device.max_cqe, std::max(completions, 4 * q.sends));
  const uint32_t own = q.sends + kMarkers;
  q.receives = most(device.max_srq_wr, (q.completions - own) / 2);
  // Each immediate takes a receive, so no more may be granted than there are. The engine takes `own`, or half where that is less, off
  // what it is told, and grants half of the rest (proxy/worker.cc).
  q.granted = std::min(q.completions, 2 * q.receives + std::min(own, 2 * q.receives));
  // All datagrams may have to be reported at once, too.
  q.datagram_entries = most(device.max_cqe, kDatagramEntries);
  q.incoming = std::min(most(device.max_qp_wr, kIncoming), q.datagram_entries / 2);
  q.outgoing = std::min(most(device.max_qp_wr, kOutgoing), q.datagram_entries / 4);
  *out = q;
  return {};
}

}  // namespace te::cx7
#endif
