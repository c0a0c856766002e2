// How long a word takes from the GPU to the CPU and back. One thread; times[2 * i] is round i's time in cycles of the
// multiprocessor's clock, times[2 * i + 1] the same in nanoseconds of the global timer, which ticks more coarsely.
#include "transfer_engine.cuh"

namespace {

__device__ unsigned long long cycles() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value)::"memory");
  return value;
}

}  // namespace

// The floor: stores k, spins for the CPU's k, without any bookkeeping. Leaves early with the abort word; then times stay as they were.
extern "C" __global__ void te_pingpong(unsigned long long* there, const unsigned long long* back, unsigned long long* control,
                                       unsigned long long* times, unsigned long long rounds) {
  if (threadIdx.x || blockIdx.x) return;
  for (unsigned long long k = 1; k <= rounds; ++k) {
    const unsigned long long begin = cycles(), since = te::nanoseconds();
    te::store_release_sys(there, k);
    for (unsigned polls = 1; te::load_acquire_sys(back) < k; ++polls)
      if (polls % 64 == 0 && te::load_acquire_sys(control + te::kAbortWord)) return te::count_missed(control);
    times[2 * k - 2] = cycles() - begin;
    times[2 * k - 1] = te::nanoseconds() - since;
  }
}

// The product's way: raises a watcher's word by one and waits until the flag's epoch has risen by one more.
extern "C" __global__ void te_raise_and_wait(unsigned long long* watched, const unsigned long long* epoch,
                                             unsigned long long* control, unsigned long long* taken,
                                             unsigned long long* times, unsigned long long rounds,
                                             unsigned long long timeout_ns) {
  if (threadIdx.x || blockIdx.x) return;
  for (unsigned long long k = 0; k < rounds; ++k) {
    const unsigned long long begin = cycles(), since = te::nanoseconds();
    te::raise(watched, 1);
    if (!te::wait(epoch, control, taken, 1, timeout_ns)) return;
    times[2 * k] = cycles() - begin;
    times[2 * k + 1] = te::nanoseconds() - since;
  }
}
