#include "proxy/watch_block.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace te {
namespace {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
__attribute__((target("avx2"))) uint32_t first_difference_avx2(const void* words, const void* seen, uint32_t from,
                                                               uint32_t end) {
  constexpr size_t kPerLine = 2;
  const auto* now = static_cast<const volatile __m256i*>(words) + kPerLine * from;
  const auto* then = static_cast<const __m256i*>(seen) + kPerLine * from;
  for (uint32_t line = from; line < end; ++line, now += kPerLine, then += kPerLine) {
    const __m256i different = (now[0] ^ then[0]) | (now[1] ^ then[1]);
    if (_mm256_testz_si256(different, different) == 0) [[unlikely]]
      return line;
  }
  return end;
}
#endif

// The loads of words race with the raises, by intent, so the thread sanitizer is told to leave this function alone. Each word
// is loaded whole all the same, since vectors are loaded in aligned parts of 8 bytes and more.
#if defined(__SANITIZE_THREAD__)
[[gnu::no_sanitize("thread")]]
#endif
uint32_t first_difference(const void* words, const void* seen, uint32_t from, uint32_t end) {
  typedef uint64_t Pair __attribute__((vector_size(16), may_alias));
  constexpr size_t kPerLine = 4;
  const auto* now = static_cast<const volatile Pair*>(words) + kPerLine * from;
  const auto* then = static_cast<const Pair*>(seen) + kPerLine * from;
  for (uint32_t line = from; line < end; ++line, now += kPerLine, then += kPerLine) {
    const Pair different = (now[0] ^ then[0]) | (now[1] ^ then[1]) | (now[2] ^ then[2]) | (now[3] ^ then[3]);
    if ((different[0] | different[1]) != 0) [[unlikely]]
      return line;
  }
  return end;
}

}  // namespace

uint32_t WatchBlock::changed_line(const std::atomic<uint64_t>* words, const Line* seen, uint32_t from, uint32_t end) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) return first_difference_avx2(words, seen, from, end);
#endif
  return first_difference(words, seen, from, end);
}

}  // namespace te
