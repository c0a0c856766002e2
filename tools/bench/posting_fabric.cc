// What a work request costs the host in transport efa: the provider's post and poll beside a bare loop of fi_writemsg
// and fi_cq_read with the same flags. With the stand-in for libfabric in its free mode the device costs next to
// nothing, so what remains is ours; meant for `valgrind --tool=callgrind`, which counts instructions.
//
//   bench_posting_fabric [ours|bare|both] [rounds] [bytes] [peers]
//   tools/bench/posting.sh     runs it under callgrind and prints instructions per request
//
// peers=1: a chain of 32 writes to one peer. More: a write with immediate to each, as a scatter does.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "efa/library.h"
#include "efa/provider.h"
#include "native/provider.h"
#include "support.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te {
namespace {

constexpr uint32_t kChain = 32;

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "bench_posting_fabric: %s\n", what);
  std::exit(1);
}

void must(const Error& error) { must(error.ok(), error.message().c_str()); }

struct Shape {
  uint64_t bytes = 0;
  uint32_t peers = 1;
  uint32_t requests() const { return peers > 1 ? peers : kChain; }
};

// An address like this one, of another queue pair. A free endpoint reaches nobody, so nobody has to be there.
te_nic_address sibling(te_nic_address address, uint32_t number) {
  const auto queue_pair = static_cast<uint16_t>(1000 + number);
  std::memcpy(address.bytes + 16, &queue_pair, sizeof queue_pair);
  return address;
}

// --- ours ------------------------------------------------------------------------------------------------------------

struct Ours {
  std::unique_ptr<Provider> provider;
  std::vector<uint8_t> memory;
  MemoryKey key;
  std::vector<WorkContext> contexts;
  std::vector<WorkRequest> requests;
  Completion completions[32];

  explicit Ours(const Shape& shape)
      : memory(shape.bytes * shape.requests()), contexts(shape.requests()), requests(shape.requests()) {
    ProviderOptions options;
    options.transport = "efa";
    options.nics = {"efa0"};
    options.want_wait_fd = false;
    must(efa::open_provider(options, &provider));
    must(provider->register_memory(0, {memory.data(), memory.size(), TE_DEVICE_HOST, 0}, &key));
    std::vector<PathId> paths(shape.peers);
    for (uint32_t i = 0; i < shape.peers; ++i)
      must(provider->open_path(0, sibling(provider->nic(0).address, i), 1, &paths[i]));
    for (uint32_t i = 0; i < shape.requests(); ++i) {
      WorkRequest& r = requests[i];
      r.opcode = shape.peers > 1 ? Opcode::kWriteImmediate : Opcode::kWrite;
      r.immediate = i;
      r.more = i + 1 < shape.requests();
      r.path = paths[i % shape.peers];
      r.local = memory.data() + i * shape.bytes;
      r.local_key = key.local_key;
      r.length = shape.bytes;
      r.remote_address = 0x10000 + i * shape.bytes;
      r.remote_key = 7;
      r.context = &contexts[i];
    }
  }
  ~Ours() { static_cast<void>(provider->deregister_memory(0, key).ok()); }

  [[gnu::noinline]] void round() {
    must(provider->post(0, requests).posted == requests.size(), "post");
    for (size_t done = 0; done < requests.size();) done += provider->poll(0, completions);
  }
};

// --- bare ------------------------------------------------------------------------------------------------------------

template <typename Object, typename Open>
efa::FidPtr<Object> open(const char* what, const Open& call) {
  Object* object = nullptr;
  must(call(&object) == 0, what);
  return efa::FidPtr<Object>(object);
}

struct Bare {
  const Shape shape;
  const efa::Library* library = nullptr;
  std::vector<uint8_t> memory;
  efa::InfoPtr info{nullptr, {}};
  efa::FidPtr<fid_fabric> fabric;  // closed from the bottom up
  efa::FidPtr<fid_domain> domain;
  efa::FidPtr<fid_mr> region;
  efa::FidPtr<fid_av> vector;
  efa::FidPtr<fid_cq> queue;
  efa::FidPtr<fid_ep> endpoint;
  std::vector<fi_addr_t> peers;
  std::vector<fi_context2> contexts;

