#include "cx7/ports.h"

#include <algorithm>
#include <cstring>

#include "cx7/gids.h"
#include "cx7/sysfs.h"

namespace te::cx7 {
namespace {

constexpr const char* kClass = "/sys/class/infiniband";

// "0-3, 7" of the entries' indices: what may be set. Long tables are cut.
std::string ranges(const std::vector<int32_t>& sorted) {
  constexpr int kMost = 8;
  std::string text;
  int shown = 0;
  for (size_t i = 0; i < sorted.size(); ++shown) {
    size_t last = i;
    while (last + 1 < sorted.size() && sorted[last + 1] == sorted[last] + 1) ++last;
    if (shown == kMost) return text + ", ...";
    text += format("%s%d", text.empty() ? "" : ", ", sorted[i]);
    if (last > i) text += format("-%d", sorted[last]);
    i = last + 1;
  }
  return text.empty() ? "none" : text;
}

// An index that was set and does not lead to an entry.
std::string no_such_slot(const char* setting, uint32_t index, uint32_t slots, const std::vector<int32_t>& filled) {
  const std::string what =
      index < slots ? "that slot is empty" : format("the port's table has %u slots", static_cast<unsigned>(slots));
  return format("setting %s is %u, but %s; filled are %s", setting, static_cast<unsigned>(index), what.c_str(),
                ranges(filled).c_str());
}

// One port while it is being judged. The first reason against it is the one that is kept: it is the one to remedy first.
class Judge {
 public:
  Judge(const std::string& root, const std::string& device, uint8_t number, const te_rdma_settings& settings)
      : root_(root), settings_(settings), device_(root + kClass + "/" + device) {
    port_.device = device;
    port_.number = number;
    directory_ = device_ + "/ports/" + std::to_string(number);
  }

  Port judge() {
    const std::string state = read_line(directory_ + "/state");  // "4: ACTIVE"
    port_.state = state.substr(state.find(": ") == std::string::npos ? 0 : state.find(": ") + 2);
    port_.active = port_.state == "ACTIVE";
    if (port_.state.empty()) port_.state = "unknown";
    layer_ = read_line(directory_ + "/link_layer");
    port_.ethernet = layer_ == "Ethernet";
    port_.lid = static_cast<uint16_t>(parse_number(read_line(directory_ + "/lid"), 0xffff).value_or(0));
    const GidTable table = read_gids(root_, directory_, port_.ethernet);
    find_interface(table);
    check_device();
    check_link();
    choose_gid(table);
    check_pkey();
    return std::move(port_);
  }

 private:
  void refuse(std::string reason, bool by_setting = false) {
    if (!port_.unusable.empty()) return;
    port_.unusable = std::move(reason);
    port_.by_setting = by_setting;
  }

  const char* interface_or(const char* other) const {
    return port_.interface.empty() ? other : port_.interface.c_str();
  }

  void find_interface(const GidTable& table) {
    for (const GidEntry& entry : table.entries)
      if (port_.interface.empty()) port_.interface = entry.interface;
    if (port_.interface.empty()) port_.interface = read_line(device_ + "/parent");  // of Soft-RoCE
    if (!port_.interface.empty()) return;
    // Ports of one PCI function share a directory; dev_port counts them from 0.
    const std::vector<std::string> names = names_in(device_ + "/device/net");
    for (const std::string& name : names)
      if (names.size() == 1 || parse_number(read_line(device_ + "/device/net/" + name + "/dev_port"), 255) ==
                                   static_cast<uint32_t>(port_.number - 1)) {
        port_.interface = name;
        return;
      }
  }

  // A channel adapter ("1: CA") has both kinds of queue pairs that are needed: reliable connections, and unreliable datagrams to make them.
  void check_device() {
    const std::string type = read_line(device_ + "/node_type");
    if (layer_ == "Unspecified" || type.starts_with("7") || link_name(device_ + "/device/driver") == "efa")
      return refuse("an EFA device has no reliable connections: use it with transport efa");
    if (type.starts_with("4")) return refuse("an iWARP device has no datagrams, by which connections are made");
    if (!type.empty() && !type.starts_with("1"))
      return refuse(format("a device of node type '%s' has no reliable connections", type.c_str()));
    if (!port_.ethernet && layer_ != "InfiniBand")
      refuse(format("link layer '%s' is neither Ethernet nor InfiniBand", layer_.c_str()));
  }

