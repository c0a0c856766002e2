#include "efa/classify.h"

#ifdef TE_HAVE_LIBFABRIC
#include <cerrno>

namespace te::efa {
namespace {

// EFA's device status, which libfabric passes on as prov_errno (enum efa_io_comp_status of efa_io_defs.h, source; there
// is no device here to run it on).
bool classify_efa(int device_status, Outcome* out) {
  const int number = TE_STATUS_EFA + device_status;
  switch (device_status) {
    case 1:  // flushed with the queue pair
      *out = {Status::kCancelled, true, number};
      return true;
    case 7:  // remote: bad address or key. Packets that came before the key went have landed
      *out = {Status::kRemoteAccess, true, number};
      return true;
    case 11:  // remote: bad length
      *out = {Status::kRemoteAccess, false, number};
      return true;
    case 8:   // remote: aborted
    case 9:   // remote: no such queue pair (restarted)
    case 13:  // remote: unresponsive
    case 14:  // remote: does not know us
    case 15:  // local: peer unreachable
      *out = {Status::kPeerLost, true, number};
      return true;
    default:
      return false;
  }
}

}  // namespace

Outcome classify(Kind kind, const fi_cq_err_entry& error) {
  Outcome outcome;
  if (kind == Kind::kEfa && classify_efa(error.prov_errno, &outcome)) return outcome;
  if (kind == Kind::kEfa && error.prov_errno > 0) return {Status::kTransport, true, TE_STATUS_EFA + error.prov_errno};
  // The software providers fill prov_errno with whatever errno was last; only err says something.
  const int code = error.err;
  switch (code) {
    case FI_EACCES:
    case FI_EPERM:
    case FI_ENOKEY:
    case FI_EKEYREJECTED:
    case FI_EFAULT:
      return {Status::kRemoteAccess, false, code};
    case FI_ECONNRESET:
    case FI_ECONNREFUSED:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_EHOSTDOWN:
    case FI_EHOSTUNREACH:
    case FI_ENETDOWN:
    case FI_ENETUNREACH:
    case FI_ESHUTDOWN:
    case EPIPE:
    case FI_ETIMEDOUT:
    case FI_ENOENT:
    case ESRCH:  // shm: the process to copy to or from is gone
      return {Status::kPeerLost, true, code};
    case FI_ECANCELED:
      // Over TCP this is how *everything* looks that ends the connection: a peer that died, a key that the target
      // refused (it then drops the connection, and all that was in flight with it), a route that broke. Neither "the
      // peer is lost" nor "it never left" would be true, so it is a fault of the transport, after which the bytes may
      // be there; whether the peer lives is for heartbeats to say.
      return kind == Kind::kTcp ? Outcome{Status::kTransport, true, code} : Outcome{Status::kCancelled, true, code};
    default:
      return {Status::kTransport, true, code};
  }
}

}  // namespace te::efa
#endif
