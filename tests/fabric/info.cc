// Exported: what libfabric has as symbols. Everything about other providers than `efa` is passed on to the real
// library.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/fabric/tables.h"

namespace srd {
namespace {

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE |
                           FI_SOURCE | FI_LOCAL_COMM | FI_REMOTE_COMM;
constexpr int kModes = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

// --- the real library ------------------------------------------------------------------------------------------------

struct Real {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
};

template <typename Function>
void find(void* library, const char* name, Function* out) {
  const std::string version = "FABRIC_1." + std::to_string(STANDIN_FABRIC_ABI);
  void* symbol = dlvsym(library, name, version.c_str());
  for (int older = STANDIN_FABRIC_ABI; symbol == nullptr && std::strcmp(name, "fi_fabric") == 0 && older > 0;)
    symbol = dlvsym(library, name, ("FABRIC_1." + std::to_string(--older)).c_str());
  *out = reinterpret_cast<Function>(symbol);
}

const Real& real() {
  static const Real found = [] {
    Real made;
    void* library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return made;
    find(library, "fi_getinfo", &made.getinfo);
    find(library, "fi_fabric", &made.fabric);
    find(library, "fi_dupinfo", &made.dupinfo);
    find(library, "fi_freeinfo", &made.freeinfo);
    return made;
  }();
  return found;
}

// Together with us: what libraries behind it do to signal handlers when they are loaded (PSM's write backtraces into files) is then
// undone by whoever guards our own loading.
[[gnu::constructor]] void load_real() { static_cast<void>(real()); }

// --- what there is ---------------------------------------------------------------------------------------------------

// Null, or which of the hints rules this fabric out.
const char* ruled_out(const Fabric& f, bool direct, const fi_info& hints) {
  const uint64_t offered = kCaps | (f.options.hmem != 0 ? FI_HMEM : 0);
  if ((hints.caps & ~offered) != 0) return "caps";
  if (hints.ep_attr != nullptr && hints.ep_attr->type != FI_EP_UNSPEC && hints.ep_attr->type != FI_EP_RDM)
    return "ep_attr->type";
  if (hints.fabric_attr != nullptr && hints.fabric_attr->name != nullptr &&
      std::strcmp(hints.fabric_attr->name, direct ? "efa-direct" : "efa") != 0)
    return "fabric_attr->name";
  if (direct && (hints.mode & FI_CONTEXT2) == 0) return "mode: FI_CONTEXT2 is required";
  if (direct && f.options.unsolicited == 0 && (hints.mode & FI_RX_CQ_DATA) == 0) return "mode: FI_RX_CQ_DATA";
  if (direct && hints.tx_attr != nullptr && hints.tx_attr->msg_order != 0) return "tx_attr->msg_order";
  const int modes =
      kModes | (direct ? FI_MR_LOCAL : 0) | ((hints.caps & FI_HMEM) != 0 ? static_cast<int>(FI_MR_HMEM) : 0);
  if (hints.domain_attr == nullptr || (hints.domain_attr->mr_mode & modes) != modes) return "domain_attr->mr_mode";
  return nullptr;
}

fi_info* describe(const Fabric& f, bool direct, const Device& device, const fi_info& hints) {
  const Options& options = f.options;
  const bool hmem = (hints.caps & FI_HMEM) != 0;
  fi_info* info = fi_dupinfo(nullptr);
  info->caps = kCaps | (hmem ? FI_HMEM : 0);
  info->mode = direct ? FI_CONTEXT2 | (options.unsolicited == 0 ? FI_RX_CQ_DATA : 0) : 0;
  info->addr_format = FI_ADDR_EFA;
  for (uint64_t* order : {&info->tx_attr->msg_order, &info->rx_attr->msg_order}) *order = direct ? 0 : FI_ORDER_SAS;
  info->tx_attr->caps = info->rx_attr->caps = info->caps;
  info->tx_attr->size = options.tx_size;
  info->tx_attr->iov_limit = direct ? 1 : 2;
  info->tx_attr->rma_iov_limit = 1;
  info->tx_attr->inject_size = 32;
  info->rx_attr->size = options.rx_size;
  info->rx_attr->iov_limit = direct ? 1 : 2;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->max_msg_size = direct ? options.max_rma : SIZE_MAX;  // the larger of the two limits
  fi_domain_attr& domain = *info->domain_attr;
  domain.name = strdup(("efa" + std::to_string(device.index) + "-rdm").c_str());
  domain.threading = FI_THREAD_SAFE;
  domain.control_progress = domain.data_progress = direct ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
  domain.resource_mgmt = FI_RM_ENABLED;
  domain.av_type = FI_AV_TABLE;
  domain.mr_mode = kModes | (direct ? FI_MR_LOCAL : 0) | (hmem ? static_cast<int>(FI_MR_HMEM) : 0);
  domain.mr_key_size = 4;
  domain.cq_data_size = 4;
  domain.mr_iov_limit = 1;
  info->fabric_attr->name = strdup(direct ? "efa-direct" : "efa");
  info->fabric_attr->prov_name = strdup("efa");
  info->fabric_attr->prov_version = fi_version();
  return info;
}

int get_efa(const fi_info& hints, fi_info** out) {
  Locked f;
  fi_info** end = out;
  *out = nullptr;
  for (const bool direct : {false, true}) {
    if ((direct && f->options.direct == 0) || ruled_out(*f, direct, hints) != nullptr) continue;
    for (const auto& device : f->devices) {
      if (device->lost) continue;
      *end = describe(*f, direct, *device, hints);
      end = &(*end)->next;
    }
  }
  return *out != nullptr ? 0 : -FI_ENODATA;
}

bool asks_for_efa(const fi_info* hints) {
  return hints != nullptr && hints->fabric_attr != nullptr && hints->fabric_attr->prov_name != nullptr &&
         std::strcmp(hints->fabric_attr->prov_name, "efa") == 0;
}

// --- fabrics ---------------------------------------------------------------------------------------------------------

int close_fabric(fid* handle) {
  Locked f;
  auto& fabric = behind<Fabrication, fid_fabric>(handle);
  if (fabric.uses > 0) return refuse_close("fabric", fabric.uses);
  --f->objects;
  delete &fabric;
  return 0;
}

fi_ops_fabric* fabric_ops() {
  static fi_ops_fabric ops = [] {
    fi_ops_fabric made{};
    made.size = sizeof made;
    made.domain = open_domain;
    made.trywait = try_wait;
    return made;
  }();
  return &ops;
}

// --- infos -----------------------------------------------------------------------------------------------------------

template <typename Structure>
Structure* copy(const Structure* from) {
  auto* made = static_cast<Structure*>(std::calloc(1, sizeof(Structure)));
  if (from != nullptr) *made = *from;
  return made;
}

char* copy_text(const char* text) { return text != nullptr ? strdup(text) : nullptr; }

void* copy_bytes(const void* bytes, size_t length) {
  if (bytes == nullptr || length == 0) return nullptr;
  void* made = std::malloc(length);
  std::memcpy(made, bytes, length);
  return made;
}

fi_info* copy_info(const fi_info* from) {
  fi_info* made = copy(from);
  made->next = nullptr;
  made->tx_attr = copy(from != nullptr ? from->tx_attr : nullptr);
  made->rx_attr = copy(from != nullptr ? from->rx_attr : nullptr);
  made->ep_attr = copy(from != nullptr ? from->ep_attr : nullptr);
  made->domain_attr = copy(from != nullptr ? from->domain_attr : nullptr);
  made->fabric_attr = copy(from != nullptr ? from->fabric_attr : nullptr);
  made->src_addr = copy_bytes(made->src_addr, made->src_addrlen);
  made->dest_addr = copy_bytes(made->dest_addr, made->dest_addrlen);
  made->domain_attr->name = copy_text(made->domain_attr->name);
  made->fabric_attr->name = copy_text(made->fabric_attr->name);
  made->fabric_attr->prov_name = copy_text(made->fabric_attr->prov_name);
  return made;
}

void free_info(fi_info* info) {
  std::free(info->src_addr);
  std::free(info->dest_addr);
  std::free(info->domain_attr->name);
  std::free(info->fabric_attr->name);
  std::free(info->fabric_attr->prov_name);
  std::free(info->tx_attr);
  std::free(info->rx_attr);
  std::free(info->ep_attr);
  std::free(info->domain_attr);
  std::free(info->fabric_attr);
  std::free(info);
}

// Those of the real library may hold more than plain memory.
bool is_foreign(const fi_info* info) {
  return real().dupinfo != nullptr && info != nullptr && info->fabric_attr != nullptr &&
         info->fabric_attr->prov_name != nullptr && !asks_for_efa(info);
}

}  // namespace
}  // namespace srd

