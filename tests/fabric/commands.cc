// Faults injected at run time, and what was counted. See tests/fabric/standin.h.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "tests/fabric/fabric.h"
#include "tests/fabric/standin.h"
#include "tests/standins/text.h"

namespace srd {
namespace {

using standin::Numbers;
using standin::Words;

int set_options(Fabric& f, std::string_view text) {
  const uint64_t seed = f.options.seed;
  if (!parse_options(text, &f.options)) return EINVAL;
  if (f.options.seed != seed) f.random = standin::Random(f.options.seed);
  return 0;
}

int reset(Fabric& f) {
  f.options = f.initial;
  f.random = standin::Random(f.options.seed);
  f.faults = {};
  f.counts = {};
  f.last_violation.clear();
  for (const auto& device : f.devices) device->lost = false;
  return 0;
}

// The endpoint that was opened as the nth, or, with a negative n, the nth from the end of those that are open.
int silence(Fabric& f, uint64_t n) {
  const uint64_t from_end = 0 - n;
  if (from_end >= 1 && from_end <= f.endpoints.size()) {
    f.endpoints[f.endpoints.size() - from_end]->silent = true;
    return 0;
  }
  for (Endpoint* endpoint : f.endpoints) {
    if (endpoint->serial != n) continue;
    endpoint->silent = true;
    return 0;
  }
  return EINVAL;
}

// Nothing comes from the device any more, and nobody reaches it.
int lose(Fabric& f, uint64_t index) {
  if (index >= f.devices.size()) return EINVAL;
  f.devices[index]->lost = true;
  for (const Endpoint* endpoint : f.endpoints)
    if (endpoint->device->index == index)
      for (Request* request : endpoint->posted) f.forget(request);
  return 0;
}

int cut(Fabric& f, const Numbers& n, bool apart) {
  if (n[0] >= f.devices.size() || n[1] >= f.devices.size()) return EINVAL;
  const std::pair<uint32_t, uint32_t> both{std::min(n[0], n[1]), std::max(n[0], n[1])};
  if (apart) f.faults.cuts.insert(both);
  else f.faults.cuts.erase(both);
  return 0;
}

int inject_error(Fabric& f, const Numbers& n, bool landed) {
  f.faults.error_in = n[0];
  f.faults.error_status = static_cast<uint32_t>(n[1]);
  f.faults.error_landed = landed;
  return n[0] == 0 || n[1] == 0 || n[1] > kUnreachable ? EINVAL : 0;
}

int run(Fabric& f, std::string_view verb, const Numbers& n) {
  const auto is = [&](std::string_view name, size_t arguments) { return verb == name && n.size() == arguments; };
  if (is("reset", 0)) return reset(f);
  if (is("silence", 1)) return silence(f, n[0]);
  if (is("lose", 1)) return lose(f, n[0]);
  if (is("cut", 2)) return cut(f, n, true);
  if (is("join", 2)) return cut(f, n, false);
  if (is("reg_fail", 1)) return f.faults.registration_failures = n[0], 0;
  if (is("refuse", 1)) return f.faults.refusals = n[0], 0;
  if (is("error", 2)) return inject_error(f, n, false);
  if (!is("tick", 1)) return EINVAL;
  for (uint64_t i = 0; i < n[0]; ++i) {
    f.pass(1);
    f.execute_all();
  }
  return 0;
}

int run_command(Fabric& f, std::string_view command) {
  const Words words = standin::split(command);
  if (words.empty()) return EINVAL;
  if (words[0] == "set") return words.size() == 2 ? set_options(f, words[1]) : EINVAL;
  const bool landed = words[0] == "error" && words.size() == 4 && words[3] == "landed";
  Numbers numbers;
  for (size_t i = 1; i < words.size() - (landed ? 1 : 0); ++i) {
    const std::optional<uint64_t> value = standin::number(words[i]);
    if (!value) return EINVAL;
    numbers.push_back(*value);
  }
  return landed ? inject_error(f, numbers, true) : run(f, words[0], numbers);
}

struct Named {
  std::string_view name;
  uint64_t Counts::* member;
};
constexpr Named kCounts[] = {
    {"posted", &Counts::posted},
    {"writes", &Counts::writes},
    {"immediates", &Counts::immediates},
    {"reads", &Counts::reads},
    {"sends", &Counts::sends},
    {"receives", &Counts::receives},
    {"held", &Counts::held},
    {"refused", &Counts::refused},
    {"completions", &Counts::completions},
    {"error_completions", &Counts::error_completions},
    {"polls", &Counts::polls},
    {"bytes", &Counts::bytes},
    {"rnr", &Counts::rnr},
    {"retries", &Counts::retries},
    {"unknown_peer", &Counts::unknown_peer},
    {"ghosts", &Counts::ghosts},
    {"violations", &Counts::violations},
};

}  // namespace
}  // namespace srd

extern "C" {

int standin_command(const char* command) {
  srd::Locked f;
  return srd::run_command(*f, command);
}

uint64_t standin_statistic(const char* name) {
  using namespace srd;
  Locked f;
  if (std::string_view(name) == "objects") return f->objects;
  if (std::string_view(name) == "pending") {
    uint64_t total = 0;
    for (const Endpoint* endpoint : f->endpoints) total += endpoint->posted.size();
    return total;
  }
  for (const Named& each : kCounts)
    if (each.name == name) return (*f).counts.*each.member;
  return ~uint64_t{0};
}

size_t standin_last_violation(char* text, size_t capacity) {
  srd::Locked f;
  return standin::copy_out(f->last_violation, text, capacity);
}

}  // extern "C"
