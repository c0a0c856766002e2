// What the benchmarks share: a control channel between the two processes, a clock, medians.
#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace bench {

inline double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

inline double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())))];
}
inline double median(const std::vector<double>& values) { return percentile(values, 0.5); }

inline void send_all(int fd, const void* data, size_t length) {
  const char* at = static_cast<const char*>(data);
  while (length > 0) {
    const ssize_t done = write(fd, at, length);
    if (done <= 0) std::_Exit(3);
    at += done;
    length -= static_cast<size_t>(done);
  }
}

inline void receive_all(int fd, void* data, size_t length) {
  char* at = static_cast<char*>(data);
  while (length > 0) {
    const ssize_t done = read(fd, at, length);
    if (done <= 0) std::_Exit(3);
    at += done;
    length -= static_cast<size_t>(done);
  }
}

}  // namespace bench
