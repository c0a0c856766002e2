// bench_fabric TRANSPORT [ROUNDS]: the engine beside a bare libfabric loop on the same provider, in one run, alternating.
// Two processes of this machine, host memory. Per case the median of each and the median of the ratios of neighbouring rounds, since the
// machine's speed drifts between rounds more than the two differ.
//
//   write N     bandwidth of N-byte writes that the target counts, from the first post until the target has seen all and said so
//   pages       4,096 pages of 32 KiB from scattered to scattered places, notified
//   rate 256    256-byte notified writes per second, 64 in flight, fed natively
//   scatter     64 members, each the peer with a notified write of its own: two scatters in flight, beside 128 writes of the bare loop
//   latency N   a notified write and its answer, half of the round trip: both applications wait on their counters
//   blocking N  one write at a time, from the call until it is done
#include <rdma/fabric.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <string>

#include "native/te.h"
#include "tools/bench/bare.h"

namespace bench {
namespace {

constexpr uint64_t kBytes = 256u << 20;
constexpr uint64_t kHalf = kBytes / 2;
constexpr int64_t kPatience = 60'000'000'000;
constexpr uint64_t kMembers = 64;

[[noreturn]] void die(const char* what, const te_error& error) {
  std::fprintf(stderr, "engine: %s: %s\n", what, error.message);
  std::_Exit(2);
}

// The engine's side, used as an application would use it.
class Ours {
 public:
  Ours(const char* transport, uint8_t* memory, int control) {
    te_settings settings;
    te_settings_defaults(&settings);
    settings.transport = transport;
    settings.nics = std::strcmp(transport, "tcp") == 0 ? "lo" : nullptr;
    settings.peer_timeout_ns = kPatience;  // the bare loop may keep both cores for long
    te_error error{};
    if (te_engine_open(&settings, &engine_, &error) != TE_OK) die("open", error);
    if (te_region_register(engine_, memory, kBytes, TE_DEVICE_HOST, 0, &region_, &error) != TE_OK)
      die("register", error);
    if (te_counter_open(engine_, &counter_, &error) != TE_OK) die("counter", error);
    te_region_descriptor mine{}, theirs{};
    te_counter_descriptor my_counter{}, their_counter{};
    te_region_describe(engine_, region_, &mine, &error);
    te_counter_describe(engine_, counter_, &my_counter, &error);
    send_all(control, &mine, sizeof mine);
    send_all(control, &my_counter, sizeof my_counter);
    receive_all(control, &theirs, sizeof theirs);
    receive_all(control, &their_counter, sizeof their_counter);
    if (te_remote_region(engine_, &theirs, &remote_, &error) != TE_OK) die("remote region", error);
    if (te_remote_counter(engine_, &their_counter, &notify_, &error) != TE_OK) die("remote counter", error);
  }

