// What fast queue pairs and the completion queues keep apart: touched by the one thread that posts and polls, without the mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace standin {

struct FastCompletion {
  uint64_t id;
  uint32_t number;  // of the queue pair
  uint32_t opcode;  // ibv_wc_opcode
};

// A ring of completions of writes that were not carried out. Its size is a power of two above the completion queue's.
struct FastQueue {
  uint64_t head = 0, tail = 0, mask = 0;
  std::vector<FastCompletion> ring;
  uint32_t polls = 0;
  bool used = false;               // some fast queue pair completes here
  std::atomic<bool> armed{false};  // of the whole completion queue; fast posts look here
};

struct FastPair {
  bool on = false;
  std::atomic<bool> usable{false};  // on, and ready to send
  uint32_t last_swallowed = 0;      // ibv_wr_opcode: writes are the first ones
  FastQueue* queue = nullptr;
  // Written by the owner's thread only, read by any.
  std::atomic<uint64_t> calls{0}, posted{0}, signalled{0}, inlined{0};
};

}  // namespace standin
