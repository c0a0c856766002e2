// Which of libfabric's providers serves a transport, and with what it is asked for.
#pragma once

#include "efa/library.h"

#ifdef TE_HAVE_LIBFABRIC
#include <vector>

#include "native/provider.h"

namespace te::efa {

enum class Kind : uint8_t { kTcp, kShm, kEfa };

Error parse_kind(const std::string& transport, Kind* out);

// What one NIC is opened with.
struct Selected {
  InfoPtr info;
  std::string nic;        // name to show
  std::string node;       // shm: the endpoint's name; tcp: the numeric address
  bool emulated = false;  // efa: writes may be emulated in software (libfabric's `efa` fabric): check before use
};

// One entry per NIC. `ports`: the tcp service is left open (nic.cc walks the port range).
Error select_nics(const Library& library, Kind kind, const ProviderOptions& options, std::vector<Selected>* out);

// The same provider for one numeric address and port; `port` 0 lets the kernel choose.
Error select_tcp(const Library& library, const std::string& address, uint16_t port, InfoPtr* out);

}  // namespace te::efa
#endif
