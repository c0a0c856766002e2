// Which local IP address a NIC of the tcp transport binds to.
#pragma once

#include <string>
#include <vector>

#include "native/status.h"

namespace te::efa {

struct Interface {
  std::string name;     // as the user named it, or the interface that was chosen
  std::string address;  // numeric, IPv4 or IPv6
};

// Resolves `names` (interface names or local addresses) to `count` interfaces; fewer names than that are used in turns.
// Without names: the first interface that is up, not a loopback and has a global address (IPv4 first), else loopback.
Error choose_interfaces(const std::vector<std::string>& names, uint32_t count, std::vector<Interface>* out);

}  // namespace te::efa
