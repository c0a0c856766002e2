// The Provider face of the simulator: takes the fabric's mutex and hands on. Nothing below this file locks.
#include "native/sim/provider.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "native/sim/commands.h"
#include "native/sim/fabric.h"
#include "native/sim/host.h"
#include "native/sim/nic.h"
#include "native/sim/options.h"

namespace te::sim {
namespace {

constexpr uint32_t kDefaultNics = 1;
constexpr uint32_t kDefaultCompletionDepth = 4096;
constexpr PostResult kNoSuchNic{0, false, EINVAL};

class SimProvider final : public Provider {
 public:
  explicit SimProvider(Fabric& fabric) : fabric_(fabric) {}

  ~SimProvider() override {
    const std::lock_guard lock(fabric_.mutex);
    if (joined_) fabric_.remove(host_);
    host_.nics.clear();
  }

  Error open(const ProviderOptions& settings, Options options);

  const Capabilities& capabilities() const override { return host_.capabilities; }
  std::string provider_name() const override { return "sim"; }
  std::string library_name() const override { return "simulated fabric"; }
  uint32_t nic_count() const override { return static_cast<uint32_t>(host_.nics.size()); }

  NicInfo nic(uint32_t nic) const override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->info() : NicInfo{};
  }

  Error register_memory(uint32_t nic, const MemorySpan& span, MemoryKey* key) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->register_memory(span, key) : no_such_nic(nic);
  }

  Error deregister_memory(uint32_t nic, const MemoryKey& key) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->deregister_memory(key) : no_such_nic(nic);
  }

  Error open_path(uint32_t nic, const te_nic_address& remote, uint64_t, PathId* path) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->open_path(remote, path) : no_such_nic(nic);
  }

  void close_path(uint32_t nic, PathId path) override {
    const std::lock_guard lock(fabric_.mutex);
    if (nic < host_.nics.size()) host_.nics[nic]->close_path(path);
  }

  PostResult post(uint32_t nic, std::span<const WorkRequest> requests) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->post(requests) : kNoSuchNic;
  }

  PostResult post_receive(uint32_t nic, void* buffer, uint64_t length, uint64_t local_key,
                          WorkContext* context) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->post_receive(buffer, length, local_key, context) : kNoSuchNic;
  }

  uint32_t poll(uint32_t nic, std::span<Completion> out) override {
    if (nic >= host_.nics.size() || host_.nics[nic]->idle()) return 0;  // the NICs never change while open
    const std::lock_guard lock(fabric_.mutex);
    return host_.nics[nic]->poll(out);
  }

  int wait_fd(uint32_t nic) const override { return nic < host_.nics.size() ? host_.nics[nic]->wait_fd() : -1; }

  bool arm(uint32_t nic) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() && host_.nics[nic]->arm();
  }

  Error reset_path(uint32_t nic, PathId path) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() ? host_.nics[nic]->reset_path(path) : no_such_nic(nic);
  }

  Death death_of(uint32_t nic, PathId path) override {
    const std::lock_guard lock(fabric_.mutex);
    return nic < host_.nics.size() && host_.nics[nic]->proven_dead(path) ? Death::kProven : Death::kNotProven;
  }

  Error inject(std::string_view command) override {
    const std::lock_guard lock(fabric_.mutex);
    return run_command(fabric_, host_, command);
  }

 private:
  Error no_such_nic(uint32_t nic) const {
    return Error(Status::kArgument, format("there is no NIC %u; this engine has %zu", nic, host_.nics.size()), EINVAL);
  }
  void fill_capabilities(const ProviderOptions& settings);
  std::string address(uint32_t nic, uint64_t serial) const;

  Fabric& fabric_;
  Host host_;
  bool joined_ = false;
};

// A number that the simulated device has and the engine may lower; 0: no wish.
uint64_t lower(uint64_t device, uint64_t wish) { return wish == 0 ? device : std::min(device, wish); }

