// The Provider of the libfabric transports: a row of NICs.
#include "efa/provider.h"

#include <unistd.h>

#include "efa/nic.h"

namespace te::efa {

#ifdef TE_HAVE_LIBFABRIC
namespace {

class FabricProvider final : public Provider {
 public:
  FabricProvider(const Library& library, std::vector<std::unique_ptr<Nic>> nics)
      : library_(library), nics_(std::move(nics)), capabilities_(nics_.front()->capabilities()) {
    for (const auto& nic : nics_) {  // what every NIC can do
      const Capabilities& one = nic->capabilities();
      capabilities_.max_write_bytes = std::min(capabilities_.max_write_bytes, one.max_write_bytes);
      capabilities_.max_send_bytes = std::min(capabilities_.max_send_bytes, one.max_send_bytes);
      capabilities_.nic_depth = std::min(capabilities_.nic_depth, one.nic_depth);
      capabilities_.receive_depth = std::min(capabilities_.receive_depth, one.receive_depth);
      capabilities_.completion_depth = std::min(capabilities_.completion_depth, one.completion_depth);
      capabilities_.device_memory = capabilities_.device_memory && one.device_memory;
      capabilities_.immediate_consumes_receive |= one.immediate_consumes_receive;
    }
  }

  // A forked child has inherited the object and shares its sockets and files with the parent, so it leaves them alone.
  ~FabricProvider() override {
    if (getpid() == owner_) return;
    for (auto& nic : nics_) (void)nic.release();
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  std::string provider_name() const override { return nics_.front()->provider_name(); }
  std::string library_name() const override { return library_.name; }
  uint32_t nic_count() const override { return static_cast<uint32_t>(nics_.size()); }
  NicInfo nic(uint32_t nic) const override { return nics_[nic]->info(); }

  Error register_memory(uint32_t nic, const MemorySpan& span, MemoryKey* key) override {
    return nics_[nic]->register_memory(span, key);
  }
  Error deregister_memory(uint32_t nic, const MemoryKey& key) override { return nics_[nic]->deregister_memory(key); }

  // libfabric keeps no connection that could outlive a peer: a restarted one answers under a new process id (tcp), name
  // (shm) or queue pair number (efa), so the generation has nothing to tell.
  Error open_path(uint32_t nic, const te_nic_address& remote, uint64_t, PathId* path) override {
    return nics_[nic]->open_path(remote, path);
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
  void ring_doorbells() override {
    for (const auto& nic : nics_) nic->ring_doorbells();
  }

  // libfabric has no call that ends one connection of an RDM endpoint (removing the address leaves it open).
  Error reset_path(uint32_t, PathId) override {
    return Error(Status::kUnsupported, "libfabric cannot reset the connection to one peer");
  }
  Death death_of(uint32_t nic, PathId path) override { return nics_[nic]->death_of(path); }
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
  Kind kind;
  if (Error error = parse_kind(options.transport, &kind)) return error;
  const Library* library = nullptr;
  if (Error error = load_library(&library)) return error;
  SignalGuard guard;
  std::vector<Selected> selected;
  if (Error error = select_nics(*library, kind, options, &selected)) return error;
  std::vector<std::unique_ptr<Nic>> nics;
  for (Selected& one : selected) {
    std::unique_ptr<Nic> nic;
    if (Error error = Nic::open(*library, kind, std::move(one), options, &nic)) {
      return Error(error.status(), error.message(), error.provider_status(), static_cast<int>(nics.size()));
    }
    nics.push_back(std::move(nic));
  }
  *out = std::make_unique<FabricProvider>(*library, std::move(nics));
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