  explicit Bare(const Shape& wanted)
      : shape(wanted), memory(shape.bytes * shape.requests()), peers(shape.peers), contexts(shape.requests()) {
    must(efa::load_library(&library));
    find();
    fi_cq_attr completions{};
    completions.format = FI_CQ_FORMAT_DATA;
    completions.size = 1024;
    fi_av_attr addresses{};
    addresses.type = FI_AV_TABLE;
    fabric = open<fid_fabric>("fi_fabric", [&](auto** o) { return library->fabric(info->fabric_attr, o, nullptr); });
    domain = open<fid_domain>("fi_domain", [&](auto** o) { return fi_domain(fabric.get(), info.get(), o, nullptr); });
    region = open<fid_mr>("fi_mr_reg", [&](auto** o) {
      return fi_mr_reg(domain.get(), memory.data(), memory.size(), FI_WRITE, 0, 0, 0, o, nullptr);
    });
    vector = open<fid_av>("fi_av_open", [&](auto** o) { return fi_av_open(domain.get(), &addresses, o, nullptr); });
    queue = open<fid_cq>("fi_cq_open", [&](auto** o) { return fi_cq_open(domain.get(), &completions, o, nullptr); });
    endpoint = open<fid_ep>("fi_endpoint", [&](auto** o) { return fi_endpoint(domain.get(), info.get(), o, nullptr); });
    must(fi_ep_bind(endpoint.get(), &vector->fid, 0) == 0 &&
             fi_ep_bind(endpoint.get(), &queue->fid, FI_TRANSMIT | FI_RECV) == 0 && fi_enable(endpoint.get()) == 0,
         "fi_enable");
    te_nic_address own{};
    size_t length = sizeof own.bytes;
    must(fi_getname(&endpoint->fid, own.bytes, &length) == 0, "fi_getname");
    for (uint32_t i = 0; i < shape.peers; ++i)
      must(fi_av_insert(vector.get(), sibling(own, i).bytes, 1, &peers[i], 0, nullptr) == 1, "fi_av_insert");
  }

  void find() {
    efa::InfoPtr hints(library->dupinfo(nullptr), efa::FreeInfo{library});
    hints->mode = FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup("efa");
    hints->fabric_attr->name = strdup("efa-direct");
    fi_info* found = nullptr;
    must(library->getinfo(FI_VERSION(1, 18), nullptr, nullptr, 0, hints.get(), &found) == 0, "fi_getinfo");
    info = efa::InfoPtr(found, efa::FreeInfo{library});
  }

  // What must be written anew for each request: where from, where to, how long, to whom, and the immediate.
  [[gnu::noinline]] void round() {
    const uint32_t count = shape.requests();
    void* descriptor = fi_mr_desc(region.get());
    uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | FI_MORE | (shape.peers > 1 ? FI_REMOTE_CQ_DATA : 0);
    for (uint32_t i = 0; i < count; ++i) {
      const iovec local{memory.data() + i * shape.bytes, shape.bytes};
      const fi_rma_iov remote{0x10000 + i * shape.bytes, shape.bytes, 7};
      const fi_msg_rma message{&local, &descriptor, 1, peers[i % shape.peers], &remote, 1, &contexts[i], i};
      if (i + 1 == count) flags &= ~FI_MORE;
      must(fi_writemsg(endpoint.get(), &message, flags) == 0, "fi_writemsg");
    }
    fi_cq_data_entry entries[32];
    for (uint32_t done = 0; done < count;) {
      const ssize_t got = fi_cq_read(queue.get(), entries, 32);
      if (got > 0) done += static_cast<uint32_t>(got);
      else must(got == -FI_EAGAIN, "fi_cq_read");
    }
  }
};

template <typename Side>
double nanoseconds(uint64_t rounds, const Shape& shape) {
  Side side(shape);
  for (int i = 0; i < 2; ++i) side.round();
  const double begin = bench::seconds();
  for (uint64_t i = 0; i < rounds; ++i) side.round();
  return (bench::seconds() - begin) * 1e9 / static_cast<double>(rounds * shape.requests());
}

}  // namespace
}  // namespace te

int main(int count, char** arguments) {
  const std::string who = count > 1 ? arguments[1] : "both";
  const uint64_t rounds = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 100'000;
  const te::Shape shape{count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 256,
                        count > 4 ? static_cast<uint32_t>(std::strtoul(arguments[4], nullptr, 10)) : 1};
  if (who != "bare")
    std::printf("ours %5llu bytes, %u peers: %7.1f ns per work request\n", static_cast<unsigned long long>(shape.bytes),
                shape.peers, te::nanoseconds<te::Ours>(rounds, shape));
  if (who != "ours")
    std::printf("bare %5llu bytes, %u peers: %7.1f ns per work request\n", static_cast<unsigned long long>(shape.bytes),
                shape.peers, te::nanoseconds<te::Bare>(rounds, shape));
}
#else
int main() { std::puts("bench_posting_fabric: built without the headers of libfabric"); }
#endif