void SimProvider::fill_capabilities(const ProviderOptions& settings) {
  const Options& options = host_.options;
  Capabilities& capabilities = host_.capabilities;
  capabilities.max_write_bytes = lower(options.max_write, settings.chunk_bytes);
  capabilities.max_send_bytes = static_cast<uint32_t>(options.max_send);
  capabilities.nic_depth = static_cast<uint32_t>(lower(options.depth, settings.nic_depth));
  capabilities.receive_depth = static_cast<uint32_t>(options.receive_depth);
  const uint32_t wished = settings.completion_depth != 0 ? settings.completion_depth : kDefaultCompletionDepth;
  capabilities.completion_depth = static_cast<uint32_t>(options.completion_depth.value_or(wished));
  capabilities.ordered_writes = !options.reorder;
  capabilities.ordered_sends = !options.reorder;
  capabilities.delivery_complete = capabilities.completion_orders = options.delivery_complete;
  capabilities.keys_enforced = options.keys_enforced;
  capabilities.reads = options.reads;
  capabilities.connected_paths = options.connected;
  capabilities.same_process_only = true;
  capabilities.reports_dead_peer = options.reports_dead_peer;
}

// "sim:NAME:nic" where the address is fixed, else "sim:" identity generation nic (and a serial for engines without
// identity, which would otherwise collide).
std::string SimProvider::address(uint32_t nic, uint64_t serial) const {
  std::string text = "sim:";
  if (!host_.options.address.empty()) return text + host_.options.address + ":" + std::to_string(nic);
  const auto append = [&](const auto& value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); };
  append(host_.identity);
  append(host_.generation);
  append(static_cast<uint8_t>(nic));
  if (host_.identity == Identity{}) append(serial);
  return text;
}

Error SimProvider::open(const ProviderOptions& settings, Options options) {
  const uint32_t named = static_cast<uint32_t>(settings.nics.size());
  const uint32_t count = settings.nic_count != 0 ? settings.nic_count : named != 0 ? named : kDefaultNics;
  if (count > TE_MAX_NICS)
    return Error(Status::kConfig, format("%u NICs asked for; at most %d", count, static_cast<int>(TE_MAX_NICS)));
  const std::lock_guard lock(fabric_.mutex);
  options.wait_fd = options.wait_fd && settings.want_wait_fd;
  host_.options = std::move(options);
  std::copy_n(settings.identity, host_.identity.size(), host_.identity.begin());
  host_.generation = settings.generation;
  fill_capabilities(settings);
  // Engines with one seed should not make the same choices in step; the number of engines already open tells them apart
  // and is the same in every run of one scenario.
  host_.random = Random(host_.options.seed * 0x9E3779B97F4A7C15u + fabric_.host_count());
  const uint64_t serial = fabric_.next_nic_serial();
  for (uint32_t nic = 0; nic < count; ++nic) {
    std::shared_ptr<Endpoint> endpoint = fabric_.endpoint(address(nic, serial));
    if (endpoint->nic != nullptr)
      return Error(Status::kConfig, "sim address in use by another engine of this process", EADDRINUSE,
                   static_cast<int>(nic));
    const std::string name = named != 0 ? settings.nics[nic % named] : "sim" + std::to_string(nic);
    host_.nics.push_back(std::make_unique<Nic>(fabric_, host_, nic, name, std::move(endpoint)));
    if (host_.options.wait_fd && host_.nics.back()->wait_fd() < 0)
      return Error(Status::kTransportUnavailable, "no eventfd: too many open files", EMFILE, static_cast<int>(nic));
  }
  fabric_.add(host_);
  joined_ = true;
  return {};
}

}  // namespace

Error open_provider(const ProviderOptions& settings, std::unique_ptr<Provider>* out) {
  Options options;
  if (Error error = parse_options(settings.sim, &options)) return error;
  auto provider = std::make_unique<SimProvider>(Fabric::instance());
  if (Error error = provider->open(settings, std::move(options))) return error;
  *out = std::move(provider);
  return {};
}

}  // namespace te::sim
