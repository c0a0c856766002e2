#include "proxy/providers.h"

#include "efa/provider.h"
#include "native/sim/provider.h"

namespace te {
namespace {

bool is_libfabric(const std::string& transport) {
  return transport == "tcp" || transport == "shm" || transport == "efa";
}

Error unknown(const std::string& transport) {
  if (transport == "cx7") return Error(Status::kTransportUnavailable, "this build has no libibverbs transport (cx7)");
  return Error(Status::kConfig, format("unknown transport '%s': known are efa, cx7, tcp, shm, sim", transport.c_str()));
}

}  // namespace

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out) {
  if (options.transport == "sim") return sim::open_provider(options, out);
  if (is_libfabric(options.transport)) return efa::open_provider(options, out);
  return unknown(options.transport);
}

Error probe_transport(const std::string& transport, std::string* provider_name, std::string* library_name) {
  if (transport == "sim") {
    *provider_name = "sim";
    *library_name = "built in";
    return {};
  }
  if (is_libfabric(transport)) return efa::probe(transport, provider_name, library_name);
  return unknown(transport);
}

}  // namespace te
