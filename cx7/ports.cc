#include "cx7/ports.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "cx7/gids.h"
#include "cx7/sysfs.h"

namespace te::cx7 {
namespace {

constexpr const char* kClass = "/sys/class/infiniband";
constexpr const char* kSubnetManager = "start a subnet manager (opensm), or check the one of the switch";

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

// One port while it is being judged. The first reason against it is the one that is kept: it is the one to remedy first.
class Judge {
 public:
  Judge(const std::string& root, const std::string& device, uint8_t number, const te_rdma_settings& settings)
      : root_(root), settings_(settings), device_(root + kClass + "/" + device) {
    port_.device = device;
    port_.number = number;
    directory_ = device_ + "/ports/" + std::to_string(number);
  }

  // Nothing when an interface is asked for and the port has none of its GIDs.
  std::optional<Port> judge(const std::string& interface) {
    const std::string state = read_line(directory_ + "/state");  // "4: ACTIVE"
    const size_t colon = state.find(": ");
    port_.state = colon == std::string::npos ? state : state.substr(colon + 2);
    port_.active = port_.state == "ACTIVE";
    if (port_.state.empty()) port_.state = "unknown";
    port_.link_layer = read_line(directory_ + "/link_layer");
    port_.ethernet = port_.link_layer == "Ethernet";
    port_.lid = static_cast<uint16_t>(parse_number(read_line(directory_ + "/lid"), 0xffff).value_or(0));
    table_ = read_gids(root_, directory_, port_.ethernet);
    find_interface();
    if (!interface.empty() && !keep_only(interface)) return std::nullopt;
    check_device();
    check_link();
    choose_gid();
    check_pkey();
    return std::move(port_);
  }

 private:
  void refuse(std::string reason, std::string remedy = "", bool by_setting = false) {
    if (!port_.unusable.empty()) return;
    port_.unusable = std::move(reason);
    port_.remedy = std::move(remedy);
    port_.by_setting = by_setting;
  }

  // The interface that a remedy names.
  const char* its_interface() const { return port_.interface.empty() ? "INTERFACE" : port_.interface.c_str(); }

  void find_interface() {
    for (const GidEntry& entry : table_.entries)
      if (port_.interface.empty()) port_.interface = entry.interface;
    if (port_.interface.empty()) port_.interface = read_line(device_ + "/parent");  // of Soft-RoCE
    if (!port_.interface.empty()) return;
    // Ports of one PCI function share a directory; dev_port counts them from 0.
    const std::string directory = device_ + "/device/net/";
    const std::vector<std::string> names = names_in(directory);
    for (const std::string& name : names)
      if (names.size() == 1 || parse_number(read_line(directory + name + "/dev_port"), 254) == port_.number - 1u) {
        port_.interface = name;
        return;
      }
  }

  // Drops the GIDs of other interfaces, unless the setting chooses among all of them.
  bool keep_only(const std::string& interface) {
    const auto is_other = [&](const GidEntry& entry) { return entry.interface != interface; };
    std::vector<GidEntry>& entries = table_.entries;
    if (std::all_of(entries.begin(), entries.end(), is_other)) return port_.interface == interface;
    if (port_.ethernet && settings_.gid_index < 0) std::erase_if(entries, is_other);
    return true;
  }

  // A channel adapter ("1: CA") has both kinds of queue pairs that are needed: reliable connections, and unreliable datagrams to make them.
  void check_device() {
    const std::string type = read_line(device_ + "/node_type");
    if (port_.link_layer == "Unspecified" || type.starts_with("7") || link_name(device_ + "/device/driver") == "efa")
      return refuse("an EFA device has no reliable connections", "use it with transport efa");
    if (type.starts_with("4")) return refuse("an iWARP device has no datagrams, by which connections are made");
    if (!type.empty() && !type.starts_with("1"))
      return refuse(format("a device of node type '%s' has no reliable connections", type.c_str()));
    if (!port_.ethernet && port_.link_layer != "InfiniBand")
      refuse(format("link layer '%s' is neither Ethernet nor InfiniBand", port_.link_layer.c_str()));
  }

