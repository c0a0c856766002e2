// The Provider over libibverbs: a row of NICs.
#include "cx7/provider.h"

#include <cstdlib>

#include "cx7/nic.h"
#include "cx7/ports.h"
#include "native/nic_row.h"

namespace te::cx7 {

std::string sysfs_root() {
  const char* root = std::getenv("TE_RDMA_ROOT");
  return root == nullptr ? "" : root;
}

#ifdef TE_HAVE_VERBS
namespace {

class VerbsProvider final : public NicRow<Nic> {
 public:
  using NicRow::NicRow;

  Error reset_path(uint32_t nic, PathId path) override { return nics()[nic]->reset_path(path); }
  // A dead process takes its queue pairs with it, so what is sent to it ends with an error: there is no need to ask.
  Death death_of(uint32_t, PathId) override { return Death::kNotProven; }
};

}  // namespace

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out) {
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  std::vector<Port> ports;
  if (Error error = choose_ports(sysfs_root(), options.rdma, options.nics, options.nic_count, &ports)) return error;
  std::vector<std::unique_ptr<Nic>> nics;
  const auto open = [&](const Port& port, auto* nic) { return Nic::open(*library, port, options, nic); };
  if (Error error = open_row<Nic>(ports, open, &nics)) return error;
  *out = std::make_unique<VerbsProvider>(library->name, std::move(nics));
  return {};
}

Error probe(std::string* provider_name, std::string* library_name) {
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  te_rdma_settings settings{};
  settings.gid_index = -1;
  std::vector<Port> ports;
  if (Error error = choose_ports(sysfs_root(), settings, {}, 0, &ports)) return error;
  *provider_name = "verbs";
  *library_name = library->name;
  return {};
}

#else

Error open_provider(const ProviderOptions&, std::unique_ptr<Provider>*) {
  return Error(Status::kTransportUnavailable,
               "this build has no libibverbs transport: it was built without the headers of libibverbs");
}
Error probe(std::string*, std::string*) {
  return Error(Status::kTransportUnavailable,
               "this build has no libibverbs transport: it was built without the headers of libibverbs");
}
#endif

}  // namespace te::cx7
