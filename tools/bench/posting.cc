// What a work request costs the host in transport cx7: the provider's post and poll beside a bare loop of ibv_post_send and
// ibv_poll_cq with the same chains and the same rule of signalling. With the stand-in for libibverbs in its fast mode
// the device costs next to nothing, so what remains is ours; meant for `valgrind --tool=callgrind`, which counts instructions.
//
//   bench_posting [ours|bare|both] [rounds] [bytes] [times]
//   tools/bench/posting.sh     runs it under callgrind and prints instructions per request
//
// TE_BENCH_DEVICES=rxe0,rxe1 names two devices to write between (standin0,standin1). Over real ones the medians of `times`
// alternating runs say what the engine's provider keeps of the device's bandwidth.
#include <netinet/in.h>
#include <stdlib.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cx7/library.h"
#include "cx7/provider.h"
#include "native/provider.h"
#include "support.h"

#ifdef TE_HAVE_VERBS
namespace te {
namespace {

constexpr uint32_t kChain = 32;
constexpr uint32_t kSignalEvery = 16;

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "bench_posting: %s\n", what);
  std::exit(1);
}

std::string device(size_t index) {
  const char* names = std::getenv("TE_BENCH_DEVICES");
  const std::string text = names == nullptr ? "standin0,standin1" : names;
  const size_t comma = text.find(',');
  must(comma != std::string::npos, "TE_BENCH_DEVICES needs two names with a comma between them");
  return index == 0 ? text.substr(0, comma) : text.substr(comma + 1);
}

void must(const Error& error) { must(error.ok(), error.message().c_str()); }

// --- ours ------------------------------------------------------------------------------------------------------------------------

struct Ours {
  std::unique_ptr<Provider> provider, far;
  std::vector<uint8_t> memory, far_memory;
  MemoryKey key, far_key;
  PathId path = kNoPath;
  std::vector<WorkContext> contexts;
  WorkRequest requests[kChain];
  Completion completions[64];

  explicit Ours(uint64_t bytes) : memory(bytes * kChain), far_memory(bytes * kChain), contexts(kChain) {
    provider = open(device(0));
    far = open(device(1));
    must(provider->register_memory(0, {memory.data(), memory.size(), TE_DEVICE_HOST, 0}, &key));
    must(far->register_memory(0, {far_memory.data(), far_memory.size(), TE_DEVICE_HOST, 0}, &far_key));
    must(provider->open_path(0, far->nic(0).address, 1, &path));
    for (bool up = false; !up;) {
      far->poll(0, completions);
      for (uint32_t i = provider->poll(0, completions); i > 0; --i) {
        must(completions[i - 1].kind == CompletionKind::kPathUp, "the path did not come up");
        up = true;
      }
    }
    for (uint32_t i = 0; i < kChain; ++i) {
      WorkRequest& r = requests[i];
      r.opcode = Opcode::kWrite;
      r.more = i + 1 < kChain;
      r.path = path;
      r.local = memory.data() + i * bytes;
      r.local_key = key.local_key;
      r.length = bytes;
      r.remote_address = far_key.base + i * bytes;
      r.remote_key = far_key.remote_key;
      r.context = &contexts[i];
    }
  }

  ~Ours() {
    static_cast<void>(provider->deregister_memory(0, key).ok());
    static_cast<void>(far->deregister_memory(0, far_key).ok());
  }

  static std::unique_ptr<Provider> open(const std::string& device) {
    ProviderOptions options;
    options.transport = "cx7";
    options.nics = {device};
    options.generation = 1;
    options.completion_depth = 4096;
    options.want_wait_fd = false;
    options.rdma.gid_index = -1;
    options.rdma.ack_timeout = 15;
    options.rdma.retry_count = options.rdma.rnr_retry = 7;
    std::unique_ptr<Provider> provider;
    must(cx7::open_provider(options, &provider));
    return provider;
  }

  [[gnu::noinline]] void round() {
    must(provider->post(0, requests).posted == kChain, "post");
    for (uint32_t done = 0; done < kChain;) done += provider->poll(0, completions);
  }
};

// --- bare ------------------------------------------------------------------------------------------------------------------------

struct Bare {
  struct End {
    ibv_context* context = nullptr;
    ibv_pd* domain = nullptr;
    ibv_cq* queue = nullptr;
    ibv_qp* pair = nullptr;
    ibv_mr* region = nullptr;
    ibv_gid gid{};
    std::vector<uint8_t> memory;
  };
  const cx7::Library* v = nullptr;
  End ends[2];
  ibv_send_wr requests[kChain] = {};
  ibv_sge pieces[kChain] = {};
  uint64_t bytes;

  explicit Bare(uint64_t length) : bytes(length) {
    must(cx7::load_library(&v));
    for (size_t i = 0; i < 2; ++i) open(&ends[i], device(i));
    connect(ends[0], ends[1]);
    connect(ends[1], ends[0]);
    for (uint32_t i = 0; i < kChain; ++i) {
      pieces[i].lkey = ends[0].region->lkey;
      requests[i].next = i + 1 < kChain ? &requests[i + 1] : nullptr;
      requests[i].sg_list = &pieces[i];
      requests[i].num_sge = 1;
      requests[i].opcode = IBV_WR_RDMA_WRITE;
    }
  }

