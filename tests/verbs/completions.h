// Completion queues and what is told through descriptors: completions, their notifications, asynchronous events.
#pragma once

#include "tests/verbs/fabric.h"

namespace standin {

// Of a send work request; takes it for done. `solicited` only matters to receive completions.
void complete_send(Fabric& f, Qp& pair, const Send& work, ibv_wc_status status);
// Of a receive: `wc` has all but wr_id, status and qp_num.
void complete_receive(Fabric& f, Qp& pair, uint64_t id, ibv_wc_status status, ibv_wc wc, bool solicited);
// Without the completions of a queue pair that is no more.
void drop_completions(Fabric& f, Qp& pair);
// The notification of a completion queue that is armed.
void notify(Fabric& f, Cq& queue);

int poll(Fabric& f, Cq& queue, int most, ibv_wc* out);

// Events of a queue pair, completion queue or shared receive queue, and of a port or device for everyone who has it open.
void emit(Fabric& f, Qp& pair, ibv_event_type type);
void emit(Fabric& f, Cq& queue, ibv_event_type type);
void emit(Fabric& f, Srq& queue, ibv_event_type type);
void emit(Fabric& f, Device& device, ibv_event_type type);
// Events that were not taken, of an object that goes away.
void drop_events(Context& context, const void* object);

// Descriptors that are readable while something is queued. Blocking unless the caller has made them O_NONBLOCK.
int make_descriptor();
void raise(int descriptor);
void lower(int descriptor);
// Without the mutex: waits until it is readable; false: it does not block, and is not.
bool await(int descriptor);

}  // namespace standin
