// The stand-in for libibverbs, loaded as a transport loads the real one, and one end of a connection over it.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace te::test {

inline std::string standin_path() {
  char path[PATH_MAX] = "";
  static_cast<void>(!readlink("/proc/self/exe", path, sizeof path - 1));
  return std::string(path).substr(0, std::string(path).rfind('/') + 1) + "libstandin_verbs.so";
}

struct Verbs {
  // clang-format off: it does not settle on a form
#define TE_VERBS_FUNCTIONS(X) \
  X(ibv_get_device_list) X(ibv_free_device_list) X(ibv_open_device) X(ibv_close_device) X(ibv_query_device) \
  X(ibv_query_gid) X(_ibv_query_gid_ex) X(ibv_query_pkey) X(ibv_alloc_pd) X(ibv_dealloc_pd) X(ibv_reg_mr_iova2) \
  X(ibv_reg_dmabuf_mr) X(ibv_dereg_mr) X(ibv_create_comp_channel) X(ibv_destroy_comp_channel) X(ibv_create_cq) \
  X(ibv_destroy_cq) X(ibv_get_cq_event) X(ibv_ack_cq_events) X(ibv_create_srq) X(ibv_destroy_srq) X(ibv_modify_srq) \
  X(ibv_create_qp) X(ibv_modify_qp) X(ibv_query_qp) X(ibv_destroy_qp) X(ibv_create_ah) X(ibv_destroy_ah) \
  X(ibv_get_async_event) X(ibv_ack_async_event)
// clang-format on
#define TE_VERBS_MEMBER(name) decltype(&::name) name = nullptr;
  TE_VERBS_FUNCTIONS(TE_VERBS_MEMBER)
#undef TE_VERBS_MEMBER
  int (*command)(const char*) = nullptr;
  uint64_t (*statistic)(const char*) = nullptr;
  int (*write_sysfs)(const char*) = nullptr;

  static const Verbs& get() {
    static const Verbs verbs = load();
    return verbs;
  }

