// A stand-in for libibverbs, for tests and benchmarks: a shared library with libibverbs's symbols whose devices exist in this process
// alone. It is loaded in place of the real one (TE_LIBIBVERBS names it), so the transport above it is the one that ships.
//
// What it is strict about is what a device and its library are strict about, or are allowed to be. A breach that a device answers
// with an error gets that error; one that only a faulty program commits is also counted as a *violation* and told on stderr.
//
// Execution. Nothing runs by itself: ibv_poll_cq executes some of the posted work of all queue pairs of all devices, in an order that the
// seed gives, but strictly in order for each reliable queue pair; ibv_req_notify_cq executes all that can be executed, so that who
// sleeps then has left nothing behind. Time is a count of polls ("ticks"). Only while nobody polls and something is waiting, a
// thread polls in their place, once a millisecond: it exists while there is a completion channel.
// A long message is placed in pieces, one at a time. Placing a message and acknowledging it are separate steps, so an error can
// come between: the bytes are there, the sender does not know.
//
// Environment, read when the library is loaded:
//   TE_STANDIN_DEVICES   how many devices, "standin0" on (4). Each has one port of link layer Ethernet with GID 0, fe80::..., and
//                        GID 1, ::ffff:10.88.0.N, both RoCEv2. Queue pair numbers are the same on all devices.
//   TE_STANDIN           options, "key=value,key=value", see below
//   TE_RDMA_ROOT         if set: the directory below which the sysfs tree is written, unless one for as many devices is there
//
// Options (number or probability; defaults in tests/verbs/options.h):
//   seed             of all that is random
//   steps            most steps that one poll executes
//   pieces           most pieces that one message is placed in
//   max_msg, max_inline, max_sge, max_qp_wr, max_cqe, max_srq_wr, max_srq, max_qp, max_mr, max_rd_atom, mtu   the devices' limits
//   retry_ticks      ticks of one retry while the peer does not answer (as often as retry_cnt says)
//   rnr_ticks        ticks until a peer that had no receive posted is asked again
//   idle_ticks       ticks that one millisecond is worth when nobody polls
//   srq_shuffle      1: a shared receive queue is not used in order
//   ud_loss, ud_dup, ud_reorder, ud_delay   probabilities for datagrams; ud_delay_ticks: most ticks of a delayed one
//   post_partial     probability that ibv_post_send takes only a part of a chain of several (ENOMEM for the rest)
//   srq_full         probability that ibv_post_srq_recv takes only a part of its chain (ENOMEM for the rest), once a receive of the
//                    queue has been used
//   ghosts           probability that what a queue pair was just sending still lands after it was reset, destroyed or in error
//   late             probability that bytes of a write reach memory some time after they were acknowledged (late_ticks: at most), but
//                    before a later receive completion or read of the same queue pair, and before their region or queue pair goes. Where
//                    the region allows relaxed ordering, later bytes may come before earlier ones
//   dmabuf           1: ibv_reg_dmabuf_mr works, with descriptors that can be mapped
//   relaxed          0: registrations that ask for relaxed ordering are refused (EINVAL)
//   fast             1: for queue pairs created from now on writes are not carried out: post_send only notes their completions.
//                    No lock is taken and nothing is checked, so profiles show the caller's code. Sends, receives and datagrams work.
//   fast_imm         1: fast writes with immediate deliver the immediate (without the bytes)
//   quiet            1: violations are counted and not told;  abort  1: they abort
//
// Commands (standin_command; numbers are decimal, DEVICE is an index):
//   set KEY=VALUE,...            options
//   reset                        options as at the start, statistics and injected faults cleared, all ports up, no cut
//   partial_next TAKE [TIMES]    the next TIMES (1) calls of ibv_post_send take TAKE work requests, then ENOMEM
//   partial_every PERIOD TAKE    so does every PERIODth; 0: none
//   srq_fail N                   the next N calls of ibv_post_srq_recv refuse (ENOMEM)
//   wc_error N STATUS [landed]   the Nth request (from 1) on a reliable queue pair from now on ends with this ibv_wc_status (its
//                                number), before any byte of it is placed, or (landed) after all are
//   kill_qp DEVICE NUMBER        that queue pair goes to the error state, with IBV_EVENT_QP_FATAL
//   kill_rc N, kill_ud N         likewise the Nth of those reliable (datagram) queue pairs that exist, in the order of creation
//   kill_context N               the Nth opened context (from 0, of all devices; -1: the latest that is open, and so on) falls silent,
//                                as if its process were killed; its objects can still be destroyed
//   port_down DEVICE, port_up DEVICE   with IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE
//   new_address DEVICE           its IPv4 address, so GID 1, becomes another, or the first again, with IBV_EVENT_GID_CHANGE
//   cut DEVICE DEVICE, join DEVICE DEVICE   between these two, or within one, packets are lost until join
//   fatal DEVICE                 IBV_EVENT_DEVICE_FATAL: no completion comes any more, posts fail with EIO
//   reg_fail N, qp_fail N, ah_fail N   the next N registrations (queue pairs, address handles) fail with ENOMEM
//   tick N                       N ticks pass and all that can be executed is
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 0, or EINVAL: an unknown or malformed command.
int standin_command(const char* command);

// UINT64_MAX: no such name. Since the process or the last "reset":
//   calls (of ibv_post_send: the doorbells), posted, signalled, inlined, chained (requests after the first of a call), refused
//   (ENOMEM, EINVAL), receives (posted), completions, error_completions, polls, empty_polls, armed, events (of completion channels),
//   async_events, bytes (placed by writes and sends), rnr, retries, datagrams, datagrams_lost, datagrams_dropped (nobody, or no receive,
//   there), ghosts (pieces), violations, discarded (good receive completions not polled when their queue pair was destroyed or
//   reset, so that nobody learns what came); and at this moment: objects (that exist), pending (work requests not completed)
uint64_t standin_statistic(const char* name);

// The text of the latest violation; empty: none. Returns its length.
size_t standin_last_violation(char* text, size_t capacity);

// Writes ROOT/sys/class/infiniband/... for all devices, and keeps the ports' states there true from now on. 0 or errno.
int standin_write_sysfs(const char* root);

#ifdef __cplusplus
}
#endif
