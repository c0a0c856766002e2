// How long a NIC's queues are made: as wished for, or as long as the device allows. Pure.
#pragma once

#include "cx7/library.h"

#ifdef TE_HAVE_VERBS
#include <cstdint>
#include <string>

namespace te::cx7 {

struct QueueSizes {
  uint32_t sends = 0;             // work requests of each reliable queue pair
  uint32_t completions = 0;       // entries of the completion queue that all of those share
  uint32_t receives = 0;          // of each of the two shared receive queues
  uint32_t granted = 0;           // Capabilities::completion_depth: what the engine may divide among its peers
  uint32_t incoming = 0;          // receives of the datagram queue pair
  uint32_t outgoing = 0;          // its sends
  uint32_t datagram_entries = 0;  // of its completion queue
};

// `sends` and `completions`: wished for, 0 where there is no wish. A device that is too small for even the shortest queues is refused by
// name, with the limit and what is needed (kTransportUnavailable).
Error fit_queues(const std::string& nic, const ibv_device_attr& device, uint32_t sends, uint32_t completions,
                 QueueSizes* out);

}  // namespace te::cx7
#endif
