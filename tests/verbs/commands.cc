// Faults injected at run time, and what was counted. See tests/verbs/standin.h.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "tests/standins/text.h"
#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"
#include "tests/verbs/standin.h"
#include "tests/verbs/sysfs.h"

namespace standin {
namespace {

Device* device_at(Fabric& f, uint64_t index) { return index < f.devices.size() ? f.devices[index].get() : nullptr; }

int set_port(Fabric& f, uint64_t index, bool up) {
  Device* device = device_at(f, index);
  if (device == nullptr) return EINVAL;
  if (device->up == up) return 0;
  device->up = up;
  write_state(f, *device);
  emit(f, *device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
  return 0;
}

int kill(Fabric& f, Qp& pair) {
  emit(f, pair, IBV_EVENT_QP_FATAL);
  break_pair(f, pair);
  return 0;
}

int kill_pair(Fabric& f, const Numbers& n) {
  Device* device = device_at(f, n[0]);
  if (device == nullptr) return EINVAL;
  const auto found = device->pairs.find(static_cast<uint32_t>(n[1]));
  return found == device->pairs.end() ? EINVAL : kill(f, *found->second);
}

int kill_nth(Fabric& f, uint64_t n, ibv_qp_type type) {
  std::vector<Qp*> all;
  for (const auto& device : f.devices)
    for (const auto& [key, pair] : device->pairs)
      if (pair->qp_type == type) all.push_back(pair);
  if (n >= all.size()) return EINVAL;
  const auto nth = all.begin() + static_cast<ptrdiff_t>(n);
  std::nth_element(all.begin(), nth, all.end(), [](const Qp* a, const Qp* b) { return a->serial < b->serial; });
  return kill(f, **nth);
}

// The context that was opened as the nth, or, with a negative n, the nth from the end of those that are open.
Context* find_context(Fabric& f, uint64_t n) {
  const uint64_t from_end = 0 - n;
  if (from_end >= 1 && from_end <= f.contexts.size()) return f.contexts[f.contexts.size() - from_end];
  for (Context* context : f.contexts)
    if (context->serial == n) return context;
  return nullptr;
}

int kill_context(Fabric& f, uint64_t n) {
  Context* context = find_context(f, n);
  if (context == nullptr) return EINVAL;
  context->silent = true;
  for (const auto& [key, pair] : context->owner->pairs) {
    if (context_of(pair->context) != context) continue;
    pair->fast.usable = false;
    f.schedule(*pair);
  }
  return 0;
}

// The IPv4 address of a port becomes another one, or the first one again.
int change_address(Fabric& f, uint64_t index) {
  Device* device = device_at(f, index);
  if (device == nullptr) return EINVAL;
  uint8_t& network = device->gids[1].raw[13];
  network = network == kNetwork ? kNetwork + 1 : kNetwork;
  write_addresses(f, *device);
  emit(f, *device, IBV_EVENT_GID_CHANGE);
  return 0;
}

int reset(Fabric& f) {
  f.options = f.initial;
  f.random = Random(f.options.seed);
  f.faults = {};
  f.counts = {};
  f.buried = {};
  f.last_violation.clear();
  for (const auto& device : f.devices) {
    set_port(f, device->index, true);
    device->fatal = false;
    device->next_number = kFirstNumber;
    if (device->gids[1].raw[13] != kNetwork) change_address(f, device->index);
    for (const auto& [key, pair] : device->pairs)
      for (auto* counter : {&pair->fast.calls, &pair->fast.posted, &pair->fast.signalled, &pair->fast.inlined})
        *counter = 0;
  }
  return 0;
}

int fatal(Fabric& f, uint64_t index) {
  Device* device = device_at(f, index);
  if (device == nullptr) return EINVAL;
  device->fatal = true;
  for (const auto& [key, pair] : device->pairs) {
    pair->fast.usable = false;
    f.schedule(*pair);
  }
  emit(f, *device, IBV_EVENT_DEVICE_FATAL);
  return 0;
}

int cut(Fabric& f, const Numbers& n, bool apart) {
  if (device_at(f, n[0]) == nullptr || device_at(f, n[1]) == nullptr) return EINVAL;
  const std::pair<uint32_t, uint32_t> both{std::min(n[0], n[1]), std::max(n[0], n[1])};
  if (apart) f.faults.cuts.insert(both);
  else f.faults.cuts.erase(both);
  return 0;
}

int inject_error(Fabric& f, const Numbers& n, bool late) {
  f.faults.error_in = n[0];
  f.faults.error_status = static_cast<uint32_t>(n[1]);
  f.faults.error_late = late;
  return n[1] == 0 || n[1] > IBV_WC_GENERAL_ERR ? EINVAL : 0;
}

int pass(Fabric& f, uint64_t ticks) {
  f.pass(ticks);
  f.execute_all();
  return 0;
}

int run(Fabric& f, std::string_view verb, const Numbers& n) {
  const auto is = [&](std::string_view name, size_t least, size_t most) {
    return verb == name && n.size() >= least && n.size() <= most;
  };
  const auto store = [&](uint64_t* target) { return *target = n[0], 0; };
  if (is("reset", 0, 0)) return reset(f);
  if (is("partial_next", 1, 2)) {
    f.faults.partial_take = n[0];
    f.faults.partial_left = n.size() > 1 ? n[1] : 1;
    return 0;
  }
  if (is("partial_every", 1, 2)) {
    f.faults.partial_period = n[0];
    f.faults.partial_take = n.size() > 1 ? n[1] : 0;
    return 0;
  }
  if (is("srq_fail", 1, 1)) return store(&f.faults.srq_refusals);
  if (is("reg_fail", 1, 1)) return store(&f.faults.registration_failures);
  if (is("qp_fail", 1, 1)) return store(&f.faults.pair_failures);
  if (is("ah_fail", 1, 1)) return store(&f.faults.handle_failures);
  if (is("kill_qp", 2, 2)) return kill_pair(f, n);
  if (is("kill_rc", 1, 1)) return kill_nth(f, n[0], IBV_QPT_RC);
  if (is("kill_ud", 1, 1)) return kill_nth(f, n[0], IBV_QPT_UD);
  if (is("kill_context", 1, 1)) return kill_context(f, n[0]);
  if (is("port_down", 1, 1)) return set_port(f, n[0], false);
  if (is("port_up", 1, 1)) return set_port(f, n[0], true);
  if (is("new_address", 1, 1)) return change_address(f, n[0]);
  if (is("cut", 2, 2)) return cut(f, n, true);
  if (is("join", 2, 2)) return cut(f, n, false);
  if (is("fatal", 1, 1)) return fatal(f, n[0]);
  if (is("tick", 1, 1)) return pass(f, n[0]);
  if (is("wc_error", 2, 2)) return inject_error(f, n, false);
  return EINVAL;
}

int set_options(Fabric& f, std::string_view text) {
  const uint64_t seed = f.options.seed;
  if (!parse_options(text, &f.options)) return EINVAL;
  if (f.options.seed != seed) f.random = Random(f.options.seed);
  return 0;
}

int run_command(Fabric& f, std::string_view command) {
  const Words words = split(command);
  if (words.empty()) return EINVAL;
  if (words[0] == "set") return words.size() == 2 ? set_options(f, words[1]) : EINVAL;
  const bool late = words[0] == "wc_error" && words.size() == 4 && words[3] == "landed";
  Numbers numbers;
  for (size_t i = 1; i < words.size() - (late ? 1 : 0); ++i) {
    const std::optional<uint64_t> value = number(words[i]);
    if (!value) return EINVAL;
    numbers.push_back(*value);
  }
  return late ? inject_error(f, numbers, true) : run(f, words[0], numbers);
}

struct Named {
  std::string_view name;
  uint64_t Counts::* member;
};
constexpr Named kCounts[] = {{"calls", &Counts::calls},
                             {"posted", &Counts::posted},
                             {"signalled", &Counts::signalled},
                             {"inlined", &Counts::inlined},
                             {"chained", &Counts::chained},
                             {"refused", &Counts::refused},
                             {"receives", &Counts::receives},
                             {"completions", &Counts::completions},
                             {"error_completions", &Counts::error_completions},
                             {"polls", &Counts::polls},
                             {"empty_polls", &Counts::empty_polls},
                             {"armed", &Counts::armed},
                             {"events", &Counts::events},
                             {"async_events", &Counts::async_events},
                             {"bytes", &Counts::bytes},
                             {"rnr", &Counts::rnr},
                             {"retries", &Counts::retries},
                             {"datagrams", &Counts::datagrams},
                             {"datagrams_lost", &Counts::datagrams_lost},
                             {"datagrams_dropped", &Counts::datagrams_dropped},
                             {"ghosts", &Counts::ghosts},
                             {"violations", &Counts::violations},
                             {"discarded", &Counts::discarded}};

uint64_t pending(const Fabric& f) {
  uint64_t total = 0;
  for (const auto& device : f.devices)
    for (const auto& [key, pair] : device->pairs) total += pair->sends.size();
  return total;
}

}  // namespace
}  // namespace standin

extern "C" {

int standin_command(const char* command) {
  standin::Locked f;
  return standin::run_command(*f, command);
}

uint64_t standin_statistic(const char* name) {
  using namespace standin;
  Locked f;
  if (std::string_view(name) == "objects") return f->objects;
  if (std::string_view(name) == "pending") return pending(*f);
  Counts fast = f->buried;
  for (const auto& device : f->devices)
    for (const auto& [key, pair] : device->pairs) Fabric::add_fast_counts(*pair, &fast);
  for (const Named& each : kCounts)
    if (each.name == name) return (*f).counts.*each.member + fast.*each.member;
  return ~uint64_t{0};
}

size_t standin_last_violation(char* text, size_t capacity) {
  standin::Locked f;
  return standin::copy_out(f->last_violation, text, capacity);
}

}  // extern "C"
