// Receives for providers where every immediate uses one up (efa-direct without "unsolicited write receive": FI_RX_CQ_DATA
// stays set in the mode). Immediates and messages then take the posted receives in whatever order they come, so the pool
// posts buffers of its own and copies a message (8 KiB at most) into the receive that the engine has queued here.
// Worker thread only, but for open().
#pragma once

#include "efa/objects.h"

#ifdef TE_HAVE_LIBFABRIC
#include <vector>

#include "native/provider.h"

namespace te::efa {

class ReceivePool {
 public:
  // `local_keys`: the provider wants its buffers registered.
  static Error open(const Library& library, const Objects& objects, size_t count, size_t bytes, bool local_keys,
                    std::unique_ptr<ReceivePool>* out);

  size_t capacity() const { return wanted_.size(); }
  // The engine's receive. False: no room.
  bool add(void* buffer, uint64_t length, WorkContext* context);

  // An immediate has used up the receive with this context (null: it used none).
  void consumed(void* op_context);
  // A message lies in the receive with this context.
  void arrived(void* op_context, uint64_t length);
  // The next message for which the engine has a receive. False: none.
  bool next(Completion* out);

 private:
  struct Slot {
    alignas(64) fi_context2 context{};
    uint8_t* buffer = nullptr;
    uint64_t length = 0;
  };
  struct Wanted {
    void* buffer;
    uint64_t length;
    WorkContext* context;
  };
  // A ring of at most `capacity` indices; positions only grow, the difference is the fill.
  template <typename Item>
  struct Ring {
    std::vector<Item> items;
    size_t head = 0, tail = 0;
    size_t size() const { return items.size(); }
    bool empty() const { return head == tail; }
    bool full() const { return tail - head == items.size(); }
    void push(const Item& item) { items[tail++ % items.size()] = item; }
    Item pop() { return items[head++ % items.size()]; }
    const Item& front() const { return items[head % items.size()]; }
  };

  ReceivePool() = default;
  void post_idle();

  fid_ep* endpoint_ = nullptr;
  size_t bytes_ = 0;
  void* descriptor_ = nullptr;
  std::unique_ptr<uint8_t[]> memory_;
  FidPtr<fid_mr> registration_;
  std::vector<Slot> slots_;
  Ring<Slot*> idle_;      // to be posted; normally empty
  Ring<Slot*> messages_;  // arrived, not yet handed over
  Ring<Wanted> wanted_;
};

}  // namespace te::efa
#endif
