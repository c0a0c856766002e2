// The GID table of a port, and the rule by which one entry of it is chosen (see cx7/ports.h). Pure but for reading the table.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cx7/ports.h"

namespace te::cx7 {

// In the order of preference.
enum class AddressKind : uint8_t { kIpv4, kIpv6, kLinkLocal };
const char* address_kind_name(AddressKind kind);  // "IPv4-mapped", "global IPv6", "link-local"

using Gid = std::array<uint8_t, 16>;
AddressKind address_kind(const Gid& gid);
std::optional<Gid> parse_gid(std::string_view text);  // eight groups of four hexadecimal digits, as sysfs writes them
// "10.1.2.3" of an IPv4-mapped one, else as inet_ntop writes IPv6 addresses.
std::string gid_text(const Gid& gid);

struct GidEntry {
  int32_t index = 0;
  Gid gid = {};
  GidKind kind = GidKind::kRoceV2;
  std::string interface;  // may be empty
  bool here = false;      // the interface is one of this network namespace
};

struct GidTable {
  uint32_t slots = 0;             // filled or not
  std::vector<GidEntry> entries;  // filled, and with a type that the kernel tells
};
GidTable read_gids(const std::string& root, const std::string& port_directory, bool ethernet);

// Whether `a` is to be taken rather than `b`: by kind, by address, by namespace (where containers share a device, its table has the
// addresses of all of them), by index.
bool better(const GidEntry& a, const GidEntry& b);
// Equal but for the index.
bool equally_good(const GidEntry& a, const GidEntry& b);

}  // namespace te::cx7
