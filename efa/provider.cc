// The Provider of the libfabric transports: a row of NICs.
#include "efa/provider.h"

#include "efa/nic.h"
#include "native/nic_row.h"

namespace te::efa {

#ifdef TE_HAVE_LIBFABRIC
namespace {

class FabricProvider final : public NicRow<Nic> {
 public:
  using NicRow::NicRow;

  void ring_doorbells() override {
    for (const auto& nic : nics()) nic->ring_doorbells();
  }

  // libfabric has no call that ends one connection of an RDM endpoint (removing the address leaves it open).
  Error reset_path(uint32_t, PathId) override {
    return Error(Status::kUnsupported, "libfabric cannot reset the connection to one peer");
  }
  Death death_of(uint32_t nic, PathId path) override { return nics()[nic]->death_of(path); }
};

}  // namespace

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out) {
  Kind kind;
  if (Error error = parse_kind(options.transport, &kind)) return error;
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  SignalGuard guard;
  std::vector<Selected> selected;
  if (Error error = select_nics(*library, kind, options, &selected)) return error;
  std::vector<std::unique_ptr<Nic>> nics;
  const auto open = [&](Selected& one, auto* nic) { return Nic::open(*library, kind, std::move(one), options, nic); };
  if (Error error = open_row<Nic>(selected, open, &nics)) return error;
  *out = std::make_unique<FabricProvider>(library->name, std::move(nics));
  return {};
}

Error probe(const std::string& transport, std::string* provider_name, std::string* library_name) {
  Kind kind;
  if (Error error = parse_kind(transport, &kind)) return error;
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  SignalGuard guard;
  std::vector<Selected> selected;
  if (Error error = select_nics(*library, kind, ProviderOptions{}, &selected)) return error;
  *provider_name = selected.front().info->fabric_attr->prov_name;
  *library_name = library->name;
  return {};
}

#else

Error open_provider(const ProviderOptions&, std::unique_ptr<Provider>*) {
  return Error(Status::kTransportUnavailable,
               "built without libfabric's headers: install libfabric-dev and build again");
}

Error probe(const std::string&, std::string*, std::string*) {
  return Error(Status::kTransportUnavailable,
               "built without libfabric's headers: install libfabric-dev and build again");
}

#endif

}  // namespace te::efa