  te_transfer* post(uint64_t source, uint64_t target, uint64_t length, bool counted = true) {
    te_error error{};
    te_transfer* t = te_write(engine_, region_, source, remote_, target, length, counted ? notify_ : te_handle{TE_NONE},
                              0, kPatience, &error);
    if (t == nullptr) die("write", error);
    return t;
  }
  te_transfer* post_pages(const std::vector<int64_t>& source, const std::vector<int64_t>& target, uint64_t page) {
    te_page_args a{};
    a.region = region_;
    a.remote = remote_;
    a.counter = notify_;
    a.source_stride = a.target_stride = a.page_bytes = page;
    a.count = source.size();
    a.source = source.data();
    a.target = target.data();
    a.source_index_bytes = a.target_index_bytes = 8;
    te_error error{};
    te_transfer* t = te_write_pages(engine_, &a, kPatience, &error);
    if (t == nullptr) die("pages", error);
    return t;
  }
  te_transfer* post_batch(const std::vector<te_batch_entry>& entries) {
    te_error error{};
    te_transfer* t = te_write_batch(engine_, entries.data(), entries.size(), kPatience, &error);
    if (t == nullptr) die("batch", error);
    return t;
  }
  te_batch_entry entry(uint64_t source, uint64_t target, uint64_t length) const {
    te_batch_entry e{};
    e.write = {region_, remote_, notify_, 0, source, target, length};
    return e;
  }
  // Member i is the peer's memory again; the places differ.
  void open_target(uint32_t members) {
    const std::vector<te_target_member> all(members, {-1, remote_, notify_});
    te_error error{};
    if (te_target_open(engine_, all.data(), members, -1, &target_, &error) != TE_OK) die("target", error);
  }
  te_transfer* post_scatter(const std::vector<int64_t>& source, const std::vector<int64_t>& lengths,
                            const std::vector<int64_t>& target) {
    const te_scatter_args a{target_, region_, 0, 0, source.data(), lengths.data(), target.data()};
    te_error error{};
    te_transfer* t = te_scatter(engine_, &a, kPatience, &error);
    if (t == nullptr) die("scatter", error);
    return t;
  }
  static void finish(te_transfer* t) {
    te_transfer_wait(t, kPatience);
    te_error error{};
    if (te_transfer_result(t, &error) != TE_OK) die("transfer", error);
    te_transfer_release(t);
  }
  void wait_arrived(uint64_t count) {
    te_error error{};
    if (te_counter_wait(engine_, counter_, count, kPatience, nullptr, 0, &error) != TE_OK) die("wait", error);
  }
  void close() { te_engine_free(engine_); }

 private:
  te_engine* engine_ = nullptr;
  te_handle region_ = TE_NONE, counter_ = TE_NONE, remote_ = TE_NONE, notify_ = TE_NONE, target_ = TE_NONE;
};

struct Case {
  std::string name;
  enum Kind { kBandwidth, kPages, kRate, kScatter, kLatency, kBlocking } kind;
  uint64_t size;
  uint64_t count;
  uint64_t depth;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const uint64_t size : {4096ull, 65536ull, 262144ull, 1ull << 20, 4ull << 20, 16ull << 20, 64ull << 20}) {
    const uint64_t depth = std::clamp<uint64_t>((64u << 20) / size, 2, 64);
    const uint64_t count = std::clamp<uint64_t>((256ull << 20) / size, 8, 8192);
    all.push_back(
        {"write " + (size >= 1 << 20 ? std::to_string(size >> 20) + " MiB" : std::to_string(size >> 10) + " KiB"),
         Case::kBandwidth, size, count, depth});
  }
  all.push_back({"pages 4096 x 32 KiB", Case::kPages, 32768, 4096, 128});
  all.push_back({"rate 256 B, 64 in flight", Case::kRate, 256, 40960, 64});
  for (const uint64_t size : {256ull, 4096ull})
    all.push_back({"scatter 64 x " + std::to_string(size) + " B", Case::kScatter, size, 20480, 2 * kMembers});
  for (const uint64_t size : {64ull, 4096ull, 65536ull})
    all.push_back({"latency " + std::to_string(size) + " B", Case::kLatency, size, 400, 1});
  all.push_back({"blocking 4096 B", Case::kBlocking, 4096, 1000, 1});
  return all;
}

uint64_t place(uint64_t i, uint64_t size) { return i * size % (kHalf - size + 1) & ~uint64_t{63}; }

// Both processes run the same rounds; the initiator gives seconds, bytes or operations per second by its own choice of unit.
class Runner {
 public:
  Runner(Bare* bare, Ours* ours, bool initiator) : bare_(*bare), ours_(*ours), initiator_(initiator) {
    for (uint64_t i = 0; i < 4096; ++i) {
      sources_.push_back(static_cast<int64_t>(i * 2654435761u % 4096));
      targets_.push_back(static_cast<int64_t>((i * 40503u + 17) % 4096));
    }
  }