 private:
  static Verbs load() {
    Verbs v;
    void* library = dlopen(standin_path().c_str(), RTLD_NOW | RTLD_LOCAL);
    INFO(dlerror());
    REQUIRE(library != nullptr);
#define TE_VERBS_LOAD(name)                                           \
  v.name = reinterpret_cast<decltype(v.name)>(dlsym(library, #name)); \
  REQUIRE((v.name != nullptr));
    TE_VERBS_FUNCTIONS(TE_VERBS_LOAD)
#undef TE_VERBS_LOAD
    v.command = reinterpret_cast<decltype(v.command)>(dlsym(library, "standin_command"));
    v.statistic = reinterpret_cast<decltype(v.statistic)>(dlsym(library, "standin_statistic"));
    v.write_sysfs = reinterpret_cast<decltype(v.write_sysfs)>(dlsym(library, "standin_write_sysfs"));
    return v;
  }
};

// The fabric as it is at the start, and a check at the end that nothing is left and nothing was violated.
struct Fabric {
  const Verbs& v = Verbs::get();
  uint64_t violations = 0;  // expected ones
  const uint64_t objects = v.statistic("objects");

  explicit Fabric(const std::string& options = "") {
    command("reset");
    if (!options.empty()) command("set " + options);
  }
  ~Fabric() {
    CHECK(v.statistic("violations") == violations);
    CHECK(v.statistic("objects") == objects);
    v.command("reset");
  }
  void command(const std::string& text) {
    CAPTURE(text);
    REQUIRE(v.command(text.c_str()) == 0);
  }
  void expect_violations(uint64_t count) {
    command("set quiet=1");
    violations = count;
  }
};

// A context with everything for one reliable queue pair and, if wanted, a datagram queue pair.
class End {
 public:
  static constexpr size_t kBytes = 8 << 20;
  static constexpr uint32_t kDepth = 64;

  struct Wishes {
    uint32_t device = 0;
    uint8_t gid = 1;
    bool shared_receives = true;
    bool channel = false;
    int entries = 1024;
    uint32_t inline_bytes = 64;
    uint32_t depth = kDepth;
    uint8_t retries = 7, rnr_retries = 7;
    unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  };

  explicit End(const Wishes& w) : wishes(w), bytes(kBytes, 0xAA) {
    ibv_device** list = v.ibv_get_device_list(nullptr);
    context = v.ibv_open_device(list[w.device]);
    v.ibv_free_device_list(list);
    REQUIRE(context != nullptr);
    pd = v.ibv_alloc_pd(context);
    if (w.channel) channel = v.ibv_create_comp_channel(context);
    cq = v.ibv_create_cq(context, w.entries, this, channel, 0);
    REQUIRE(cq != nullptr);
    ibv_srq_init_attr shared{};
    shared.attr = {w.depth, 1, 0};
    srq = v.ibv_create_srq(pd, &shared);
    REQUIRE(srq != nullptr);
    mr = v.ibv_reg_mr_iova2(pd, bytes.data(), bytes.size(), reinterpret_cast<uint64_t>(bytes.data()), w.access);
    REQUIRE(mr != nullptr);
    rc = make(IBV_QPT_RC);
  }
  End() : End(Wishes{}) {}
  End(const End&) = delete;
  ~End() {
    if (rc != nullptr) CHECK(v.ibv_destroy_qp(rc) == 0);
    if (ud != nullptr) CHECK(v.ibv_destroy_qp(ud) == 0);
    CHECK(v.ibv_destroy_srq(srq) == 0);
    CHECK(v.ibv_dereg_mr(mr) == 0);
    CHECK(v.ibv_destroy_cq(cq) == 0);
    if (channel != nullptr) CHECK(v.ibv_destroy_comp_channel(channel) == 0);
    CHECK(v.ibv_dealloc_pd(pd) == 0);
    CHECK(v.ibv_close_device(context) == 0);
  }

  ibv_qp* make(ibv_qp_type type) {
    ibv_qp_init_attr a{};
    a.send_cq = a.recv_cq = cq;
    a.srq = wishes.shared_receives && type == IBV_QPT_RC ? srq : nullptr;
    a.qp_type = type;
    a.cap = {wishes.depth, wishes.depth, 2, 1, wishes.inline_bytes};
    ibv_qp* made = v.ibv_create_qp(pd, &a);
    REQUIRE(made != nullptr);
    return made;
  }

  ibv_gid gid() const {
    ibv_gid found;
    REQUIRE(v.ibv_query_gid(context, 1, wishes.gid, &found) == 0);
    return found;
  }
  ibv_ah_attr way_to(const End& other) const {
    ibv_ah_attr a{};
    a.is_global = 1;
    a.port_num = 1;
    a.grh.dgid = other.gid();
    a.grh.sgid_index = wishes.gid;
    a.grh.hop_limit = 64;
    return a;
  }

  // --- the state machine ---
  int to_init(ibv_qp* qp) const {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qkey = 0x1234;
    a.qp_access_flags = wishes.access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    const int own = qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    return v.ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own);
  }
  int to_rtr(const End& other) const {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.ah_attr = way_to(other);
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = other.rc->qp_num;
    a.rq_psn = other.psn();
    a.max_dest_rd_atomic = 4;
    a.min_rnr_timer = 12;
    return v.ibv_modify_qp(rc, &a, kToRtr);
  }
  int to_rts() const {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = wishes.retries;
    a.rnr_retry = wishes.rnr_retries;
    a.sq_psn = psn();
    a.max_rd_atomic = 4;
    return v.ibv_modify_qp(rc, &a, kToRts);
  }
  int to(ibv_qp_state state) const {
    ibv_qp_attr a{};
    a.qp_state = state;
    return v.ibv_modify_qp(rc, &a, IBV_QP_STATE);
  }
  static constexpr int kToRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  static constexpr int kToRts =
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  uint32_t psn() const { return (rc->qp_num * 7919) & 0xffffff; }

  static void connect(End& a, End& b) {
    for (End* end : {&a, &b}) REQUIRE(end->to_init(end->rc) == 0);
    REQUIRE(a.to_rtr(b) == 0);
    REQUIRE(b.to_rtr(a) == 0);
    REQUIRE(a.to_rts() == 0);
    REQUIRE(b.to_rts() == 0);
  }
  // Makes the datagram queue pair, with receives.
  void open_datagrams(int receives) {
    ud = make(IBV_QPT_UD);
    REQUIRE(to_init(ud) == 0);
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    REQUIRE(v.ibv_modify_qp(ud, &a, IBV_QP_STATE) == 0);
    a.qp_state = IBV_QPS_RTS;
    REQUIRE(v.ibv_modify_qp(ud, &a, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
    for (int i = 0; i < receives; ++i) REQUIRE(receive_datagram(i) == 0);
  }

  // --- posting ---
  static constexpr size_t kReceiveBytes = 4096 + 40;
  uint8_t* receive_buffer(uint64_t i) { return bytes.data() + (4 << 20) + i * kReceiveBytes; }
  ibv_sge part(const void* at, size_t length) const {
    return {reinterpret_cast<uint64_t>(at), static_cast<uint32_t>(length), mr->lkey};
  }
  int receive(uint64_t id, size_t length = kReceiveBytes) {
    ibv_sge sge = part(receive_buffer(id), length);
    ibv_recv_wr wr{id, nullptr, &sge, 1}, *bad = nullptr;
    return wishes.shared_receives ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(rc, &wr, &bad);
  }
  int receive_datagram(uint64_t id, size_t length = kReceiveBytes) {
    ibv_sge sge = part(receive_buffer(id), length);
    ibv_recv_wr wr{id, nullptr, &sge, 1}, *bad = nullptr;
    return ibv_post_recv(ud, &wr, &bad);
  }
  // A request whose part lies in `parts`, which must not be moved.
  ibv_send_wr request(ibv_wr_opcode opcode, uint64_t id, size_t from, size_t length,
                      unsigned flags = IBV_SEND_SIGNALED) {
    parts.push_back(part(bytes.data() + from, length));
    ibv_send_wr wr{};
    wr.wr_id = id;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.sg_list = &parts.back();
    wr.num_sge = 1;
    return wr;
  }
  ibv_send_wr write(uint64_t id, size_t from, End& target, size_t to, size_t length,
                    unsigned flags = IBV_SEND_SIGNALED) {
    ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, id, from, length, flags);
    wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(target.bytes.data() + to);
    wr.wr.rdma.rkey = target.mr->rkey;
    return wr;
  }
  int post(ibv_send_wr wr) {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(wr.opcode == IBV_WR_SEND && wr.wr.ud.ah != nullptr ? ud : rc, &wr, &bad);
  }
  int poll() {
    ibv_wc out[8];
    const int n = ibv_poll_cq(cq, 8, out);
    for (int i = 0; i < n; ++i) done.push_back(out[i]);
    return n;
  }
  void fill(uint32_t seed, size_t offset, size_t length) {
    for (size_t i = 0; i < length; ++i) bytes[offset + i] = value(seed, i);
  }
  bool holds(uint32_t seed, size_t offset, size_t length) const {
    for (size_t i = 0; i < length; ++i)
      if (bytes[offset + i] != value(seed, i)) return false;
    return true;
  }
  static uint8_t value(uint32_t seed, size_t i) { return static_cast<uint8_t>(seed * 37 + i * 7 + (i >> 12)); }

  // All events that are there, acknowledged.
  std::vector<ibv_event_type> events() {
    std::vector<ibv_event_type> types;
    pollfd entry{context->async_fd, POLLIN, 0};
    while (::poll(&entry, 1, 0) == 1) {
      ibv_async_event event;
      REQUIRE(v.ibv_get_async_event(context, &event) == 0);
      types.push_back(event.event_type);
      v.ibv_ack_async_event(&event);
    }
    return types;
  }

  const Verbs& v = Verbs::get();
  Wishes wishes;
  std::vector<uint8_t> bytes;
  std::deque<ibv_sge> parts;
  std::vector<ibv_wc> done;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* cq = nullptr;
  ibv_srq* srq = nullptr;
  ibv_mr* mr = nullptr;
  ibv_qp *rc = nullptr, *ud = nullptr;
};

using Events = std::vector<ibv_event_type>;
using Statuses = std::vector<ibv_wc_status>;
inline Statuses statuses(const End& end) {
  Statuses found;
  for (const ibv_wc& wc : end.done) found.push_back(wc.status);
  return found;
}

// Polls both until it is so.
template <typename Condition>
bool run(End& a, End& b, const Condition& condition, int polls = 100'000) {
  for (; polls > 0 && !condition(); --polls) a.poll(), b.poll();
  return condition();
}

}  // namespace te::test