  void check_link() {
    if (!port_.active) {
      const std::string physical = read_line(directory_ + "/phys_state");  // "3: Disabled"
      std::string what = "the port is " + port_.state;
      if (!physical.empty()) what += " (" + physical.substr(physical.find(' ') + 1) + ")";
      if (port_.ethernet)
        return refuse(what, format("`ip link set %s up`, then check cable and switch", its_interface()));
      if (port_.state == "INIT" || port_.state == "ARMED")  // the cable is fine then
        return refuse(what + ": no subnet manager has set it up", kSubnetManager);
      return refuse(what, "check cable and switch, then the subnet manager");
    }
    // From 0xc000 on LIDs are those of multicast groups.
    if (!port_.ethernet && (port_.lid == 0 || port_.lid >= 0xc000))
      refuse(format("LID %u is none of a port: no subnet manager has set it up", static_cast<unsigned>(port_.lid)),
             kSubnetManager);
  }

  void choose_gid() {
    const std::vector<GidEntry>& entries = table_.entries;
    if (port_.ethernet && entries.empty())
      return refuse("the port has no GID",
                    format("give its interface an address: `ip address add ADDRESS/BITS dev %s`", its_interface()));
    if (port_.ethernet && settings_.gid_index < 0) return take_best();
    const int32_t index = std::max(settings_.gid_index, 0);
    const auto found =
        std::find_if(entries.begin(), entries.end(), [&](const GidEntry& e) { return e.index == index; });
    if (found == entries.end()) {
      if (settings_.gid_index < 0) return refuse("the port has no GID 0", kSubnetManager);
      std::vector<int32_t> filled;
      for (const GidEntry& entry : entries) filled.push_back(entry.index);
      return refuse_slot("gid_index", static_cast<uint32_t>(index), table_.slots, filled);
    }
    take(*found);
    port_.why += settings_.gid_index < 0 ? ", index 0" : format(", gid_index %d as set", index);
  }

  void take_best() {
    const std::vector<GidEntry>& entries = table_.entries;
    const GidEntry& best = *std::min_element(entries.begin(), entries.end(), better);
    const auto equals =
        std::count_if(entries.begin(), entries.end(), [&](const GidEntry& e) { return equally_good(best, e); });
    take(best);
    if (equals > 1) port_.why += format(", lowest index of %d", static_cast<int>(equals));
    else port_.why += entries.size() > 1 ? format(", best of %zu", entries.size()) : ", the only one";
    if (address_kind(best.gid) == AddressKind::kLinkLocal) port_.why += "; reaches its own Ethernet segment alone";
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
    uint32_t slots = 0;
    std::vector<int32_t> filled;
    for (const std::string& name : names_in(directory_ + "/pkeys")) {
      const std::optional<uint32_t> index = parse_number(name, 0xffff);
      if (!index) continue;
      slots = std::max(slots, *index + 1);
      const std::optional<uint32_t> key = parse_number(read_line(directory_ + "/pkeys/" + name), 0xffff);
      if (key && (*key & 0x7fff) != 0) filled.push_back(static_cast<int32_t>(*index));  // the upper bit is membership
    }
    if (slots == 0) return;  // the kernel does not show the table: the device answers
    if (!std::binary_search(filled.begin(), filled.end(), static_cast<int32_t>(settings_.pkey_index)))
      refuse_slot("pkey_index", settings_.pkey_index, slots, filled);
  }

  // An index that was set and leads to nothing.
  void refuse_slot(const char* setting, uint32_t index, uint32_t slots, const std::vector<int32_t>& filled) {
    const std::string why = index < slots ? "that slot of the port's table is empty"
                                          : format("the port's table has %u slots", static_cast<unsigned>(slots));
    refuse(format("setting %s is %u, but %s", setting, static_cast<unsigned>(index), why.c_str()),
           format("set one of those that are filled: %s", ranges(filled).c_str()), true);
  }

  const std::string& root_;
  const te_rdma_settings& settings_;
  std::string device_, directory_;
  GidTable table_;
  Port port_;
};

}  // namespace

std::vector<Port> list_ports(const std::string& root, const te_rdma_settings& settings, const std::string& interface) {
  std::vector<Port> ports;
  for (const std::string& device : names_in(root + kClass))
    for (const std::string& name : names_in(root + kClass + "/" + device + "/ports"))
      if (const std::optional<uint32_t> number = parse_number(name, 255))
        if (auto port = Judge(root, device, static_cast<uint8_t>(*number), settings).judge(interface))
          ports.push_back(*std::move(port));
  return ports;
}

}  // namespace te::cx7
