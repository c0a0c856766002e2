// What a failed work completion means to the engine. Of an error completion only wr_id, status, qp_num and vendor_err are valid.
#pragma once

#include "cx7/library.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {

struct Outcome {
  Status status = Status::kTransport;
  bool landed_unknown = true;
};
Outcome classify(ibv_wc_status status);

}  // namespace te::cx7
#endif
