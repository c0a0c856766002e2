#include "efa/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace te::efa {
namespace {

bool read_file(const char* path, char* text, size_t capacity) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t length = read(fd, text, capacity - 1);
  close(fd);
  if (length <= 0) return false;
  text[length] = '\0';
  return true;
}

// 0: unknown. The command in parentheses may hold anything, so the fields are counted from the last ')'.
uint64_t start_time_of(int32_t pid) {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  if (!read_file(path, text, sizeof text)) return 0;
  const char* field = std::strrchr(text, ')');
  for (int number = 2; field != nullptr && number < 22; ++number) field = std::strchr(field + 1, ' ');
  return field != nullptr ? std::strtoull(field + 1, nullptr, 10) : 0;
}

uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

void read_boot_id(uint8_t (&id)[16]) {
  char text[64];
  if (!read_file("/proc/sys/kernel/random/boot_id", text, sizeof text)) return;
  size_t digits = 0;
  for (const char* c = text; *c != '\0' && digits < 32; ++c) {
    const char digit[2] = {*c, '\0'};
    char* end = nullptr;
    const unsigned long value = std::strtoul(digit, &end, 16);
    if (end == digit) continue;  // a dash
    id[digits / 2] = static_cast<uint8_t>(id[digits / 2] << 4 | value);
    ++digits;
  }
}

// A pid file descriptor turns readable when the last thread of the process is gone, even while a zombie remains.
bool thread_group_gone(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity process;
  process.start_time = start_time_of(getpid());
  process.pid_namespace = pid_namespace();
  read_boot_id(process.boot_id);
  process.pid = getpid();
  return process;
}

bool has_ended(const ProcessIdentity& process) {
  const ProcessIdentity self = this_process();
  if (process.pid <= 0 || process.start_time == 0 || self.start_time == 0) return false;
  if (process.pid_namespace != self.pid_namespace || process.pid_namespace == 0) return false;
  if (std::memcmp(process.boot_id, self.boot_id, sizeof self.boot_id) != 0) return false;
  if (process.pid == self.pid && process.start_time == self.start_time) return false;

  // The descriptor first, the start time second: what is read then belongs to the process the descriptor holds, or to
  // one that came after it.
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
  if (pidfd < 0) return errno == ESRCH;
  const uint64_t start = start_time_of(process.pid);
  const bool ended = thread_group_gone(pidfd) || (start != 0 && start != process.start_time);
  close(pidfd);
  return ended;
}

}  // namespace te::efa
