// The libfabric transport: "tcp" and "shm" on any machine, "efa" on AWS. This is all that proxy/ sees of it.
#pragma once

#include <memory>
#include <string>

#include "native/provider.h"

namespace te::efa {

// Opens one fabric, domain, endpoint, address vector and completion queue per NIC. kTransportUnavailable says which
// library, provider or device is missing; kConfig names the setting that cannot be honoured.
Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out);

// Is the transport usable here? Opens nothing that another process could see.
Error probe(const std::string& transport, std::string* provider_name, std::string* library_name);

}  // namespace te::efa
