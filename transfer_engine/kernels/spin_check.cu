// Kernels that are there before what they wait for: they show whether a raised epoch makes the payload visible to a kernel that
// runs already.
#include "pattern.cuh"
#include "transfer_engine.cuh"

// One block. For each round r = 1..rounds: waits until the epoch is at least `base` + r, compares `words` words of payload with the
// pattern of round r, and raises `reply` by one, whereupon the payload may be overwritten. found[0]: words that differ;
// found[1]: rounds that came; both start at zero. It leaves early with the abort word, or after `timeout_ns` in one round.
extern "C" __global__ void te_spin_check(const unsigned long long* epoch, unsigned long long* control,
                                         const unsigned long long* payload, unsigned long long words,
                                         unsigned long long seed, unsigned long long base, unsigned long long rounds,
                                         unsigned long long timeout_ns, unsigned long long* reply,
                                         unsigned long long* found) {
  if (blockIdx.x) return;
  __shared__ bool came;
  for (unsigned long long round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) came = te::wait_until(epoch, control, base + round, timeout_ns);
    __syncthreads();  // thread 0 acquired: what it may see, all threads of the block may
    if (!came) return;
    unsigned long long wrong = 0;
    for (unsigned long long i = threadIdx.x; i < words; i += blockDim.x)
      wrong += payload[i] != te::pattern(seed, round, i);
    if (wrong) atomicAdd(found, wrong);
    __syncthreads();  // all have read, and `came` may change
    if (threadIdx.x == 0) {
      atomicAdd(found + 1, 1ull);
      te::raise(reply, 1);
    }
  }
}

// The same without a host that answers. One block. For each round r = 1..rounds: writes the pattern of round `base` + r into `source`,
// raises `watched` by one, which has the source sent to `target`, waits until the epoch is at least `base` + r, and compares what
// arrived. found[] and the end as above.
extern "C" __global__ void te_drive_and_check(unsigned long long* watched, const unsigned long long* epoch,
                                              unsigned long long* control, unsigned long long* source,
                                              const unsigned long long* target, unsigned long long words,
                                              unsigned long long seed, unsigned long long base, unsigned long long rounds,
                                              unsigned long long timeout_ns, unsigned long long* found) {
  if (blockIdx.x) return;
  __shared__ bool came;
  for (unsigned long long round = base + 1; round <= base + rounds; ++round) {
    for (unsigned long long i = threadIdx.x; i < words; i += blockDim.x) source[i] = te::pattern(seed, round, i);
    __syncthreads();  // thread 0 releases what the block has written
    if (threadIdx.x == 0) {
      te::raise(watched, 1);
      came = te::wait_until(epoch, control, round, timeout_ns);
    }
    __syncthreads();  // and what it acquired is for all of them
    if (!came) return;
    unsigned long long wrong = 0;
    for (unsigned long long i = threadIdx.x; i < words; i += blockDim.x)
      wrong += target[i] != te::pattern(seed, round, i);
    if (wrong) atomicAdd(found, wrong);
    if (threadIdx.x == 0) atomicAdd(found + 1, 1ull);
    __syncthreads();  // all have read, and `came` may change
  }
}
