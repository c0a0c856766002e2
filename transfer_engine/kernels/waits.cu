// Kernels of one thread that stand in a stream or a graph: one raises a watched word, one waits for a flag.
#include "transfer_engine.cuh"

extern "C" __global__ void te_raise(unsigned long long* word, unsigned long long by) {
  if (threadIdx.x + threadIdx.y + threadIdx.z + blockIdx.x + blockIdx.y + blockIdx.z) return;
  te::raise(word, by);
}

extern "C" __global__ void te_wait(const unsigned long long* epoch, unsigned long long* control, unsigned long long* taken,
                                   unsigned long long advance, unsigned long long timeout_ns) {
  if (threadIdx.x + threadIdx.y + threadIdx.z + blockIdx.x + blockIdx.y + blockIdx.z) return;
  te::wait(epoch, control, taken, advance, timeout_ns);
}
