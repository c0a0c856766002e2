// What a scatter costs the host: one engine that writes to the members of a group, through the C ABI, from the call to the last
// completion.
//
//   bench_scatter TRANSPORT [members] [engines] [rounds] [bytes] [lists of pages]
//   tools/bench/scatter.sh     instructions a member under callgrind, with libraries that cost nothing
//
// The receiving engines live in this process, `engines` of them (members); with fewer, an engine is several members. Medians of
// `rounds`: in the caller's thread (call), until the worker has taken the command (taken), from there to the first post (first), to
// the last (all), and until the transfer has ended (done); and how often anything in the process allocated meanwhile.
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "native/system.h"
#include "native/te.h"

// Every allocation of the process, whoever makes it.
static std::atomic<uint64_t> allocations{0};
extern "C" void* __libc_malloc(size_t);
extern "C" void* malloc(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}

namespace {

void must(bool good, const char* what, const te_error& why) {
  if (good) return;
  std::fprintf(stderr, "bench_scatter: %s: %s\n", what, why.message);
  std::exit(1);
}

constexpr uint32_t kFew = 16;  // operations of an engine that only receives

struct Engine {
  te_engine* engine = nullptr;
  te_address address{};
  te_error why{};

  Engine(const char* transport, const std::string& nics, uint32_t operations, uint32_t peers) {
    te_settings s;
    te_settings_defaults(&s);
    s.transport = transport;
    s.nics = nics.c_str();
    s.core = TE_CORE_NONE;
    s.operations = operations;
    s.max_peers = peers;
    s.max_regions = s.max_counters = 4096;
    s.immediate_window =
        operations == kFew ? 8192 : 64;          // what libraries that cost nothing swallow gives no credit back
    s.peer_timeout_ns = 3600LL * 1'000'000'000;  // no heartbeats: they are not what is measured
    must(te_engine_open(&s, &engine, &why) == TE_OK, "open", why);
    must(te_engine_address(engine, &address, &why) == TE_OK, "address", why);
  }
};

int64_t percentile(std::vector<int64_t> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int at, uint32_t otherwise) {
    return count > at ? static_cast<uint32_t>(std::strtoul(arguments[at], nullptr, 10)) : otherwise;
  };
  const char* transport = count > 1 ? arguments[1] : "sim";
  const uint32_t members = number(2, 64), engines = std::max(1u, std::min(number(3, members), members));
  const uint32_t rounds = number(4, 1000), bytes = number(5, 256), lists = number(6, rounds / 10);
  const char* nic = std::getenv("TE_BENCH_NIC");
  const std::string nics = nic == nullptr ? "" : nic;

  Engine sender(transport, nics, 512, engines);
  te_error why{};
  std::vector<uint8_t> source(uint64_t{members} * bytes + 1);
  te_handle region = TE_NONE;
  must(te_region_register(sender.engine, source.data(), source.size(), TE_DEVICE_HOST, 0, &region, &why) == TE_OK,
       "register", why);
  std::vector<Engine> receivers;
  std::vector<std::vector<uint8_t>> memories(engines, std::vector<uint8_t>(uint64_t{members} * bytes + 1));
  std::vector<te_handle> remotes(engines), notify(engines), counters(engines);
  for (uint32_t i = 0; i < engines; ++i) {
    const Engine& r = receivers.emplace_back(transport, nics, kFew, 1);
    te_handle theirs = TE_NONE;
    te_region_descriptor d;
    te_counter_descriptor c;
    must(te_region_register(r.engine, memories[i].data(), memories[i].size(), TE_DEVICE_HOST, 0, &theirs, &why) ==
                 TE_OK &&
             te_region_describe(r.engine, theirs, &d, &why) == TE_OK &&
             te_remote_region(sender.engine, &d, &remotes[i], &why) == TE_OK,
         "region", why);
    must(te_counter_open(r.engine, &counters[i], &why) == TE_OK &&
             te_counter_describe(r.engine, counters[i], &c, &why) == TE_OK &&
             te_remote_counter(sender.engine, &c, &notify[i], &why) == TE_OK,
         "counter", why);
  }
  std::vector<te_target_member> list;
  std::vector<int64_t> offsets, lengths(members, bytes);
  for (uint32_t i = 0; i < members; ++i) {
    list.push_back({-1, remotes[i % engines], notify[i % engines]});
    offsets.push_back(int64_t{i} * bytes);
  }
  te_handle target = TE_NONE;
  must(te_target_open(sender.engine, list.data(), members, -1, &target, &why) == TE_OK, "target", why);