  void check_link() {
    if (!port_.active) {
      const std::string physical = read_line(directory_ + "/phys_state");  // "3: Disabled"
      std::string what = "the port is " + port_.state;
      if (!physical.empty()) what += " (" + physical.substr(physical.find(' ') + 1) + ")";
      if (port_.ethernet)
        return refuse(what + format(": `ip link set %s up`, then check cable and switch", interface_or("INTERFACE")));
      if (port_.state == "INIT" || port_.state == "ARMED")
        return refuse(what + ": the subnet manager has not set it up; start one (opensm) or check the switch's");
      return refuse(what + ": check cable and switch");
    }
    // From 0xc000 on LIDs are those of multicast groups.
    if (!port_.ethernet && (port_.lid == 0 || port_.lid >= 0xc000))
      refuse(
          format("LID %u is none of a port: the subnet manager has not set it up; start one (opensm) or check the "
                 "switch's",
                 static_cast<unsigned>(port_.lid)));
  }

  void choose_gid(const GidTable& table) {
    const std::vector<GidEntry>& entries = table.entries;
    std::vector<int32_t> filled;
    for (const GidEntry& entry : entries) filled.push_back(entry.index);
    if (entries.empty()) {
      if (!port_.ethernet) return refuse("the port has no GID: check the subnet manager");
      return refuse(format("the port has no GID: give %s an address, `ip address add ADDRESS/BITS dev %s`",
                           interface_or("its interface"), interface_or("INTERFACE")));
    }
    if (settings_.gid_index < 0 && port_.ethernet) {
      const GidEntry& best = *std::min_element(entries.begin(), entries.end(), better);
      const auto equals = std::count_if(entries.begin(), entries.end(),
                                        [&](const GidEntry& other) { return equally_good(best, other); });
      take(best);
      port_.why += equals > 1           ? format(", lowest index of %d", static_cast<int>(equals))
                   : entries.size() > 1 ? format(", best of %zu", entries.size())
                                        : ", the only one";
      if (address_kind(best.gid) == AddressKind::kLinkLocal)
        port_.why += "; peers must be on the same Ethernet segment";
      return;
    }
    const int32_t index = std::max(settings_.gid_index, 0);
    const auto found =
        std::find_if(entries.begin(), entries.end(), [&](const GidEntry& e) { return e.index == index; });
    if (found == entries.end()) {
      if (settings_.gid_index < 0) return refuse("the port has no GID 0: check the subnet manager");
      return refuse(no_such_slot("gid_index", static_cast<uint32_t>(index), table.slots, filled), true);
    }
    take(*found);
    port_.why += settings_.gid_index < 0 ? ", index 0" : format(", gid_index %d as set", index);
  }

  void take(const GidEntry& entry) {
    port_.gid_index = entry.index;
    port_.gid_kind = entry.kind;
    std::memcpy(port_.gid, entry.gid.data(), entry.gid.size());
    if (!entry.interface.empty()) port_.interface = entry.interface;
    port_.why = gid_kind_name(entry.kind);
    if (port_.ethernet) port_.why += format(", %s", address_kind_name(address_kind(entry.gid)));
  }

  void check_pkey() {
    const std::vector<std::string> names = names_in(directory_ + "/pkeys");
    uint32_t slots = 0;
    std::vector<int32_t> filled;
    for (const std::string& name : names) {
      const std::optional<uint32_t> index = parse_number(name, 0xffff);
      if (!index) continue;
      slots = std::max(slots, *index + 1);
      const std::optional<uint32_t> key = parse_number(read_line(directory_ + "/pkeys/" + name), 0xffff);
      if (key && (*key & 0x7fff) != 0) filled.push_back(static_cast<int32_t>(*index));
    }
    // Where the kernel does not show the table, the device answers.
    if (slots == 0 || std::binary_search(filled.begin(), filled.end(), static_cast<int32_t>(settings_.pkey_index)))
      return;
    refuse(no_such_slot("pkey_index", settings_.pkey_index, slots, filled), true);
  }

