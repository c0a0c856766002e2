// What an error completion means to the engine. Pure, so that every case is tested without a network.
#pragma once

#include "efa/selection.h"

#ifdef TE_HAVE_LIBFABRIC
namespace te::efa {

struct Outcome {
  Status status = Status::kTransport;
  bool landed_unknown = true;
  int provider_status = 0;
};

Outcome classify(Kind kind, const fi_cq_err_entry& error);

}  // namespace te::efa
#endif
