// The Provider over libibverbs: a row of NICs.
#include "cx7/provider.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "cx7/nic.h"
#include "cx7/ports.h"

namespace te::cx7 {

std::string sysfs_root() {
  const char* root = std::getenv("TE_RDMA_ROOT");
  return root == nullptr ? "" : root;
}

#ifdef TE_HAVE_VERBS
namespace {

class VerbsProvider final : public Provider {
 public:
  VerbsProvider(const Library& library, std::vector<std::unique_ptr<Nic>> nics)
      : library_(library), nics_(std::move(nics)), capabilities_(nics_.front()->capabilities()) {
    for (const auto& nic : nics_) {  // what every NIC can do
      const Capabilities& one = nic->capabilities();
      capabilities_.max_write_bytes = std::min(capabilities_.max_write_bytes, one.max_write_bytes);
      capabilities_.max_send_bytes = std::min(capabilities_.max_send_bytes, one.max_send_bytes);
      capabilities_.nic_depth = std::min(capabilities_.nic_depth, one.nic_depth);
      capabilities_.receive_depth = std::min(capabilities_.receive_depth, one.receive_depth);
      capabilities_.completion_depth = std::min(capabilities_.completion_depth, one.completion_depth);
    }
  }

  // A forked child has inherited the objects, but the kernel's side of them is the parent's.
  ~VerbsProvider() override {
    if (getpid() == owner_) return;
    for (auto& nic : nics_) (void)nic.release();
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  std::string provider_name() const override { return "verbs"; }
  std::string library_name() const override { return library_.name; }
  uint32_t nic_count() const override { return static_cast<uint32_t>(nics_.size()); }
  NicInfo nic(uint32_t nic) const override { return nics_[nic]->info(); }

  Error register_memory(uint32_t nic, const MemorySpan& span, MemoryKey* key) override {
    return nics_[nic]->register_memory(span, key);
  }
  Error deregister_memory(uint32_t nic, const MemoryKey& key) override { return nics_[nic]->deregister_memory(key); }

  Error open_path(uint32_t nic, const te_nic_address& remote, uint64_t generation, PathId* path) override {
    return nics_[nic]->open_path(remote, generation, path);
  }
  void close_path(uint32_t nic, PathId path) override { nics_[nic]->close_path(path); }

  PostResult post(uint32_t nic, std::span<const WorkRequest> requests) override { return nics_[nic]->post(requests); }
  PostResult post_receive(uint32_t nic, void* buffer, uint64_t length, uint64_t local_key,
                          WorkContext* context) override {
    return nics_[nic]->post_receive(buffer, length, local_key, context);
  }
  uint32_t poll(uint32_t nic, std::span<Completion> out) override { return nics_[nic]->poll(out); }

  int wait_fd(uint32_t nic) const override { return nics_[nic]->wait_fd(); }
  bool arm(uint32_t nic) override { return nics_[nic]->arm(); }

  Error reset_path(uint32_t nic, PathId path) override { return nics_[nic]->reset_path(path); }
  // A dead process takes its queue pairs with it, so what is sent to it ends with an error: there is no need to ask.
  Death death_of(uint32_t, PathId) override { return Death::kNotProven; }
  Error inject(std::string_view) override {
    return Error(Status::kUnsupported, "only the simulated fabric takes commands");
  }

 private:
  const Library& library_;
  std::vector<std::unique_ptr<Nic>> nics_;
  Capabilities capabilities_;
  const pid_t owner_ = getpid();
};

}  // namespace

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out) {
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  std::vector<Port> ports;
  if (Error error = choose_ports(sysfs_root(), options.rdma, options.nics, options.nic_count, &ports)) return error;
  std::vector<std::unique_ptr<Nic>> nics;
  for (const Port& port : ports) {
    std::unique_ptr<Nic> nic;
    if (Error error = Nic::open(*library, port, options, &nic)) return error;
    nics.push_back(std::move(nic));
  }
  *out = std::make_unique<VerbsProvider>(*library, std::move(nics));
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
