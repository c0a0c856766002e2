#include "native/mappings.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace te {
namespace {

Error refuse(const MemorySpan& span, int reason, const char* why) {
  return Error(Status::kRegistration,
               format("cannot register %" PRIu64 " bytes at %p: %s", span.length, span.address, why), reason);
}

}  // namespace

Error check_mapped(const MemorySpan& span) {
  const auto begin = reinterpret_cast<uintptr_t>(span.address);
  const uintptr_t end = begin + span.length;
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return {};  // no /proc: the caller's word must do
  uintptr_t covered = begin;
  bool writable = true;
  char* line = nullptr;
  size_t capacity = 0;
  while (covered < end && getline(&line, &capacity, maps) > 0) {
    uintptr_t from = 0, to = 0;
    char rights[8] = {};
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s", &from, &to, rights) != 3 || to <= covered) continue;
    if (from > covered) break;  // a hole
    writable = rights[0] == 'r' && rights[1] == 'w';
    if (!writable) break;
    covered = to;
  }
  std::free(line);
  std::fclose(maps);
  if (!writable) return refuse(span, EACCES, "it is not readable and writable");
  if (covered < end) return refuse(span, EFAULT, "it is not mapped as a whole");
  return {};
}

}  // namespace te
