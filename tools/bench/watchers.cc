// How long a raised word takes to become a work request: a thread raises a watcher, the worker sees it and posts a prepared write.
//
//   bench_watchers [rounds]
//
// Over the simulated fabric, so that what is measured is the engine: from before the raise to the posted flag as this thread sees it,
// with more and more watchers that the worker looks at, all armed. Beside it what two threads need anyway to hand a word over and
// back. Needs two processors that nobody else uses.
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "native/system.h"
#include "native/te.h"
#include "tools/bench/support.h"

namespace {

void must(bool good, const char* what, const te_error& why) {
  if (good) return;
  std::fprintf(stderr, "bench_watchers: %s: %s\n", what, why.message);
  std::exit(1);
}

constexpr int kWarm = 1000;

struct Engine {
  te_engine* engine = nullptr;
  te_address address{};
  te_error why{};

  explicit Engine(uint32_t polling) {
    te_settings s;
    te_settings_defaults(&s);
    s.transport = "sim";
    s.sim = "reorder=0";
    s.core = TE_CORE_NONE;
    s.polling = polling;
    s.operations = 256;
    s.max_regions = s.max_counters = 64;
    s.max_peers = 4;
    s.peer_timeout_ns = 3600LL * 1'000'000'000;
    must(te_engine_open(&s, &engine, &why) == TE_OK, "open", why);
    must(te_engine_address(engine, &address, &why) == TE_OK, "address", why);
  }
  ~Engine() { te_engine_free(engine); }
};

std::atomic<uint64_t>* word_at(uint64_t address) { return reinterpret_cast<std::atomic<uint64_t>*>(address); }

void print(const char* what, uint64_t count, const std::vector<double>& ns) {
  std::printf("%-18s %6llu %9.0f %9.0f %9.0f\n", what, static_cast<unsigned long long>(count), bench::median(ns),
              bench::percentile(ns, 0.99), bench::percentile(ns, 1.0));
}

// There and back between two threads that spin.
std::vector<double> hand_over(int rounds) {
  alignas(64) static std::atomic<uint64_t> there, back;
  there = back = 0;
  std::thread other([rounds] {
    for (uint64_t i = 1; i <= static_cast<uint64_t>(rounds + kWarm); ++i) {
      while (there.load(std::memory_order_acquire) < i) te::cpu_relax();
      back.store(i, std::memory_order_release);
    }
  });
  std::vector<double> ns;
  for (uint64_t i = 1; i <= static_cast<uint64_t>(rounds + kWarm); ++i) {
    const int64_t begin = te::now_ns();
    there.store(i, std::memory_order_release);
    while (back.load(std::memory_order_acquire) < i) te::cpu_relax();
    if (i > kWarm) ns.push_back(static_cast<double>(te::now_ns() - begin));
  }
  other.join();
  return ns;
}

// The watcher that is raised is the last of `armed`: the worker has gone over all others when it finds it.
std::vector<double> raise_to_post(Engine& writer, te_handle prepared, uint32_t armed, int rounds) {
  te_error& why = writer.why;
  std::vector<te_handle> watchers(armed), triggers(armed);
  te_handle posted = TE_NONE;
  must(te_flag_open(writer.engine, -1, &posted, &why) == TE_OK, "flag", why);
  for (uint32_t i = 0; i < armed; ++i) {
    must(te_watcher_open(writer.engine, -1, &watchers[i], &why) == TE_OK, "watcher", why);
    const te_trigger_args args{watchers[i], prepared, posted, TE_NONE, 1, 1, -1};
    must(te_trigger_open(writer.engine, &args, &triggers[i], &why) == TE_OK, "trigger", why);
  }
  te_watcher_info watched{};
  te_flag_info flag{};
  must(te_watcher_describe(writer.engine, watchers.back(), &watched, &why) == TE_OK, "describe", why);
  must(te_flag_describe(writer.engine, posted, &flag, &why) == TE_OK, "describe", why);
  std::atomic<uint64_t>& word = *word_at(watched.host);
  const std::atomic<uint64_t>& epoch = *word_at(flag.epoch_host);
  std::vector<double> ns;
  for (uint64_t i = 1; i <= static_cast<uint64_t>(rounds + kWarm); ++i) {
    const int64_t begin = te::now_ns();
    word.store(i, std::memory_order_release);  // as a device would: no call, no doorbell
    while (epoch.load(std::memory_order_acquire) < i) te::cpu_relax();
    if (i > kWarm) ns.push_back(static_cast<double>(te::now_ns() - begin));
    te_trigger_wait(writer.engine, triggers.back(), i, -1, &why);  // one under way at a time
  }
  for (uint32_t i = 0; i < armed; ++i) {
    te_watcher_close(writer.engine, watchers[i], &why);
    te_trigger_close(writer.engine, triggers[i], &why);
  }
  te_flag_close(writer.engine, posted, &why);
  return ns;
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 20'000;
  std::printf("%-18s %6s %9s %9s %9s   ns\n", "", "armed", "median", "p99", "max");
  print("two threads", 0, hand_over(rounds));
  Engine writer(TE_POLL_BUSY), owner(TE_POLL_ADAPTIVE);
  std::vector<uint8_t> source(4096, 1), target(4096, 0);
  te_error& why = writer.why;
  te_handle region = TE_NONE, theirs = TE_NONE, remote = TE_NONE, prepared = TE_NONE;
  must(te_region_register(writer.engine, source.data(), source.size(), TE_DEVICE_HOST, 0, &region, &why) == TE_OK,
       "register", why);
  must(te_region_register(owner.engine, target.data(), target.size(), TE_DEVICE_HOST, 0, &theirs, &why) == TE_OK,
       "register", why);
  te_region_descriptor descriptor{};
  must(te_region_describe(owner.engine, theirs, &descriptor, &why) == TE_OK, "describe", why);
  must(te_remote_region(writer.engine, &descriptor, &remote, &why) == TE_OK, "remote", why);
  const te_write_args write{region, remote, TE_NONE, 0, 0, 0, 64};
  must(te_prepare_write(writer.engine, &write, &prepared, &why) == TE_OK, "prepare", why);
  for (const uint32_t armed : {1u, 8u, 64u, 512u, 4096u})
    print("raise to post", armed, raise_to_post(writer, prepared, armed, rounds));
  return 0;
}
