#include "efa/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace te::efa {
namespace {

enum Rank : int { kUnusable = 0, kLoopback6, kLoopback4, kGlobal6, kGlobal4 };

struct Candidate {
  std::string name, address;
  Rank rank = kUnusable;
};

// Link-local IPv6 addresses need a scope, which an address that travels to other machines cannot carry.
Rank rank_of(const sockaddr* address) {
  if (address == nullptr) return kUnusable;
  if (address->sa_family == AF_INET) {
    const uint32_t host = ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
    if (host == INADDR_ANY) return kUnusable;
    return host >> 24 == IN_LOOPBACKNET ? kLoopback4 : kGlobal4;
  }
  if (address->sa_family == AF_INET6) {
    const in6_addr& host = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (IN6_IS_ADDR_LOOPBACK(&host)) return kLoopback6;
    if (IN6_IS_ADDR_LINKLOCAL(&host) || IN6_IS_ADDR_MULTICAST(&host) || IN6_IS_ADDR_UNSPECIFIED(&host))
      return kUnusable;
    return kGlobal6;
  }
  return kUnusable;
}

std::string text_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const void* host = address->sa_family == AF_INET
                         ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr)
                         : &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  inet_ntop(address->sa_family, host, text, sizeof text);
  return text;
}

// Every usable address of every interface that is up, in the kernel's order.
Error list_candidates(std::vector<Candidate>* out) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return Error(Status::kConfig, format("cannot list network interfaces: %s", std::strerror(errno)), errno);
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const Rank rank = rank_of(entry->ifa_addr);
    if ((entry->ifa_flags & IFF_UP) == 0 || rank == kUnusable) continue;
    out->push_back({entry->ifa_name, text_of(entry->ifa_addr), rank});
  }
  return {};
}

const Candidate* best(const std::vector<Candidate>& candidates, const std::string* name) {
  const Candidate* chosen = nullptr;
  for (const Candidate& candidate : candidates) {
    if (name != nullptr && candidate.name != *name) continue;
    if (chosen == nullptr || candidate.rank > chosen->rank) chosen = &candidate;
  }
  return chosen;
}

// 0: not an IP address; else AF_INET or AF_INET6.
int family_of(const std::string& text) {
  in6_addr scratch;
  if (inet_pton(AF_INET, text.c_str(), &scratch) == 1) return AF_INET;
  return inet_pton(AF_INET6, text.c_str(), &scratch) == 1 ? AF_INET6 : 0;
}

// Only a bind tells for sure: 127.0.0.2 is local without being listed.
int try_bind(const std::string& text, int family) {
  sockaddr_storage storage{};
  storage.ss_family = static_cast<sa_family_t>(family);
  socklen_t length = sizeof(sockaddr_in);
  if (family == AF_INET) {
    inet_pton(AF_INET, text.c_str(), &reinterpret_cast<sockaddr_in*>(&storage)->sin_addr);
  } else {
    inet_pton(AF_INET6, text.c_str(), &reinterpret_cast<sockaddr_in6*>(&storage)->sin6_addr);
    length = sizeof(sockaddr_in6);
  }
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int result = bind(fd, reinterpret_cast<sockaddr*>(&storage), length) == 0 ? 0 : errno;
  close(fd);
  return result;
}

Error resolve(const std::vector<Candidate>& candidates, const std::string& name, Interface* out) {
  if (const int family = family_of(name); family != 0) {
    if (const int failure = try_bind(name, family); failure != 0) {
      return Error(Status::kConfig,
                   format("NIC %s: cannot bind to this address: %s", name.c_str(), std::strerror(failure)), failure);
    }
    *out = {name, name};
    return {};
  }
  const Candidate* chosen = best(candidates, &name);
  if (chosen == nullptr) {
    return Error(Status::kConfig, if_nametoindex(name.c_str()) == 0
                                      ? format("NIC %s: no such network interface", name.c_str())
                                      : format("NIC %s: down, or without a usable IP address", name.c_str()));
  }
  *out = {name, chosen->address};
  return {};
}

}  // namespace

Error choose_interfaces(const std::vector<std::string>& names, uint32_t count, std::vector<Interface>* out) {
  std::vector<Candidate> candidates;
  if (Error error = list_candidates(&candidates)) return error;
  std::vector<Interface> resolved;
  for (const std::string& name : names) {
    Interface interface;
    if (Error error = resolve(candidates, name, &interface)) return error;
    resolved.push_back(std::move(interface));
  }
  if (resolved.empty()) {
    const Candidate* chosen = best(candidates, nullptr);
    if (chosen == nullptr) return Error(Status::kConfig, "no network interface is up with an IP address, not even lo");
    resolved.push_back({chosen->name, chosen->address});
  }
  out->clear();
  for (uint32_t i = 0; i < count; ++i) out->push_back(resolved[i % resolved.size()]);
  return {};
}

}  // namespace te::efa
