// The stand-in for libfabric, loaded as the transport loads the real one, and an endpoint of it with all that it stands
// on.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "efa/library.h"

namespace te::test {

// The fabric as it is at the start, and a check at the end that nothing is left and no rule was broken but as expected.
struct EfaFabric {
  explicit EfaFabric(const std::string& options = "") {
    REQUIRE(command("reset") == 0);
    if (!options.empty()) set(options);
    objects_ = statistic("objects");
  }
  ~EfaFabric() {
    CHECK(statistic("violations") == violations_);
    CHECK(statistic("objects") == objects_);
    CHECK(command("reset") == 0);
  }
  EfaFabric(const EfaFabric&) = delete;

  static bool usable() { return symbol("standin_command") != nullptr; }
  int command(const std::string& text) const { return call<int(const char*)>("standin_command")(text.c_str()); }
  void set(const std::string& options) const {
    CAPTURE(options);
    REQUIRE(command("set " + options) == 0);
  }
  uint64_t statistic(const char* name) const {
    const uint64_t value = call<uint64_t(const char*)>("standin_statistic")(name);
    REQUIRE(value != ~uint64_t{0});
    return value;
  }
  // Violations are counted from now on, and do not end the process.
  void tolerate() const { set("abort=0,quiet=1"); }
  // There was one more, about this.
  bool violated(const std::string& about) {
    char text[512] = "";
    call<size_t(char*, size_t)>("standin_last_violation")(text, sizeof text);
    const bool one = statistic("violations") == violations_ + 1;
    violations_ = statistic("violations");
    CAPTURE(std::string(text));
    CHECK(std::string(text).find(about) != std::string::npos);
    return one;
  }

 private:
  static void* symbol(const char* name) {
    const char* path = std::getenv("TE_LIBFABRIC");
    void* library = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    return library != nullptr ? dlsym(library, name) : nullptr;
  }
  template <typename Function>
  static Function* call(const char* name) {
    return reinterpret_cast<Function*>(symbol(name));
  }
  uint64_t violations_ = 0, objects_ = 0;
};

struct alignas(64) EfaContext {
  fi_context2 provider{};
  bool operator==(const EfaContext& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};

// What is wanted of fi_getinfo; the engine's own wishes stand in efa/selection.cc.
struct EfaWishes {
  uint32_t device = 0;
  const char* fabric = "efa-direct";
  size_t entries = 1024;
  fi_wait_obj wait = FI_WAIT_NONE;
  int receives = 64;
};

class EfaEnd {
 public:
  static constexpr size_t kBytes = 4 << 20, kReceiveBytes = 8192, kReceives = 128;

  explicit EfaEnd(const EfaWishes& wishes = {}) : bytes(kBytes, 0xAA), receive_contexts(kReceives) {
    REQUIRE(efa::load_library(&library).ok());
    choose(wishes);
    fid_fabric* f = nullptr;
    fid_domain* d = nullptr;
    fid_av* a = nullptr;
    fid_cq* q = nullptr;
    fid_ep* e = nullptr;
    REQUIRE(library->fabric(info->fabric_attr, &f, nullptr) == 0);
    objects.fabric.reset(f);
    REQUIRE(fi_domain(f, info.get(), &d, nullptr) == 0);
    objects.domain.reset(d);
    fi_av_attr vector{};
    vector.type = FI_AV_TABLE;
    REQUIRE(fi_av_open(d, &vector, &a, nullptr) == 0);
    objects.addresses.reset(a);
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_DATA;
    queue.size = wishes.entries;
    queue.wait_obj = wishes.wait;
    REQUIRE(fi_cq_open(d, &queue, &q, nullptr) == 0);
    objects.queue.reset(q);
    REQUIRE(fi_endpoint(d, info.get(), &e, nullptr) == 0);
    objects.endpoint.reset(e);
    REQUIRE(fi_ep_bind(e, &a->fid, 0) == 0);
    REQUIRE(fi_ep_bind(e, &q->fid, FI_TRANSMIT | FI_RECV) == 0);
    REQUIRE(fi_enable(e) == 0);
    memory = open_region(bytes.data(), bytes.size());
    for (int i = 0; i < wishes.receives; ++i) REQUIRE(receive(static_cast<size_t>(i)) == 0);
  }

  efa::FidPtr<fid_mr> open_region(void* from, size_t length,
                                  uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ |
                                                    FI_REMOTE_WRITE) const {
    fid_mr* region = nullptr;
    REQUIRE(fi_mr_reg(objects.domain.get(), from, length, access, 0, 0, 0, &region, nullptr) == 0);
    return efa::FidPtr<fid_mr>(region);
  }

