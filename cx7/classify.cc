#include "cx7/classify.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {

// InfiniBand Architecture 1.4, 10.10.3 and 11.6.2. A request that the responder refused has not landed beyond the packets before
// the refused one; a flushed one may have been on its way when the queue pair failed.
Outcome classify(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return {Status::kOk, false};
    case IBV_WC_WR_FLUSH_ERR:
      return {Status::kCancelled, true};
    case IBV_WC_REM_ACCESS_ERR:
      return {Status::kRemoteAccess, true};
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return {Status::kPeerLost, true};
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_EEC_OP_ERR:
      return {Status::kTransport, false};
    default:
      return {Status::kTransport, true};
  }
}

}  // namespace te::cx7
#endif
