#include "efa/selection.h"

#ifdef TE_HAVE_LIBFABRIC
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "efa/interfaces.h"
#include "native/system.h"

namespace te::efa {
namespace {

constexpr uint32_t kHeaders = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
// Writes in order, immediates included. Asked for where it costs nothing: tcp has one stream per peer; shm gives up a
// short cut that we do not want (see hints_for).
constexpr uint64_t kWriteOrder = FI_ORDER_SAS | FI_ORDER_WAW | FI_ORDER_RMA_WAW;

// efa is documented to need API 1.18 for device RDMA everywhere, and 1.17 headers have the structures of 1.18 and 1.19.
uint32_t api_version(const Library& library, Kind kind) {
  const uint32_t wanted = kind == Kind::kEfa ? std::max<uint32_t>(kHeaders, FI_VERSION(1, 18)) : kHeaders;
  return std::min(wanted, library.version);
}

InfoPtr hints_for(const Library& library, Kind kind, const char* provider, bool device_memory) {
  InfoPtr hints(library.dupinfo(nullptr), FreeInfo{&library});
  if (hints == nullptr) return hints;
  hints->caps = kCaps | (device_memory ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT |
                                (device_memory ? FI_MR_HMEM : 0);
  hints->fabric_attr->prov_name = strdup(provider);
  // shm without an order copies writes from the initiator (process_vm_writev) while it holds a lock of the target's:
  // an initiator killed in the middle would hang the target for ever. Asking for order turns that off.
  if (kind != Kind::kEfa) hints->tx_attr->msg_order = kWriteOrder;
  return hints;
}

Error get_info(const Library& library, Kind kind, const char* node, const char* service, const fi_info& hints,
               InfoPtr* out) {
  fi_info* found = nullptr;
  const int status =
      library.getinfo(api_version(library, kind), node, service, node != nullptr ? FI_SOURCE : 0, &hints, &found);
  if (status != 0 || found == nullptr) {
    return Error(Status::kTransportUnavailable,
                 format("fi_getinfo(%s): %s", hints.fabric_attr->prov_name, library.describe(status).c_str()), -status);
  }
  *out = InfoPtr(found, FreeInfo{&library});
  return {};
}

// The first entry that `accept` takes, alone.
template <typename Accept>
InfoPtr pick(const Library& library, const fi_info* list, Accept accept) {
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    if (accept(*info)) return InfoPtr(library.dupinfo(info), FreeInfo{&library});
  }
  return InfoPtr(nullptr, FreeInfo{&library});
}

// Why a provider cannot carry the engine, or empty.
std::string shortcoming(const fi_info& info) {
  if ((info.caps & kCaps) != kCaps) return "it lacks one-sided reads or writes";
  if (info.domain_attr->cq_data_size < 4) return "its completions carry less than 32 bits of immediate data";
  if ((info.mode & ~(FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA)) != 0)
    return "it demands a mode this engine does not speak";
  return {};
}

Error select_shm(const Library& library, const ProviderOptions& options, uint32_t nic, Selected* out) {
  // Unique on the machine for as long as the file may lie in /dev/shm: identity and process for people, a serial number
  // and random bits for engines of one process and for process ids that come again.
  static std::atomic<uint32_t> serial{0};
  uint32_t salt = 0;
  if (!random_bytes(&salt, sizeof salt)) return Error(Status::kTransport, "no random bytes from the kernel");
  uint64_t identity = 0;
  std::memcpy(&identity, options.identity, sizeof identity);
  out->node = format("te-%016llx-%d-%u-%08x", static_cast<unsigned long long>(__builtin_bswap64(identity)), getpid(),
                     serial.fetch_add(1, std::memory_order_relaxed), salt);
  out->nic = format("shm%u", nic);
  const InfoPtr hints = hints_for(library, Kind::kShm, "shm", false);
  InfoPtr list(nullptr, FreeInfo{&library});
  if (hints == nullptr) return Error(Status::kTransport, "out of memory");
  if (Error error = get_info(library, Kind::kShm, out->node.c_str(), nullptr, *hints, &list)) return error;
  out->info = pick(library, list.get(), [](const fi_info& info) { return shortcoming(info).empty(); });
  if (out->info == nullptr) return Error(Status::kTransportUnavailable, format("shm: %s", shortcoming(*list).c_str()));
  return {};
}

Error select_efa(const Library& library, const ProviderOptions& options, std::vector<Selected>* out) {
  if (library.version < FI_VERSION(1, 18)) {
    return Error(Status::kTransportUnavailable,
                 format("%s emulates EFA's writes in software: install libfabric 1.18 or later (AWS's EFA installer)",
                        library.name.c_str()));
  }
  InfoPtr list(nullptr, FreeInfo{&library});
  Error error;
  for (const bool device_memory : {true, false}) {  // without an hmem interface FI_HMEM is not offered
    const InfoPtr hints = hints_for(library, Kind::kEfa, "efa", device_memory);
    if (hints == nullptr) return Error(Status::kTransport, "out of memory");
    error = get_info(library, Kind::kEfa, nullptr, nullptr, *hints, &list);
    if (error.ok()) break;
  }
  if (error) {
    return Error(Status::kTransportUnavailable,
                 format("no EFA device that %s can use: %s", library.name.c_str(), error.message().c_str()),
                 error.provider_status());
  }
  // All devices through one fabric: efa-direct (libfabric 2.1 on), where one call is one work request, before efa.
  const InfoPtr direct = pick(
      library, list.get(), [](const fi_info& info) { return std::strcmp(info.fabric_attr->name, "efa-direct") == 0; });
  const std::string fabric = direct != nullptr ? "efa-direct" : list->fabric_attr->name;
  std::vector<Selected> devices;
  for (const fi_info* info = list.get(); info != nullptr; info = info->next) {
    const std::string device = info->domain_attr->name;
    const bool known = std::any_of(devices.begin(), devices.end(), [&](const Selected& s) { return s.nic == device; });
    if (known || fabric != info->fabric_attr->name || !shortcoming(*info).empty()) continue;
    devices.push_back({InfoPtr(library.dupinfo(info), FreeInfo{&library}), device, {}, direct == nullptr});
  }
  if (devices.empty()) return Error(Status::kTransportUnavailable, format("efa: %s", shortcoming(*list).c_str()));
  std::vector<size_t> order;
  for (const std::string& name : options.nics) {  // "rdmap16s27" names the domain "rdmap16s27-rdm"
    const auto match = std::find_if(devices.begin(), devices.end(), [&](const Selected& device) {
      return device.nic == name || device.nic.rfind(name + "-", 0) == 0;
    });
    if (match == devices.end()) return Error(Status::kConfig, format("NIC %s: no such EFA device", name.c_str()));
    order.push_back(static_cast<size_t>(match - devices.begin()));
  }
  if (order.empty()) {
    for (size_t i = 0; i < devices.size(); ++i) order.push_back(i);
  }
  const size_t count = std::min<size_t>(options.nic_count != 0 ? options.nic_count : order.size(), TE_MAX_NICS);
  for (size_t i = 0; i < count; ++i) {
    const Selected& device = devices[order[i % order.size()]];
    out->push_back({InfoPtr(library.dupinfo(device.info.get()), FreeInfo{&library}), device.nic, {}, device.emulated});
  }
  return {};
}

}  // namespace

Error parse_kind(const std::string& transport, Kind* out) {
  if (transport == "tcp") *out = Kind::kTcp;
  else if (transport == "shm") *out = Kind::kShm;
  else if (transport == "efa") *out = Kind::kEfa;
  else
    return Error(Status::kConfig, format("transport %s is not one of libfabric's (tcp, shm, efa)", transport.c_str()));
  return {};
}

// The best reliable-datagram provider over TCP: `net` is 1.17's name for what is `tcp` from 1.18 on; before both there
// was only MSG under ofi_rxm. An exact name is demanded, since asking 1.17 for "tcp" gives "tcp;ofi_rxm".
Error select_tcp(const Library& library, const std::string& address, uint16_t port, InfoPtr* out) {
  const char* wanted = std::getenv("TE_TCP_PROVIDER");
  std::vector<std::string> providers = {"net", "tcp", "tcp;ofi_rxm"};
  if (wanted != nullptr && *wanted != '\0') providers = {wanted};
  const std::string service = format("%u", port);
  Error last;
  for (const std::string& provider : providers) {
    const InfoPtr hints = hints_for(library, Kind::kTcp, provider.c_str(), false);
    if (hints == nullptr) return Error(Status::kTransport, "out of memory");
    InfoPtr list(nullptr, FreeInfo{&library});
    last = get_info(library, Kind::kTcp, address.c_str(), port != 0 ? service.c_str() : nullptr, *hints, &list);
    if (last) continue;
    *out = pick(library, list.get(), [&](const fi_info& info) {
      return provider == info.fabric_attr->prov_name && shortcoming(info).empty();
    });
    if (*out != nullptr) return {};
    last = Error(Status::kTransportUnavailable, format("%s: %s", provider.c_str(), shortcoming(*list).c_str()));
  }
  return Error(Status::kTransportUnavailable,
               format("%s has no reliable-datagram provider over TCP for %s: %s", library.name.c_str(), address.c_str(),
                      last.message().c_str()),
               last.provider_status());
}

Error select_nics(const Library& library, Kind kind, const ProviderOptions& options, std::vector<Selected>* out) {
  out->clear();
  if (kind == Kind::kEfa) return select_efa(library, options, out);
  const size_t named = kind == Kind::kTcp ? options.nics.size() : 0;  // shm's NICs have no names to choose from
  const size_t count = options.nic_count != 0 ? options.nic_count : std::max<size_t>(named, 1);
  if (count > TE_MAX_NICS) return Error(Status::kConfig, format("%zu NICs asked for, at most %d", count, TE_MAX_NICS));
  if (kind == Kind::kTcp) {
    std::vector<Interface> interfaces;
    if (Error error = choose_interfaces(options.nics, static_cast<uint32_t>(count), &interfaces)) return error;
    for (const Interface& interface : interfaces) {
      Selected selected{InfoPtr(nullptr, FreeInfo{&library}), interface.name, interface.address, false};
      if (Error error = select_tcp(library, interface.address, 0, &selected.info)) return error;
      out->push_back(std::move(selected));
    }
    return {};
  }
  for (uint32_t nic = 0; nic < count; ++nic) {
    Selected selected{InfoPtr(nullptr, FreeInfo{&library}), {}, {}, false};
    if (Error error = select_shm(library, options, nic, &selected)) return error;
    out->push_back(std::move(selected));
  }
  return {};
}

}  // namespace te::efa
#endif