  // --- peers ---
  std::vector<uint8_t> name() const {
    std::vector<uint8_t> address(64);
    size_t length = address.size();
    REQUIRE(fi_getname(&objects.endpoint->fid, address.data(), &length) == 0);
    address.resize(length);
    return address;
  }
  fi_addr_t insert(const EfaEnd& other) const {
    fi_addr_t found = FI_ADDR_NOTAVAIL;
    REQUIRE(fi_av_insert(objects.addresses.get(), other.name().data(), 1, &found, 0, nullptr) == 1);
    return found;
  }
  static void meet(EfaEnd& a, EfaEnd& b) {
    a.peer = a.insert(b);
    b.peer = b.insert(a);
  }

  // --- posting ---
  EfaContext* context() { return &contexts.emplace_back(); }
  uint8_t* receive_buffer(size_t i) { return bytes.data() + kBytes - (i + 1) * kReceiveBytes; }
  ssize_t receive(size_t i, size_t length = kReceiveBytes) {
    return fi_recv(objects.endpoint.get(), receive_buffer(i), length, fi_mr_desc(memory.get()), FI_ADDR_UNSPEC,
                   &receive_contexts[i]);
  }
  struct Write {
    const EfaEnd* target;
    size_t from = 0, to = 0, length = 64;
    uint64_t flags = 0, immediate = 0;
    EfaContext* context = nullptr;  // null: a new one
    fid_mr *local = nullptr, *remote = nullptr;
  };
  ssize_t write(const Write& w) {
    void* descriptor = fi_mr_desc(w.local != nullptr ? w.local : memory.get());
    const iovec local{bytes.data() + w.from, w.length};
    const fi_rma_iov remote = {reinterpret_cast<uint64_t>(w.target->bytes.data() + w.to), w.length,
                               fi_mr_key(w.remote != nullptr ? w.remote : w.target->memory.get())};
    fi_msg_rma message{};
    message.msg_iov = &local;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = peer;
    message.rma_iov = &remote;
    message.rma_iov_count = 1;
    message.context = w.context != nullptr ? w.context : context();
    message.data = w.immediate;
    return fi_writemsg(objects.endpoint.get(), &message, w.flags | FI_COMPLETION | FI_DELIVERY_COMPLETE);
  }
  ssize_t send(size_t from, size_t length, EfaContext* with = nullptr) {
    return fi_send(objects.endpoint.get(), bytes.data() + from, length, fi_mr_desc(memory.get()), peer,
                   with != nullptr ? with : context());
  }

  // --- completions ---
  bool poll() {
    fi_cq_data_entry entry{};
    const ssize_t got = fi_cq_read(objects.queue.get(), &entry, 1);
    if (got == 1) done.push_back(entry);
    if (got == -FI_EAVAIL) {
      fi_cq_err_entry error{};
      REQUIRE(fi_cq_readerr(objects.queue.get(), &error, 0) == 1);
      errors.push_back(error);
    }
    return got == 1 || got == -FI_EAVAIL;
  }
  size_t count(uint64_t flag) const {
    size_t found = 0;
    for (const fi_cq_data_entry& entry : done) found += (entry.flags & flag) != 0;
    return found;
  }
  // The latest error's status; -1: none since the last call.
  int failure() {
    const int status = errors.empty() ? -1 : errors.back().prov_errno;
    errors.clear();
    return status;
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

  const efa::Library* library = nullptr;
  efa::InfoPtr info{nullptr, {}};
  std::vector<uint8_t> bytes;
  std::vector<EfaContext> receive_contexts;
  std::deque<EfaContext> contexts;
  std::vector<fi_cq_data_entry> done;
  std::vector<fi_cq_err_entry> errors;
  fi_addr_t peer = FI_ADDR_NOTAVAIL;
  struct {  // closed from the bottom up
    efa::FidPtr<fid_fabric> fabric;
    efa::FidPtr<fid_domain> domain;
    efa::FidPtr<fid_av> addresses;
    efa::FidPtr<fid_cq> queue;
    efa::FidPtr<fid_ep> endpoint;
  } objects;
  efa::FidPtr<fid_mr> memory;

 private:
  void choose(const EfaWishes& wishes) {
    efa::InfoPtr hints(library->dupinfo(nullptr), efa::FreeInfo{library});
    hints->mode = FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup("efa");
    hints->fabric_attr->name = strdup(wishes.fabric);
    fi_info* list = nullptr;
    REQUIRE(library->getinfo(FI_VERSION(1, 18), nullptr, nullptr, 0, hints.get(), &list) == 0);
    const std::string domain = "efa" + std::to_string(wishes.device) + "-rdm";
    for (const fi_info* each = list; each != nullptr; each = each->next)
      if (domain == each->domain_attr->name) info = efa::InfoPtr(library->dupinfo(each), efa::FreeInfo{library});
    library->freeinfo(list);
    REQUIRE(info != nullptr);
  }
};

// Polls both until it is so.
template <typename Condition>
bool run(EfaEnd& a, EfaEnd& b, const Condition& condition, int polls = 200'000) {
  for (; polls > 0; --polls) {
    if (condition()) return true;
    a.poll();
    b.poll();
  }
  return false;
}

}  // namespace te::test
