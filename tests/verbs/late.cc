// An acknowledgement says that the device has the bytes, not that they are in memory: here they may linger in between.
#include <algorithm>
#include <cstring>

#include "tests/verbs/execution.h"

namespace standin {
namespace {

void put(Fabric& f, const Late& late) {
  const Mr* mr = remote_memory(f, late.target->pd, late.address, late.bytes.size(), late.key, IBV_ACCESS_REMOTE_WRITE);
  if (mr != nullptr) std::memcpy(bytes_at(*mr, late.address), late.bytes.data(), late.bytes.size());
}

// Those for which `chosen` holds, in the order of arrival, or in any if that is relaxed.
template <typename Choice>
void put_all(Fabric& f, const Choice& chosen) {
  if (f.late.empty()) return;
  std::vector<Late> now;
  for (Late& each : f.late)
    if (chosen(each)) now.push_back(std::move(each));
  std::erase_if(f.late, [](const Late& each) { return each.bytes.empty(); });
  for (size_t i = 1; i < now.size(); ++i) {
    const size_t other = f.random.below(i + 1);
    if (now[i].relaxed && now[other].relaxed) std::swap(now[i], now[other]);
  }
  for (const Late& each : now) put(f, each);
}

}  // namespace

bool punctual(Fabric& f, Qp& target, const Mr& mr) {
  if (f.options.late <= 0) return true;
  if (f.random.chance(f.options.late)) return false;
  // Without relaxed ordering nothing overtakes what is late already.
  const bool relaxed = (mr.access & IBV_ACCESS_RELAXED_ORDERING) != 0;
  return relaxed || std::none_of(f.late.begin(), f.late.end(), [&](const Late& l) { return l.target == &target; });
}

void keep(Fabric& f, Late bytes) {
  bytes.due = f.now + 1 + f.random.below(f.options.late_ticks);
  f.late.push_back(std::move(bytes));
}

void arrive(Fabric& f, const Qp& target) {
  put_all(f, [&](const Late& each) { return each.target == &target; });
}

void arrive(Fabric& f, const Mr& mr) {
  put_all(f, [&](const Late& each) { return each.key == mr.rkey; });
}

void arrive_due(Fabric& f) {
  for (size_t i = 0; i < f.late.size(); ++i) {
    if (f.late[i].due > f.now) continue;
    const Late& due = f.late[i];
    // With it come those that it may not overtake.
    const Qp* target = due.target;
    size_t seen = 0;
    const bool relaxed = due.relaxed;
    put_all(f, [&](const Late& each) {
      const size_t at = seen++;
      return at == i || (!relaxed && at < i && each.target == target);
    });
    i = static_cast<size_t>(-1);  // from the beginning
  }
}

}  // namespace standin
