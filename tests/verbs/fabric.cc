#include "tests/verbs/fabric.h"

#include <arpa/inet.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"
#include "tests/verbs/sysfs.h"

namespace standin {
namespace {

constexpr size_t kGraves = 8192;
constexpr uint64_t kEndless = 10'000'000;  // steps: more than any program has work posted

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

std::unique_ptr<Device> make_device(uint32_t index) {
  auto device = std::make_unique<Device>();
  device->index = index;
  device->node_type = IBV_NODE_CA;
  device->transport_type = IBV_TRANSPORT_IB;
  std::snprintf(device->name, sizeof device->name, "standin%u", index);
  std::snprintf(device->dev_name, sizeof device->dev_name, "uverbs%u", index);
  std::snprintf(device->dev_path, sizeof device->dev_path, "/sys/class/infiniband_verbs/uverbs%u", index);
  std::snprintf(device->ibdev_path, sizeof device->ibdev_path, "/sys/class/infiniband/standin%u", index);
  const uint8_t local[16] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x88, 0, 0xff, 0xfe, 0, 0, uint8_t(index + 1)};
  const uint8_t mapped[16] = {
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, kNetwork, uint8_t(index / 250), uint8_t(index % 250 + 1)};
  std::memcpy(device->gids[0].raw, local, 16);
  std::memcpy(device->gids[1].raw, mapped, 16);
  return device;
}

void tick_while_nobody_polls(uint64_t serial) {
  Fabric& f = Fabric::get();
  std::unique_lock lock(f.mutex);
  const auto stopped = [&] { return f.ticker_serial != serial; };
  uint64_t polls = f.counts.polls;
  while (!stopped()) {
    f.ticker_sleeps = true;
    f.ticker_wakes.wait(lock, [&] { return stopped() || !f.idle(); });
    f.ticker_sleeps = false;
    f.ticker_wakes.wait_for(lock, std::chrono::milliseconds(1), stopped);
    if (!stopped() && f.counts.polls == polls) {
      f.pass(f.options.idle_ticks);
      f.execute_all();
    }
    polls = f.counts.polls;
  }
}

// When the library is loaded: programs look at sysfs before they call anything.
__attribute__((constructor)) void begin() { Fabric::get(); }

}  // namespace

Fabric& Fabric::get() {
  static Fabric* const fabric = [] {
    auto* made = new Fabric;
    // A child finds the mutex free, and no ticker: the thread object that it inherited stands for none.
    pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                   [] {
                     new (&get().ticker) std::thread;
                     get().mutex.unlock();
                   });
    return made;
  }();
  return *fabric;
}

Fabric::Fabric() {
  const char* text = std::getenv("TE_STANDIN");
  if (text != nullptr && !parse_options(text, &initial)) {
    std::fprintf(stderr, "standin: TE_STANDIN=\"%s\" is not understood; see tests/verbs/standin.h\n", text);
    std::abort();
  }
  options = initial;
  random = Random(options.seed);
  const uint64_t count = number_from("TE_STANDIN_DEVICES", 4);
  for (uint64_t i = 0; i < count; ++i) devices.push_back(make_device(static_cast<uint32_t>(i)));
  const char* root = std::getenv("TE_RDMA_ROOT");
  if (root != nullptr && *root != '\0') write_tree_if_absent(*this, root);
}

Locked::~Locked() {
  const uint64_t attention = fabric_.queued + (fabric_.idle() ? 0 : 1);
  fabric_.attention.store(attention, std::memory_order_relaxed);
  if (fabric_.ticker_sleeps && !fabric_.idle()) fabric_.ticker_wakes.notify_one();
}

void Fabric::schedule(Qp& pair) {
  const bool wanted = pair.wake == 0 && has_work(pair);
  if (wanted && pair.place == Qp::kNowhere) {
    pair.place = active.size();
    active.push_back(&pair);
  } else if (!wanted && pair.place != Qp::kNowhere) {
    active.back()->place = pair.place;
    active[pair.place] = active.back();
    active.pop_back();
    pair.place = Qp::kNowhere;
  }
}

void Fabric::wait(Qp& pair, uint64_t ticks) {
  if (pair.wake == 0) waiting.push_back(&pair);
  pair.wake = now + std::max<uint64_t>(ticks, 1);
  schedule(pair);
}

void Fabric::forget(Qp& pair) {
  std::erase(waiting, &pair);
  arrive(*this, pair);
  std::erase_if(ghosts, [&](const Ghost& ghost) { return ghost.target == &pair; });
  pair.wake = 0;
  pair.sends.clear();
  pair.receives.clear();
  schedule(pair);
}

void Fabric::add_fast_counts(const Qp& pair, Counts* to) {
  to->calls += pair.fast.calls;
  to->posted += pair.fast.posted;
  to->signalled += pair.fast.signalled;
  to->completions += pair.fast.signalled;
  to->inlined += pair.fast.inlined;
}

void Fabric::pass(uint64_t ticks) {
  now += ticks;
  for (size_t i = 0; i < waiting.size();) {
    Qp& pair = *waiting[i];
    if (pair.wake > now) {
      ++i;
      continue;
    }
    waiting[i] = waiting.back();
    waiting.pop_back();
    pair.wake = 0;
    schedule(pair);
  }
  if (!air.empty()) deliver_due(*this);
  if (!ghosts.empty()) haunt_due(*this);
  if (!late.empty()) arrive_due(*this);
}

void Fabric::execute(uint64_t most) {
  for (uint64_t i = 0; i < most && !active.empty(); ++i) {
    Qp& pair = *active[random.below(active.size())];
    step(*this, pair);
    schedule(pair);
  }
}

void Fabric::execute_all() { execute(kEndless); }

void channel_opened() {
  Fabric& f = Fabric::get();
  ++f.channels;
  if (f.ticker.joinable()) return;
  f.ticker = std::thread(tick_while_nobody_polls, ++f.ticker_serial);
  pthread_setname_np(f.ticker.native_handle(), "standin-ticker");
}

void channel_closed() {
  Fabric& f = Fabric::get();
  std::thread ended;
  {
    const std::lock_guard lock(f.mutex);
    if (--f.channels > 0) return;
    ++f.ticker_serial;
    f.ticker_wakes.notify_all();
    ended = std::move(f.ticker);
  }
  if (ended.joinable()) ended.join();
}

void bury(Object* object) {
  Fabric& f = Fabric::get();
  object->alive = false;
  --f.objects;
  f.graveyard.emplace_back(object);
  if (f.graveyard.size() > kGraves) f.graveyard.pop_front();
}

void violate(const char* text, ...) {
  Fabric& f = Fabric::get();
  char line[512];
  va_list values;
  va_start(values, text);
  std::vsnprintf(line, sizeof line, text, values);
  va_end(values);
  ++f.counts.violations;
  f.last_violation = line;
  if (f.options.quiet == 0) std::fprintf(stderr, "standin: violation: %s\n", line);
  if (f.options.abort != 0) std::abort();
}

}  // namespace standin