  // Seconds for the whole case (latency: per half round trip).
  double bare(const Case& c) {
    const double begin = seconds();
    if (c.kind == Case::kLatency) {
      std::vector<double> halves;
      for (uint64_t i = 0; i < c.count; ++i) {
        const double t = seconds();
        if (initiator_) bare_.write(0, kHalf, c.size, true);
        bare_.wait_arrived(++bare_seen_);
        if (!initiator_) bare_.write(0, kHalf, c.size, true);
        halves.push_back((seconds() - t) / 2);
      }
      bare_.drain();
      return median(halves);
    }
    if (initiator_) {
      std::vector<double> each;
      for (uint64_t i = 0; i < c.count; ++i) {
        const double t = seconds();
        if (c.kind == Case::kPages) {
          const bool last = i + 1 == c.count;
          if (last) bare_.drain();  // some providers do not order writes
          bare_.write(static_cast<uint64_t>(sources_[i]) * c.size, static_cast<uint64_t>(targets_[i]) * c.size, c.size,
                      last);
        } else if (c.kind == Case::kBlocking) {
          bare_.write(0, kHalf, c.size, false);
          bare_.drain();
          each.push_back(seconds() - t);
        } else {
          bare_.write(place(i, c.size), kHalf + place(i, c.size), c.size, true);
        }
        bare_.window(c.depth);
      }
      if (c.kind == Case::kBlocking) bare_.write(0, kHalf, 0, true);
      bare_.wait_arrived(++bare_seen_);
      bare_.drain();
      if (c.kind == Case::kBlocking) return median(each);
    } else {
      bare_seen_ += c.kind == Case::kPages || c.kind == Case::kBlocking ? 1 : c.count;
      bare_.wait_arrived(bare_seen_);
      bare_.write(0, kHalf, 0, true);
      bare_.drain();
    }
    return seconds() - begin;
  }

  double ours(const Case& c) {
    const double begin = seconds();
    if (c.kind == Case::kLatency) {
      std::vector<double> halves;
      for (uint64_t i = 0; i < c.count; ++i) {
        const double t = seconds();
        te_transfer* transfer = initiator_ ? ours_.post(0, kHalf, c.size) : nullptr;
        ours_.wait_arrived(++ours_seen_);
        if (!initiator_) transfer = ours_.post(0, kHalf, c.size);
        halves.push_back((seconds() - t) / 2);
        Ours::finish(transfer);
      }
      return median(halves);
    }
    if (!initiator_) {
      ours_seen_ += c.kind == Case::kBlocking ? 1 : c.count;
      ours_.wait_arrived(ours_seen_);
      Ours::finish(ours_.post(0, kHalf, 0));
      return 0;
    }
    std::vector<te_transfer*> open;
    std::vector<double> each;
    if (c.kind == Case::kPages) {
      open.push_back(ours_.post_pages(sources_, targets_, c.size));
    } else if (c.kind == Case::kRate) {
      constexpr uint64_t kBatch = 2048;
      std::vector<te_batch_entry> batch;
      for (uint64_t i = 0; i < kBatch; ++i)
        batch.push_back(ours_.entry(place(i, c.size), kHalf + place(i, c.size), c.size));
      for (uint64_t i = 0; i < c.count; i += kBatch) {
        open.push_back(ours_.post_batch(batch));
        if (open.size() > 1) {
          Ours::finish(open.front());
          open.erase(open.begin());
        }
      }
    } else if (c.kind == Case::kScatter) {
      std::vector<int64_t> from, to;
      const std::vector<int64_t> lengths(kMembers, static_cast<int64_t>(c.size));
      for (uint64_t i = 0; i < kMembers; ++i) {
        from.push_back(static_cast<int64_t>(place(i, c.size)));
        to.push_back(static_cast<int64_t>(kHalf + place(i, c.size)));
      }
      for (uint64_t i = 0; i < c.count; i += kMembers) {
        open.push_back(ours_.post_scatter(from, lengths, to));
        if (open.size() < 2) continue;
        Ours::finish(open.front());
        open.erase(open.begin());
      }
    } else if (c.kind == Case::kBlocking) {
      for (uint64_t i = 0; i < c.count; ++i) {
        const double t = seconds();
        Ours::finish(ours_.post(0, kHalf, c.size, false));
        each.push_back(seconds() - t);
      }
      open.push_back(ours_.post(0, kHalf, 0));
    } else {
      for (uint64_t i = 0; i < c.count; ++i) {
        if (open.size() == c.depth) {
          Ours::finish(open.front());
          open.erase(open.begin());
        }
        open.push_back(ours_.post(place(i, c.size), kHalf + place(i, c.size), c.size));
      }
    }
    for (te_transfer* t : open) Ours::finish(t);
    ours_.wait_arrived(++ours_seen_);
    return c.kind == Case::kBlocking ? median(each) : seconds() - begin;
  }