extern "C" {

using namespace srd;

uint32_t fi_version() { return FI_VERSION(2, 1); }

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
               fi_info** info) {
  if (asks_for_efa(hints)) return get_efa(*hints, info);
  return real().getinfo != nullptr ? real().getinfo(version, node, service, flags, hints, info) : -FI_ENODATA;
}

void fi_freeinfo(fi_info* info) {
  while (info != nullptr) {
    if (is_foreign(info)) return real().freeinfo(info);  // and all that hang on it
    fi_info* next = info->next;
    free_info(info);
    info = next;
  }
}

fi_info* fi_dupinfo(const fi_info* info) { return is_foreign(info) ? real().dupinfo(info) : copy_info(info); }

int fi_fabric(fi_fabric_attr* attributes, fid_fabric** out, void* context) {
  if (std::strcmp(attributes->prov_name, "efa") != 0)
    return real().fabric != nullptr ? real().fabric(attributes, out, context) : -FI_ENODATA;
  Locked f;
  auto* fabric = new Fabrication;
  fabric->fid = {FI_CLASS_FABRIC, context, only_close<close_fabric>()};
  fabric->ops = fabric_ops();
  fabric->api_version = attributes->api_version;
  fabric->direct = std::strcmp(attributes->name, "efa-direct") == 0;
  ++f->objects;
  *out = fabric;
  return 0;
}

const char* fi_strerror(int code) {
  switch (code) {
    case FI_EOPBADSTATE:
      return "Operation not permitted in current state";
    case FI_ENORX:
      return "Receiver not ready, no receive buffers available";
    case FI_ENOAV:
      return "No available address vector";
    case FI_ENOCQ:
      return "Missing or unavailable completion queue";
    default:
      return std::strerror(code);
  }
}

char* fi_tostr(const void*, fi_type type) {
  static char version[] = "2.1.0 (stand-in)", nothing[] = "";
  return type == FI_TYPE_VERSION ? version : nothing;
}

}  // extern "C"
