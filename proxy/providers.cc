#include "proxy/providers.h"

#include <algorithm>
#include <cstring>

#include "cx7/ports.h"
#include "cx7/provider.h"
#include "efa/provider.h"
#include "native/sim/provider.h"

namespace te {
namespace {

bool is_libfabric(const std::string& transport) {
  return transport == "tcp" || transport == "shm" || transport == "efa";
}

Error unknown(const std::string& transport) {
  return Error(Status::kConfig, format("unknown transport '%s': known are efa, cx7, tcp, shm, sim", transport.c_str()));
}

template <size_t N>
void copy_text(const std::string& text, char (&out)[N]) {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(out, text.data(), length);
  out[length] = '\0';
}

}  // namespace

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out) {
  if (options.transport == "sim") return sim::open_provider(options, out);
  if (is_libfabric(options.transport)) return efa::open_provider(options, out);
  if (options.transport == "cx7") return cx7::open_provider(options, out);
  return unknown(options.transport);
}

Error probe_transport(const std::string& transport, std::string* provider_name, std::string* library_name) {
  if (transport == "sim") {
    *provider_name = "sim";
    *library_name = "built in";
    return {};
  }
  if (is_libfabric(transport)) return efa::probe(transport, provider_name, library_name);
  if (transport == "cx7") return cx7::probe(provider_name, library_name);
  return unknown(transport);
}

std::vector<te_rdma_port> list_rdma_ports(const std::string& root, const te_rdma_settings& settings) {
  std::vector<te_rdma_port> ports;
  for (const cx7::Port& from : cx7::list_ports(root, settings)) {
    te_rdma_port& to = ports.emplace_back();
    copy_text(from.device, to.device);
    to.port = from.number;
    to.active = from.active;
    to.lid = from.lid;
    to.gid_index = from.gid_index;
    std::memcpy(to.gid, from.gid, sizeof to.gid);
    if (from.gid_index >= 0) copy_text(cx7::gid_kind_name(from.gid_kind), to.gid_kind);
    copy_text(from.interface, to.interface);
    copy_text(from.link_layer, to.link_layer);
    copy_text(from.state, to.state);
    copy_text(from.why, to.why);
    copy_text(from.unusable, to.unusable);
    copy_text(from.remedy, to.remedy);
  }
  return ports;
}

}  // namespace te
