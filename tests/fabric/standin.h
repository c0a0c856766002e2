// A stand-in for libfabric, for tests and benchmarks: a shared library with libfabric's symbols whose provider `efa`
// has devices that exist in this process alone. It is loaded in place of the real one (TE_LIBFABRIC names it), so the
// transport above it is the one that ships. Every other provider is asked of the real library, if there is one, so that
// tcp and shm go on working beside it.
//
// It offers the two fabrics that EFA has, `efa` first. It is made after the provider's source and documentation
// (libfabric 2.1 to 2.6), not after a device: there was none. What it is strict about is efa-direct. A program that
// breaks a rule commits a *violation*: it is told on stderr, and the process aborts, so that no test can miss it. The
// rules:
//
//   - a context of 64 bytes (FI_CONTEXT2) with every send, receive, read and write. It belongs to the stand-in until
//     its completion is read: it writes there, and looks whether somebody else did.
//   - FI_MR_LOCAL: with every range, even an empty one, the descriptor of a region of that domain that covers it, with
//     the rights. Descriptors and keys are the provider's (FI_MR_PROV_KEY); a descriptor never comes again. Keys and
//     immediates have 4 bytes.
//   - one local and one remote range; sends of at most max_msg bytes, reads and writes of at most max_rma; no inject
//     for RMA
//   - FI_MORE holds requests back until one comes without it; if the queue is full then, those are lost
//   - a completion queue must not overrun; addresses must be in the vector (which holds each once: inserted twice and
//     removed once, it is gone); objects are closed before those that they stand on
//
// What a device answers, as a completion with an error (enum efa_io_comp_status), is no violation: keys and ranges that
// are not registered at the target (7), a peer that does not have the initiator in its address vector when the RDMA
// request arrives (14), that is gone (9), that does not answer (13) or has no receive posted for a message or an
// immediate (10, after some tries), a local region that was closed while the request was in flight (5). A region may be
// closed in the middle of a write: some of it has landed then. Immediates use up receives, as on a device without
// "unsolicited write receive": FI_RX_CQ_DATA is in the mode (unsolicited=0).
//
// Execution. Nothing runs by itself: fi_cq_read executes some of the posted work of all endpoints, in an order that the
// seed gives: requests overtake each other, and pieces of a request too; fi_trywait executes all that can be executed,
// so that who sleeps then has left nothing behind. Time is a count of polls ("ticks"). Placing a request and
// acknowledging it are separate steps.
//
// Environment, read when the library is used first:
//   TE_STANDIN_FABRIC    options, "key=value,key=value" (number or probability; defaults in tests/fabric/options.h):
//     devices          how many, "efa0-rdm" on
//     seed             of all that is random
//     steps            most steps that one poll executes
//     pieces           most pieces that one read or write is placed in (at most 31)
//     reorder          0: each endpoint's requests are done one after the other
//     direct           0: only the fabric `efa` is there, as before libfabric 2.1; emulated=1: it says that it emulates
//                      writes
//     unsolicited      1: immediates use no receive
//     hmem             1: FI_HMEM is offered;  wait_fd   0: no wait objects
//     max_rma, max_msg, tx_size, rx_size, max_cq   the devices' limits
//     retry_ticks, retries       ticks between tries, and tries, while the peer does not answer
//     rnr_ticks, rnr_retries     the same for a peer that had no receive posted
//     error_every, error_status  every so manyth request ends with this status, without a byte of it placed
//     eagain           probability that a send, read or write is refused although there is room (never while FI_MORE
//                      holds something)
//     ghosts           probability that what an endpoint was sending still lands after it was closed
//     stale            probability that a request in flight to an address that is removed from the vector ends with
//                      status 4
//     free             1: endpoints opened from now on do not carry out writes (fi_writemsg): each only notes its
//                      completion. No lock is taken and nothing is checked, so profiles show the caller's code.
//                      Everything else works as ever.
//     quiet            1: violations are counted and not told;  abort  0: and do not end the process
//
// Commands (standin_command; numbers are decimal, DEVICE is an index):
//   set KEY=VALUE,...        options
//   reset                    options as at the start, statistics and injected faults cleared, no device lost, no cut
//   error N STATUS [landed]  the Nth request (from 1) from now on ends with this status, before any byte of it is
//                            placed, or (landed) after all are
//   refuse N                 the next N posts of sends, reads and writes are refused with FI_EAGAIN
//   reg_fail N               the next N registrations fail with FI_ENOMEM
//   silence N                the Nth endpoint (from 0; -1: the latest that is open, and so on) does not answer any
//                            more, as if its process were stopped
//   lose DEVICE              nothing comes from it any more: its queues and posts fail with FI_EIO, peers get no answer
//   cut DEVICE DEVICE, join DEVICE DEVICE   between these two, or within one, nothing gets through until join
//   tick N                   N ticks pass, and all that can be executed is
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 0, or EINVAL: an unknown or malformed command.
int standin_command(const char* command);

// UINT64_MAX: no such name. Since the process or the last "reset":
//   posted (sends, reads, writes), writes, immediates (delivered), reads, sends, receives (posted), held (by FI_MORE),
//   refused (FI_EAGAIN), completions, error_completions, polls, bytes (placed), rnr, retries, unknown_peer (RDMA
//   requests of initiators that the target does not know), ghosts, violations; and at this moment: objects (that
//   exist), pending (requests not completed)
uint64_t standin_statistic(const char* name);

// The text of the latest violation; empty: none. Returns its length.
size_t standin_last_violation(char* text, size_t capacity);

#ifdef __cplusplus
}
#endif
