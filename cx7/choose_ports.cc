// Which ports a transport opens: names, and the errors about them.
#include <algorithm>
#include <iterator>
#include <optional>

#include "cx7/ports.h"

namespace te::cx7 {
namespace {

std::string name_of(const Port& port) { return port.device + ":" + std::to_string(port.number); }

// "mlx5_0:1, mlx5_1:1": what may be named. Long lists are cut, since messages are.
std::string names_of(const std::vector<Port>& ports) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ports.size(), kMost); ++i) text.append(i > 0 ? ", " : "").append(name_of(ports[i]));
  if (ports.size() > kMost) text += format(" and %zu more", ports.size() - kMost);
  return text;
}

std::string reason(const Port& port) {
  return port.remedy.empty() ? port.unusable : port.unusable + "; " + port.remedy;
}

Error no_device() {
  return Error(Status::kTransportUnavailable,
               "no RDMA device is here (/sys/class/infiniband is empty): load the NIC's RDMA driver (`modprobe "
               "mlx5_ib`), or start the container with the devices under /dev/infiniband");
}

// As many reasons as a message has room for; if a setting is at fault, it is the one to remedy.
Error none_usable(const std::vector<Port>& ports) {
  constexpr size_t kRoom = TE_MESSAGE_BYTES - sizeof ". And 4294967295 more";
  const bool by_setting = std::any_of(ports.begin(), ports.end(), [](const Port& port) { return port.by_setting; });
  std::string text = "no RDMA port can be used";
  size_t shown = 0, left_out = 0;
  for (const Port& port : ports) {
    if (port.by_setting != by_setting) continue;
    const std::string next = format("%s%s: %s", shown == 0 ? ": " : ". ", name_of(port).c_str(), reason(port).c_str());
    if (shown > 0 && (left_out > 0 || text.size() + next.size() > kRoom)) {
      ++left_out;
    } else {
      text += next;
      ++shown;
    }
  }
  if (left_out > 0) text += format(". And %zu more", left_out);
  return Error(by_setting ? Status::kConfig : Status::kTransportUnavailable, text);
}

std::optional<Port> first_active(const std::vector<Port>& ports) {
  const auto active = std::find_if(ports.begin(), ports.end(), [](const Port& port) { return port.active; });
  if (active != ports.end()) return *active;
  return ports.empty() ? std::nullopt : std::optional(ports.front());
}

std::optional<Port> find(const std::vector<Port>& ports, const std::string& name) {
  std::vector<Port> of_device;
  for (const Port& port : ports) {
    if (name_of(port) == name) return port;
    if (port.device == name) of_device.push_back(port);
  }
  return first_active(of_device);
}

}  // namespace

Error choose_ports(const std::string& root, const te_rdma_settings& settings, const std::vector<std::string>& names,
                   uint32_t count, std::vector<Port>* out) {
  const std::vector<Port> ports = list_ports(root, settings);
  if (ports.empty()) return no_device();
  std::vector<Port> chosen;
  for (const std::string& name : names) {
    std::optional<Port> port = find(ports, name);
    if (!port && !name.empty()) port = first_active(list_ports(root, settings, name));
    if (!port)
      return Error(Status::kConfig, format("NIC %s: no RDMA port has this name, and none a GID of such an interface; "
                                           "there are %s",
                                           name.c_str(), names_of(ports).c_str()));
    if (!port->unusable.empty())
      return Error(Status::kConfig, format("NIC %s: %s", name.c_str(), reason(*port).c_str()));
    for (const Port& other : chosen)
      if (name_of(other) == name_of(*port))
        return Error(Status::kConfig,
                     format("NIC %s: port %s is named twice; name each once", name.c_str(), name_of(*port).c_str()));
    chosen.push_back(*std::move(port));
  }
  if (names.empty()) {
    std::copy_if(ports.begin(), ports.end(), std::back_inserter(chosen),
                 [](const Port& port) { return port.unusable.empty(); });
    if (chosen.empty()) return none_usable(ports);
    if (count == 0) count = std::min(static_cast<uint32_t>(chosen.size()), static_cast<uint32_t>(TE_MAX_NICS));
  }
  if (count > chosen.size())
    return Error(
        Status::kConfig,
        format("%u NICs are wanted (nic_count), but %s %s; lower nic_count", static_cast<unsigned>(count),
               names.empty() ? "the RDMA ports that can be used are" : "named (nics) are", names_of(chosen).c_str()));
  if (count > 0) chosen.resize(count);
  *out = std::move(chosen);
  return {};
}

}  // namespace te::cx7
