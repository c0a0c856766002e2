// Which providers exist. The only place above them that knows.
#pragma once

#include <memory>
#include <string>

#include "native/provider.h"

namespace te {

Error open_provider(const ProviderOptions& options, std::unique_ptr<Provider>* out);
// Whether a transport can be opened here, and by what.
Error probe_transport(const std::string& transport, std::string* provider_name, std::string* library_name);

}  // namespace te
