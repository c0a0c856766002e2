// The transport over libibverbs: reliable connections, bootstrapped over unreliable datagrams.
#pragma once

#include <memory>
#include <string>

#include "native/provider.h"

namespace te::cx7 {

// kTransportUnavailable names what is missing: libibverbs, a device, an active port, the rights to open it.
Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out);

// The same question without opening anything for good.
Error probe(std::string* provider_name, std::string* library_name);

// Below which sysfs is read: "" or, for tests, what TE_RDMA_ROOT says.
std::string sysfs_root();

}  // namespace te::cx7