  const std::string& root_;
  const te_rdma_settings& settings_;
  std::string device_, directory_, layer_;
  Port port_;
};

std::string name_of(const Port& port) { return port.device + ":" + std::to_string(port.number); }

// "mlx5_0:1, mlx5_1:1": what may be named. Long lists are cut, since messages are.
std::string names_of(const std::vector<Port>& ports) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ports.size(), kMost); ++i) text.append(i > 0 ? ", " : "").append(name_of(ports[i]));
  if (ports.size() > kMost) text += format(" and %zu more", ports.size() - kMost);
  return text;
}

Error no_device(const std::string& root) {
  return Error(
      Status::kTransportUnavailable,
      format("no RDMA device is here (%s%s is empty): load the driver (`modprobe mlx5_ib`, or `rdma link add` for "
             "Soft-RoCE), or give the container the devices under /dev/infiniband",
             root.c_str(), kClass));
}

// All ports are refused: the reasons of the first few, and of a setting if one is at fault.
Error none_usable(const std::vector<Port>& ports) {
  const bool by_setting = std::any_of(ports.begin(), ports.end(), [](const Port& port) { return port.by_setting; });
  std::string text = "no RDMA port can be used: ";
  size_t shown = 0;
  for (const Port& port : ports) {
    if (by_setting && !port.by_setting) continue;  // that of a setting is the one to remedy
    if (shown == 2) {
      text += format("; and %zu more", ports.size() - shown);
      break;
    }
    text.append(shown++ > 0 ? "; " : "").append(name_of(port)).append(": ").append(port.unusable);
  }
  return Error(by_setting ? Status::kConfig : Status::kTransportUnavailable, text);
}

const Port* find(const std::vector<Port>& ports, const std::string& name) {
  const Port* first = nullptr;
  for (const Port& port : ports) {
    if (name_of(port) == name) return &port;
    if (port.device != name) continue;
    if (port.active) return &port;
    if (first == nullptr) first = &port;
  }
  return first;
}

}  // namespace

std::vector<Port> list_ports(const std::string& root, const te_rdma_settings& settings) {
  std::vector<Port> ports;
  for (const std::string& device : names_in(root + kClass))
    for (const std::string& name : names_in(root + kClass + "/" + device + "/ports"))
      if (const std::optional<uint32_t> number = parse_number(name, 255))
        ports.push_back(Judge(root, device, static_cast<uint8_t>(*number), settings).judge());
  return ports;
}

Error choose_ports(const std::string& root, const te_rdma_settings& settings, const std::vector<std::string>& names,
                   uint32_t count, std::vector<Port>* out) {
  const std::vector<Port> ports = list_ports(root, settings);
  if (ports.empty()) return no_device(root);
  std::vector<Port> chosen;
  for (const std::string& name : names) {
    const Port* port = find(ports, name);
    if (port == nullptr)
      return Error(Status::kConfig,
                   format("NIC %s: no such RDMA device or port; there are %s", name.c_str(), names_of(ports).c_str()));
    if (!port->unusable.empty())
      return Error(Status::kConfig, format("NIC %s: %s", name.c_str(), port->unusable.c_str()));
    for (const Port& other : chosen)
      if (name_of(other) == name_of(*port))
        return Error(Status::kConfig, format("NIC %s: port %s is named twice", name.c_str(), name_of(*port).c_str()));
    chosen.push_back(*port);
  }
  if (names.empty()) {
    std::copy_if(ports.begin(), ports.end(), std::back_inserter(chosen),
                 [](const Port& port) { return port.unusable.empty(); });
    if (chosen.empty()) return none_usable(ports);
    if (count == 0) count = std::min(static_cast<uint32_t>(chosen.size()), static_cast<uint32_t>(TE_MAX_NICS));
  }
  if (count > chosen.size())
    return Error(Status::kConfig,
                 format("%u NICs are wanted (nic_count), but %s %zu: %s", count,
                        names.empty() ? "the RDMA ports that can be used are" : "those named (nics) are", chosen.size(),
                        names_of(chosen).c_str()));
  if (count > 0) chosen.resize(count);
  *out = std::move(chosen);
  return {};
}

}  // namespace te::cx7