  void open(End* end, const std::string& name) {
    ibv_device** devices = v->get_device_list(nullptr);
    must(devices != nullptr, "ibv_get_device_list");
    for (ibv_device** found = devices; *found != nullptr; ++found)
      if (name == (*found)->name) end->context = v->open_device(*found);
    must(end->context != nullptr, "ibv_open_device");
    v->free_device_list(devices);
    end->memory.resize(bytes * kChain);
    end->domain = v->alloc_pd(end->context);
    end->queue = v->create_cq(end->context, 1024, nullptr, nullptr, 0);
    end->region = v->reg_mr(end->domain, end->memory.data(), end->memory.size(),
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    must(end->domain != nullptr && end->queue != nullptr && end->region != nullptr, "set-up");
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = attributes.recv_cq = end->queue;
    attributes.cap = {512, 1, 1, 1, 128};
    end->pair = v->create_qp(end->domain, &attributes);
    must(end->pair != nullptr, "ibv_create_qp");
    must(v->query_gid(end->context, 1, 1, &end->gid) == 0, "ibv_query_gid");
  }

  void connect(End& end, const End& other) {
    ibv_port_attr port{};
    must(v->query_port(end.context, 1, reinterpret_cast<_compat_ibv_port_attr*>(&port)) == 0, "ibv_query_port");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    must(v->modify_qp(end.pair, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "INIT");
    a = ibv_qp_attr{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = port.active_mtu;
    a.dest_qp_num = other.pair->qp_num;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.sgid_index = 1;
    a.ah_attr.grh.hop_limit = 64;
    a.ah_attr.grh.dgid = other.gid;
    must(v->modify_qp(end.pair, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
         "RTR");
    a = ibv_qp_attr{};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 15;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    must(v->modify_qp(end.pair, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC) == 0,
         "RTS");
  }

  // What must be written anew for each request: where from, where to, how long, and whether it is signalled.
  [[gnu::noinline]] void round() {
    const uint64_t from = reinterpret_cast<uint64_t>(ends[0].memory.data());
    const uint64_t to = reinterpret_cast<uint64_t>(ends[1].memory.data());
    uint32_t signalled = 0;
    for (uint32_t i = 0; i < kChain; ++i) {
      ibv_send_wr& r = requests[i];
      pieces[i].addr = from + i * bytes;
      pieces[i].length = static_cast<uint32_t>(bytes);
      r.wr.rdma.remote_addr = to + i * bytes;
      r.wr.rdma.rkey = ends[1].region->rkey;
      r.wr_id = i;
      const bool tell = (i + 1) % kSignalEvery == 0;
      r.send_flags = (tell ? IBV_SEND_SIGNALED : 0) | (bytes <= 128 ? IBV_SEND_INLINE : 0);
      signalled += tell;
    }
    ibv_send_wr* bad = nullptr;
    must(ibv_post_send(ends[0].pair, requests, &bad) == 0, "ibv_post_send");
    ibv_wc entries[32];
    while (signalled > 0) {
      const int count = ibv_poll_cq(ends[0].queue, 32, entries);
      for (int i = 0; i < count; ++i) must(entries[i].status == IBV_WC_SUCCESS, "completion");
      signalled -= static_cast<uint32_t>(count);
    }
  }
};

template <typename Side>
double nanoseconds(uint64_t rounds, uint64_t bytes) {
  Side side(bytes);
  for (int i = 0; i < 2; ++i) side.round();
  const double begin = bench::seconds();
  for (uint64_t i = 0; i < rounds; ++i) side.round();
  return (bench::seconds() - begin) * 1e9 / static_cast<double>(rounds * kChain);
}

void say(const char* name, uint64_t bytes, const std::vector<double>& runs) {
  const double median = bench::median(runs);
  std::printf("%-5s %7llu bytes: %9.1f ns per work request, %8.1f MB/s\n", name, static_cast<unsigned long long>(bytes),
              median, static_cast<double>(bytes) * 1e3 / median);
}

}  // namespace
}  // namespace te

int main(int count, char** arguments) {
  const std::string who = count > 1 ? arguments[1] : "both";
  const uint64_t rounds = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 100'000;
  const uint64_t bytes = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 256;
  const int times = count > 4 ? std::atoi(arguments[4]) : 1;
  std::vector<double> ours, bare;
  for (int i = 0; i < times; ++i) {
    if (who != "bare") ours.push_back(te::nanoseconds<te::Ours>(rounds, bytes));
    if (who != "ours") bare.push_back(te::nanoseconds<te::Bare>(rounds, bytes));
  }
  if (!ours.empty()) te::say("ours", bytes, ours);
  if (!bare.empty()) te::say("bare", bytes, bare);
  if (!ours.empty() && !bare.empty()) std::printf("ratio %.2f\n", bench::median(bare) / bench::median(ours));
}
#else
int main() { std::puts("bench_posting: built without the headers of libibverbs"); }
#endif
