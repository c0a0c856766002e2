#include "efa/objects.h"

#ifdef TE_HAVE_LIBFABRIC
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "native/system.h"

namespace te::efa::local_endpoints {
namespace {

struct Endpoint {
  bool live = true;
  std::set<std::string> related;
  Objects objects;  // empty while live
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Endpoint> endpoints;
  std::set<std::string> ended;  // names are never used twice, so this grows by one short string per NIC ever closed
};

Registry& registry() {
  static auto* const instance = [] {
    auto* made = new Registry;
    hold_across_forks(&made->mutex);
    return made;
  }();  // never destroyed: engines may close late in the process's exit
  return *instance;
}

}  // namespace

void add(const std::string& name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.endpoints[name];
}

void relate(const std::string& one, const std::string& other) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto a = r.endpoints.find(one), b = r.endpoints.find(other);
  if (a == r.endpoints.end() || b == r.endpoints.end() || a == b) return;
  a->second.related.insert(other);
  b->second.related.insert(one);
}

void close(const std::string& name, Objects objects) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto closing = r.endpoints.find(name);
  if (closing == r.endpoints.end()) return;
  closing->second.live = false;
  r.ended.insert(name);
  closing->second.objects = std::move(objects);
  const auto live = [&](const std::string& other) {
    const auto found = r.endpoints.find(other);
    return found != r.endpoints.end() && found->second.live;
  };
  // Nobody polls a closed one any more, so closed ones that are related to each other only can all go.
  std::erase_if(r.endpoints, [&](const auto& entry) {
    const Endpoint& endpoint = entry.second;
    return !endpoint.live && std::none_of(endpoint.related.begin(), endpoint.related.end(), live);
  });
}

bool ended(const std::string& name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.ended.contains(name);
}

}  // namespace te::efa::local_endpoints
#endif
