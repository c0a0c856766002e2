// What endpoints with the option "free" leave in their completion queue: touched by the one thread that posts and
// polls, without the mutex.
#pragma once

#include <cstdint>
#include <vector>

namespace srd {

// A ring of contexts of writes that were not carried out. Its size is a power of two.
struct FreeQueue {
  uint64_t head = 0, tail = 0, mask = 0;
  std::vector<void*> ring;
  uint32_t polls = 0;
};

}  // namespace srd
