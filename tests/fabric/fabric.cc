#include "tests/fabric/fabric.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace srd {
namespace {

constexpr uint64_t kEndless = 100'000'000;  // steps: more than any program has work posted
constexpr size_t kContextBytes = sizeof(fi_context2);

void scribble(uint64_t pattern, uint8_t* out) {
  standin::Random random(pattern);
  for (size_t i = 0; i < kContextBytes; i += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(out + i, &word, sizeof word);
  }
}

}  // namespace

Fabric& Fabric::get() {
  static Fabric* const fabric = [] {
    auto* made = new Fabric;
    pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().mutex.unlock(); });
    return made;
  }();
  return *fabric;
}

Fabric::Fabric() {
  const char* text = std::getenv("TE_STANDIN_FABRIC");
  if (text != nullptr && !parse_options(text, &initial)) {
    std::fprintf(stderr, "standin: TE_STANDIN_FABRIC=\"%s\" is not understood; see tests/fabric/standin.h\n", text);
    std::abort();
  }
  options = initial;
  random = standin::Random(options.seed);
  for (uint64_t i = 0; i < options.devices; ++i) {
    devices.push_back(std::make_unique<Device>());
    devices.back()->index = static_cast<uint32_t>(i);
  }
}

Locked::~Locked() {
  uint64_t attention = fabric_.active.size() + fabric_.waiting.size();
  for (const Endpoint* endpoint : fabric_.endpoints)
    if (endpoint->free) attention += endpoint->transmit->entries.size() + endpoint->receive->entries.size();
  fabric_.attention.store(attention, std::memory_order_relaxed);
}

// --- the clock and who runs ------------------------------------------------------------------------------------------

void Fabric::activate(Request* request) {
  if (request->place != SIZE_MAX) return;
  request->wake = 0;
  request->place = active.size();
  active.push_back(request);
}

void Fabric::forget(Request* request) {
  if (request->wake != 0) std::erase(waiting, request);
  request->wake = 0;
  if (request->place == SIZE_MAX) return;
  active.back()->place = request->place;
  active[request->place] = active.back();
  active.pop_back();
  request->place = SIZE_MAX;
}

void Fabric::wait(Request* request, uint64_t ticks) {
  forget(request);
  request->wake = now + std::max<uint64_t>(ticks, 1);
  waiting.push_back(request);
}

void Fabric::pass(uint64_t ticks) {
  now += ticks;
  for (size_t i = 0; i < waiting.size();) {
    Request* request = waiting[i];
    if (request->wake > now) {
      ++i;
      continue;
    }
    waiting[i] = waiting.back();
    waiting.pop_back();
    activate(request);
  }
}

void Fabric::execute(uint64_t most) {
  for (uint64_t i = 0; i < most && !active.empty(); ++i) step(*this, active[random.below(active.size())]);
}

void Fabric::execute_all() { execute(kEndless); }

// --- rules -----------------------------------------------------------------------------------------------------------

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

bool claim(Fabric& f, Endpoint& endpoint, void* context, const char* function) {
  if (!endpoint.direct) return true;
  if (context == nullptr) {
    violate("%s: FI_CONTEXT2 demands a context for every request", function);
    return false;
  }
  const uint64_t pattern = f.random.next();
  if (!f.claims.try_emplace(context, Claim{&endpoint, pattern}).second) {
    violate("%s: the context %p belongs to a request whose completion was not read", function, context);
    return false;
  }
  scribble(pattern, static_cast<uint8_t*>(context));
  return true;
}

void release(Fabric& f, void* context) {
  const auto found = f.claims.find(context);
  if (found == f.claims.end()) return;
  uint8_t expected[kContextBytes];
  scribble(found->second.pattern, expected);
  f.claims.erase(found);
  if (std::memcmp(expected, context, kContextBytes) != 0)
    violate("the program wrote into the context %p while its request was in flight", context);
}

// --- regions ---------------------------------------------------------------------------------------------------------

namespace {

bool covers(const Region& region, const Domain* domain, uint64_t from, uint64_t length, uint64_t access) {
  const auto base = reinterpret_cast<uint64_t>(region.base);
  return region.domain == domain && (region.access & access) == access && from >= base && length <= region.length &&
         from - base <= region.length - length;
}

}  // namespace

Region* local_region(Fabric& f, const Domain* domain, uint64_t descriptor, const void* from, uint64_t length,
                     uint64_t access) {
  const auto found = f.by_descriptor.find(descriptor);
  if (found == f.by_descriptor.end()) return nullptr;
  if (length == 0) return found->second->domain == domain ? found->second : nullptr;
  return covers(*found->second, domain, reinterpret_cast<uint64_t>(from), length, access) ? found->second : nullptr;
}

Region* remote_region(Fabric& f, const Domain* domain, uint64_t key, uint64_t address, uint64_t length,
                      uint64_t access) {
  const auto found = f.by_key.find(key);
  return found != f.by_key.end() && covers(*found->second, domain, address, length, access) ? found->second : nullptr;
}

}  // namespace srd
