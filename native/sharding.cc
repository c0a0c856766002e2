#include "native/sharding.h"

#include <numeric>

namespace te {

std::vector<uint32_t> posting_order(std::span<const GroupKey> members, const GroupKey& own, int32_t place) {
  const auto count = static_cast<uint32_t>(members.size());
  std::vector<uint32_t> ring(count);
  std::iota(ring.begin(), ring.end(), 0u);
  uint32_t start = 0;
  if (place >= 0) {
    start = count == 0 ? 0 : (static_cast<uint32_t>(place) % count + 1) % count;
  } else {
    std::stable_sort(ring.begin(), ring.end(), [&](uint32_t a, uint32_t b) { return members[a] < members[b]; });
    while (start < count && members[ring[start]] <= own) ++start;
  }
  std::rotate(ring.begin(), ring.begin() + start, ring.end());
  return ring;
}

}  // namespace te
