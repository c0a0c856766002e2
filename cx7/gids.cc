#include "cx7/gids.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "cx7/sysfs.h"

namespace te::cx7 {
namespace {

constexpr uint32_t kMostSlots = 65536;  // the index travels in fewer bits

auto rank(const GidEntry& e) { return std::tuple(e.kind != GidKind::kRoceV2, address_kind(e.gid), !e.here); }

}  // namespace

const char* gid_kind_name(GidKind kind) {
  switch (kind) {
    case GidKind::kInfiniBand:
      return "InfiniBand";
    case GidKind::kRoceV1:
      return "RoCE v1";
    case GidKind::kRoceV2:
      return "RoCE v2";
  }
  return "unknown";
}

const char* address_kind_name(AddressKind kind) {
  switch (kind) {
    case AddressKind::kIpv4:
      return "IPv4-mapped";
    case AddressKind::kIpv6:
      return "global IPv6";
    case AddressKind::kLinkLocal:
      return "link-local";
  }
  return "unknown";
}

AddressKind address_kind(const Gid& gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(gid.data(), kMapped, sizeof kMapped) == 0) return AddressKind::kIpv4;
  return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? AddressKind::kLinkLocal : AddressKind::kIpv6;
}

std::optional<Gid> parse_gid(std::string_view text) {
  Gid gid;
  if (text.size() != 39) return std::nullopt;
  for (size_t group = 0; group < 8; ++group) {
    const size_t at = 5 * group;
    if (group > 0 && text[at - 1] != ':') return std::nullopt;
    const std::optional<uint32_t> value = parse_number("0x" + std::string(text.substr(at, 4)), 0xffff);
    if (!value) return std::nullopt;
    gid[2 * group] = static_cast<uint8_t>(*value >> 8);
    gid[2 * group + 1] = static_cast<uint8_t>(*value);
  }
  return gid;
}

std::string gid_text(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address_kind(gid) == AddressKind::kIpv4) inet_ntop(AF_INET, gid.data() + 12, text, sizeof text);
  else inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  return text;
}

GidTable read_gids(const std::string& root, const std::string& port_directory, bool ethernet) {
  GidTable table;
  const std::vector<std::string> interfaces = names_in(root + "/sys/class/net");
  const std::set<std::string> here(interfaces.begin(), interfaces.end());
  for (const std::string& name : names_in(port_directory + "/gids")) {
    const std::optional<uint32_t> index = parse_number(name, kMostSlots - 1);
    if (!index) continue;
    table.slots = std::max(table.slots, *index + 1);
    const std::optional<Gid> gid = parse_gid(read_line(port_directory + "/gids/" + name));
    if (!gid || *gid == Gid{}) continue;
    GidEntry entry{static_cast<int32_t>(*index), *gid, GidKind::kInfiniBand, "", false};
    if (ethernet) {
      // The kernel calls version 1 "IB/RoCE v1". Without a type the entry is being taken away.
      const std::string type = read_line(port_directory + "/gid_attrs/types/" + name);
      if (type.find("RoCE v2") != std::string::npos) entry.kind = GidKind::kRoceV2;
      else if (type.find("RoCE v1") != std::string::npos) entry.kind = GidKind::kRoceV1;
      else continue;
    }
    entry.interface = read_line(port_directory + "/gid_attrs/ndevs/" + name);
    entry.here = here.contains(entry.interface);
    table.entries.push_back(std::move(entry));
  }
  return table;
}

bool better(const GidEntry& a, const GidEntry& b) {
  return std::tuple_cat(rank(a), std::tuple(a.index)) < std::tuple_cat(rank(b), std::tuple(b.index));
}

bool equally_good(const GidEntry& a, const GidEntry& b) { return rank(a) == rank(b); }

}  // namespace te::cx7
