// Who a process is, in a form that another process of the machine can check: has it ended?
#pragma once

#include <cstdint>

namespace te::efa {

// Plain bytes: it lies in shared memory (doorbell.h).
struct ProcessIdentity {
  uint64_t start_time = 0;     // clock ticks after boot, field 22 of /proc/PID/stat
  uint64_t pid_namespace = 0;  // inode; the same number means another process in another one
  uint8_t boot_id[16] = {};    // /proc/sys/kernel/random/boot_id
  int32_t pid = 0;
};

// All zero where /proc is missing: such an identity is never proven dead.
ProcessIdentity this_process();

// True only with proof. Another pid namespace, another machine or an unreadable /proc prove nothing; a process that
// exists but was started at another time is another one, so the one we knew has ended.
bool has_ended(const ProcessIdentity& process);

}  // namespace te::efa