 private:
  Bare& bare_;
  Ours& ours_;
  const bool initiator_;
  uint64_t bare_seen_ = 0, ours_seen_ = 0;
  std::vector<int64_t> sources_, targets_;
};

void report(const Case& c, const std::vector<double>& bare, const std::vector<double>& ours) {
  const auto value = [&](double t) {
    if (c.kind == Case::kLatency || c.kind == Case::kBlocking) return t * 1e6;
    if (c.kind == Case::kRate || c.kind == Case::kScatter) return static_cast<double>(c.count) / t / 1e3;
    return static_cast<double>(c.count * c.size) / t / 1e6;
  };
  const char* unit = c.kind == Case::kLatency || c.kind == Case::kBlocking ? "us"
                     : c.kind == Case::kRate || c.kind == Case::kScatter   ? "k/s"
                                                                           : "MB/s";
  std::vector<double> ratios;
  for (size_t i = 0; i < bare.size(); ++i) ratios.push_back(bare[i] / ours[i]);  // > 1: ours is faster
  std::printf("%-26s %10.1f %10.1f %-5s %6.3f   (%.3f .. %.3f)\n", c.name.c_str(), value(median(bare)),
              value(median(ours)), unit, median(ratios), percentile(ratios, 0), percentile(ratios, 0.999));
  std::fflush(stdout);
}

int run(const char* transport, const char* provider, size_t rounds, const char* only) {
  int control[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, control) != 0) return 2;
  const pid_t child = fork();
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  const bool initiator = child != 0;
  const int fd = control[initiator ? 0 : 1];
  auto* memory =
      static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::memset(memory, initiator ? 1 : 2, kBytes);
  Bare bare(provider, memory, kBytes, fd);
  Ours ours(transport, memory, fd);
  if (initiator) ours.open_target(kMembers);
  Runner runner(&bare, &ours, initiator);
  if (initiator)
    std::printf("%s (%s), %zu rounds each, alternating\n%-26s %10s %10s %5s %6s   (lowest .. highest)\n", transport,
                provider, rounds, "case", "bare", "ours", "", "ratio");
  for (const Case& c : cases()) {
    if (only != nullptr && c.name.find(only) == std::string::npos) continue;
    std::vector<double> bare_times, our_times;
    for (size_t i = 0; i <= rounds; ++i) {  // the first is warm-up
      const double b = runner.bare(c), o = runner.ours(c);
      if (i == 0) continue;
      bare_times.push_back(b);
      our_times.push_back(o);
    }
    if (initiator) report(c, bare_times, our_times);
  }
  char done = 0;
  send_all(fd, &done, 1);
  receive_all(fd, &done, 1);
  ours.close();
  std::fflush(stdout);
  if (initiator) waitpid(child, nullptr, 0);
  std::_Exit(0);  // the bare loop's objects go with the process
}

}  // namespace
}  // namespace bench

int main(int count, char** arguments) {
  const char* transport = count > 1 ? arguments[1] : "shm";
  const size_t rounds = count > 2 ? static_cast<size_t>(std::atoi(arguments[2])) : 5;
  te_engine_info info{};
  te_error error{};
  if (te_transport_probe(transport, &info, &error) != TE_OK) {
    std::fprintf(stderr, "%s: %s\n", transport, error.message);
    return 3;
  }
  return bench::run(transport, info.provider, rounds == 0 ? 5 : rounds, count > 3 ? arguments[3] : nullptr);
}
