// Address vectors. As in the provider: an address that is there already gives the handle that it has, and removing it
// once removes it.
#include <cstring>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

int close_vector(fid* handle) {
  Locked f;
  auto& vector = behind<Vector, fid_av>(handle);
  if (vector.uses > 0) return refuse_close("address vector", vector.uses);
  --vector.domain->uses;
  --f->objects;
  delete &vector;
  return 0;
}

int insert(fid_av* handle, const void* addresses, size_t count, fi_addr_t* out, uint64_t flags, void*) {
  Locked f;
  auto& vector = *static_cast<Vector*>(handle);
  if ((flags & ~FI_MORE) != 0) return -FI_ENOSYS;
  for (size_t i = 0; i < count; ++i) {
    Address address;
    std::memcpy(&address, static_cast<const uint8_t*>(addresses) + i * sizeof address, sizeof address);
    address.reserved = 0;
    address.unused = 0;
    static constexpr uint8_t kNone[16] = {};
    if (std::memcmp(address.gid, kNone, sizeof kNone) == 0) {
      out[i] = FI_ADDR_NOTAVAIL;
      return static_cast<int>(i);
    }
    const auto [found, added] = vector.known.try_emplace(address, vector.entries.size());
    if (added) vector.entries.push_back(&found->first);
    out[i] = found->second;
  }
  return static_cast<int>(count);
}

// What the device has not begun with finds no address handle any more.
void strand(Fabric& f, const Vector& vector, const Address& address) {
  for (Endpoint* endpoint : f.endpoints) {
    if (endpoint->vector != &vector) continue;
    std::vector<Request*> lost;
    for (Request* request : endpoint->posted)
      if (request->target == address && !request->placed && f.random.chance(f.options.stale)) lost.push_back(request);
    for (Request* request : lost) {
      std::erase(endpoint->held, request);
      end(f, request, kBadHandle);
    }
  }
}

int remove(fid_av* handle, fi_addr_t* addresses, size_t count, uint64_t) {
  Locked f;
  auto& vector = *static_cast<Vector*>(handle);
  for (size_t i = 0; i < count; ++i) {
    if (addresses[i] >= vector.entries.size() || vector.entries[addresses[i]] == nullptr) {
      violate("fi_av_remove: there is no address %llu", static_cast<unsigned long long>(addresses[i]));
      return -FI_EINVAL;
    }
    const Address address = *std::exchange(vector.entries[addresses[i]], nullptr);
    vector.known.erase(address);
    strand(*f, vector, address);
  }
  return 0;
}

int lookup(fid_av* handle, fi_addr_t number, void* address, size_t* length) {
  Locked f;
  auto& vector = *static_cast<Vector*>(handle);
  if (number >= vector.entries.size() || vector.entries[number] == nullptr) return -FI_EINVAL;
  std::memcpy(address, vector.entries[number], std::min(*length, sizeof(Address)));
  *length = sizeof(Address);
  return 0;
}

fi_ops_av* vector_ops() {
  static fi_ops_av ops = [] {
    fi_ops_av made{};
    made.size = sizeof made;
    made.insert = insert;
    made.remove = remove;
    made.lookup = lookup;
    return made;
  }();
  return &ops;
}

}  // namespace

int open_vector(fid_domain* handle, fi_av_attr* attributes, fid_av** out, void* context) {
  Locked f;
  auto& domain = *static_cast<Domain*>(handle);
  if (attributes->type == FI_AV_MAP) return -FI_ENOSYS;
  auto* vector = new Vector;
  vector->fid = {FI_CLASS_AV, context, only_close<close_vector>()};
  vector->ops = vector_ops();
  vector->domain = &domain;
  ++domain.uses;
  ++f->objects;
  *out = vector;
  return 0;
}

}  // namespace srd
