// Fabrics, domains and registered memory.
#include <cstring>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

constexpr uint64_t kAccess = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

int close_domain(fid* handle) {
  Locked f;
  auto& domain = behind<Domain, fid_domain>(handle);
  if (domain.uses > 0) return refuse_close("domain", domain.uses);
  --domain.fabric->uses;
  --f->objects;
  delete &domain;
  return 0;
}

int close_region(fid* handle) {
  Locked f;
  auto& region = behind<Region, fid_mr>(handle);
  const auto found = f->by_descriptor.find(reinterpret_cast<uint64_t>(region.mem_desc));
  f->by_descriptor.erase(found);
  f->by_key.erase(region.key);
  --region.domain->uses;
  --f->objects;
  delete &region;
  return 0;
}

int no_counters(fid_domain*, fi_cntr_attr*, fid_cntr**, void*) { return -FI_ENOSYS; }

int register_buffer(fid* handle, const void* buffer, size_t length, uint64_t access, uint64_t, uint64_t requested_key,
                    uint64_t flags, fid_mr** out, void*) {
  const iovec range{const_cast<void*>(buffer), length};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = access;
  attributes.requested_key = requested_key;
  return register_range(behind<Domain, fid_domain>(handle), attributes, flags, out);
}

int register_vector(fid* handle, const iovec* ranges, size_t count, uint64_t access, uint64_t, uint64_t requested_key,
                    uint64_t flags, fid_mr** out, void*) {
  fi_mr_attr attributes{};
  attributes.mr_iov = ranges;
  attributes.iov_count = count;
  attributes.access = access;
  attributes.requested_key = requested_key;
  return register_range(behind<Domain, fid_domain>(handle), attributes, flags, out);
}

int register_attributes(fid* handle, const fi_mr_attr* attributes, uint64_t flags, fid_mr** out) {
  return register_range(behind<Domain, fid_domain>(handle), *attributes, flags, out);
}

fi_ops_domain* domain_ops() {
  static fi_ops_domain ops = [] {
    fi_ops_domain made{};
    made.size = sizeof made;
    made.av_open = open_vector;
    made.cq_open = open_queue;
    made.endpoint = open_endpoint;
    made.cntr_open = no_counters;
    return made;
  }();
  return &ops;
}

fi_ops_mr memory_ops = {sizeof(fi_ops_mr), register_buffer, register_vector, register_attributes};

const char* wrong_registration(const Fabric& f, const fi_mr_attr& a, uint64_t flags) {
  if (flags != 0) return "with flags";
  if (a.iov_count != 1) return "of more than one range";
  if (a.mr_iov->iov_base == nullptr || a.mr_iov->iov_len == 0) return "of an empty range";
  if ((a.access & ~kAccess) != 0) return "with unknown access rights";
  if (a.iface != FI_HMEM_SYSTEM && f.options.hmem == 0) return "of device memory, without FI_HMEM";
  return nullptr;
}

}  // namespace

int refuse_close(const char* what, uint32_t uses) {
  violate("a %s was closed before the %u objects that need it", what, uses);
  return -FI_EBUSY;
}

int open_domain(fid_fabric* handle, fi_info* info, fid_domain** out, void* context) {
  Locked f;
  auto& fabric = *static_cast<Fabrication*>(handle);
  const char* name = info->domain_attr->name;
  for (const auto& device : f->devices) {
    if (name == nullptr || "efa" + std::to_string(device->index) + "-rdm" != name) continue;
    if (device->lost) return -FI_ENODEV;
    auto* domain = new Domain;
    domain->fid = {FI_CLASS_DOMAIN, context, only_close<close_domain>()};
    domain->ops = domain_ops();
    domain->mr = &memory_ops;
    domain->fabric = &fabric;
    domain->device = device.get();
    ++fabric.uses;
    ++f->objects;
    *out = domain;
    return 0;
  }
  violate("fi_domain: there is no device %s", name != nullptr ? name : "without a name");
  return -FI_EINVAL;
}

int register_range(Domain& domain, const fi_mr_attr& attributes, uint64_t flags, fid_mr** out) {
  Locked f;
  if (const char* wrong = wrong_registration(*f, attributes, flags)) {
    violate("a registration %s", wrong);
    return -FI_EINVAL;
  }
  if (f->faults.registration_failures > 0) {
    --f->faults.registration_failures;
    return -FI_ENOMEM;
  }
  auto* region = new Region;
  region->fid = {FI_CLASS_MR, attributes.context, only_close<close_region>()};
  region->domain = &domain;
  region->base = static_cast<uint8_t*>(attributes.mr_iov->iov_base);
  region->length = attributes.mr_iov->iov_len;
  region->access = attributes.access;
  // FI_MR_PROV_KEY: what the program asks for does not count. No descriptor comes again, so one of a closed region
  // names none.
  do region->key = f->random.word();
  while (region->key == 0 || f->by_key.contains(region->key));
  region->mem_desc = reinterpret_cast<void*>(++f->last_descriptor << 4);
  f->by_key.emplace(region->key, region);
  f->by_descriptor.emplace(reinterpret_cast<uint64_t>(region->mem_desc), region);
  ++domain.uses;
  ++f->objects;
  *out = region;
  return 0;
}

}  // namespace srd
