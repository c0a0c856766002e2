// Which RDMA ports there are and how each is addressed: the rule, apart from any library. All of it is read from sysfs below a root that
// tests replace, so the rule can be held against recorded machines, and doctor shows what the transport would do.
//
// The rule for a GID (when setting gid_index is -1): on Ethernet RoCEv2 goes before RoCEv1, and in each an IPv4-mapped
// address before a global IPv6 one before a link-local one. Among equals those go first whose interface is in this network
// namespace (containers that share a device find each other's addresses in its table), then the lowest index. InfiniBand takes
// index 0, whose prefix the subnet manager gave, and needs a LID. A port that cannot be used is never chosen; to name it is an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native/status.h"
#include "native/te.h"

namespace te::cx7 {

enum class GidKind : uint8_t { kInfiniBand, kRoceV1, kRoceV2 };
const char* gid_kind_name(GidKind kind);  // "InfiniBand", "RoCE v1", "RoCE v2"

struct Port {
  std::string device;  // "mlx5_0"
  uint8_t number = 1;
  std::string state;  // "ACTIVE", "DOWN", ... as sysfs has it
  bool active = false;
  std::string link_layer;  // "Ethernet", "InfiniBand"; others cannot be used
  bool ethernet = false;
  uint16_t lid = 0;
  std::string interface;  // network interface of the chosen GID, or of the port; may be empty
  int32_t gid_index = -1;
  GidKind gid_kind = GidKind::kRoceV2;
  uint8_t gid[16] = {};
  std::string why;          // why this GID: "RoCE v2, IPv4-mapped, lowest index of 2"
  std::string unusable;     // empty, or why no connection can be made from this port
  std::string remedy;       // what to do about that; may be empty
  bool by_setting = false;  // it is unusable because of gid_index or pkey_index
};

// Every port of every device, in the order of device names (numbers as numbers) and ports, each with the GID that the rule and the
// settings give. Ports that cannot be used say why. An absent /sys/class/infiniband is no error: there are none.
// With the name of a network interface only the ports that have a GID of it, or are its own, and the rule chooses among those GIDs.
std::vector<Port> list_ports(const std::string& root, const te_rdma_settings& settings,
                             const std::string& interface = "");

// The ports that a transport opens: those named, or all usable ones (at most TE_MAX_NICS) when none is named; `count` (0: all) bounds it.
// "device" is its first active port, else its first; "device:port" exactly that one; "interface" the first active port with a
// GID of that network interface (a VLAN's or container's, say), and that GID. Errors (kTransportUnavailable: no device here, or
// none that can be used; kConfig: a name that does not exist or is there twice, a named port that cannot be used, a GID or pkey
// index that does not exist, more wanted than there are) name the value, what there is, and what to do.
Error choose_ports(const std::string& root, const te_rdma_settings& settings, const std::vector<std::string>& names,
                   uint32_t count, std::vector<Port>* out);

}  // namespace te::cx7