  const te_scatter_args args{target, region, 0, 0, offsets.data(), lengths.data(), offsets.data()};
  std::vector<int64_t> call, taken, first, all, done;
  for (auto* each : {&call, &taken, &first, &all, &done}) each->reserve(rounds);
  uint64_t allocated_before = 0;
  for (uint32_t round = 0; round < rounds + 3; ++round) {
    if (round == 3) allocated_before = allocations.load();
    const int64_t begin = te::now_ns();
    te_transfer* t = te_scatter(sender.engine, &args, -1, &why);
    const int64_t back = te::now_ns();
    must(t != nullptr, "scatter", why);
    while (te_transfer_wait(t, -1) == TE_AGAIN) {
    }
    must(te_transfer_result(t, &why) == TE_OK, "scatter", why);
    te_times times;
    te_transfer_times(t, &times);
    te_transfer_release(t);
    if (round < 3) continue;  // connects, attaches, and makes what is used again
    call.push_back(back - begin);
    taken.push_back(times.taken_ns - begin);
    first.push_back(times.first_post_ns - times.taken_ns);
    all.push_back(times.posted_ns - times.taken_ns);
    done.push_back(times.finished_ns - begin);
  }
  const uint64_t allocated = allocations.load() - allocated_before;
  std::printf("%-5s %4u members (%u engines) of %u B:", transport, members, engines, bytes);
  const auto say = [](const char* what, const std::vector<int64_t>& values) {
    std::printf("  %s %.2f/%.2f", what, static_cast<double>(percentile(values, 0.5)) / 1e3,
                static_cast<double>(percentile(values, 0.99)) / 1e3);
  };
  say("call", call), say("taken", taken), say("first", first), say("all", all), say("done", done);
  std::printf(" us (p50/p99); posting %.1f ns a member; %llu allocations\n",
              static_cast<double>(percentile(all, 0.5)) / members, static_cast<unsigned long long>(allocated));

  // One list of pages, all to one peer.
  constexpr uint64_t kPages = 4096;
  const uint64_t page_bytes = 64;
  std::vector<int32_t> indices(kPages);
  for (uint64_t i = 0; i < kPages; ++i)
    indices[i] = static_cast<int32_t>(i * 7 % (uint64_t{members} * bytes / page_bytes));
  te_page_args pages{};
  pages.region = region;
  pages.remote = remotes[0];
  pages.counter = notify[0];
  pages.source_stride = pages.target_stride = pages.page_bytes = page_bytes;
  pages.count = kPages;
  pages.source = pages.target = indices.data();
  pages.source_index_bytes = pages.target_index_bytes = 4;
  std::vector<int64_t> paged;
  for (uint32_t round = 0; lists > 0 && round < lists + 3; ++round) {
    const int64_t begin = te::now_ns();
    te_transfer* t = te_write_pages(sender.engine, &pages, -1, &why);
    must(t != nullptr, "pages", why);
    while (te_transfer_wait(t, -1) == TE_AGAIN) {
    }
    must(te_transfer_result(t, &why) == TE_OK, "pages", why);
    te_transfer_release(t);
    if (round >= 3) paged.push_back(te::now_ns() - begin);
  }
  if (lists > 0)
    std::printf("%-5s %llu pages of %llu B, from the call to the end: %.1f ns a page\n", transport,
                static_cast<unsigned long long>(kPages), static_cast<unsigned long long>(page_bytes),
                static_cast<double>(percentile(paged, 0.5)) / kPages);
  std::fflush(stdout);
  std::_Exit(0);  // hundreds of goodbyes are not measured either
}
