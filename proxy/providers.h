// Which providers exist. The only place above them that knows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/provider.h"

namespace te {

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out);
// Whether a transport can be opened here, and by what.
Error probe_transport(const std::string& transport, std::string* provider_name, std::string* library_name);
// The RDMA ports below `root` ("": this machine), as the transport for them sees them.
std::vector<te_rdma_port> list_rdma_ports(const std::string& root, const te_rdma_settings& settings);

}  // namespace te
