// The simulated transport: any number of engines and NICs in one process, on one seeded fabric that misbehaves on
// request. Options: native/sim/options.h. Run-time commands: native/sim/commands.h.
#pragma once

#include <memory>

#include "native/provider.h"
#include "native/status.h"

namespace te::sim {

// kConfig: an option is wrong, or the address is in use.
Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out);

}  // namespace te::sim
