// Is anybody still listening at a peer's TCP address? A process's sockets close together when it ends, so a refused connection there
// proves that the engine behind the address is gone. (No answer at all proves nothing: the peer may be stopped or cut off.)
#pragma once

#include <cstdint>

#include "native/provider.h"

namespace te::efa {

class ConnectProbe {
 public:
  ConnectProbe() = default;
  ~ConnectProbe() { close_socket(); }
  ConnectProbe(ConnectProbe&& other) noexcept { *this = static_cast<ConnectProbe&&>(other); }
  ConnectProbe& operator=(ConnectProbe&& other) noexcept;

  // Takes the probe one step further, without blocking. kProven once a connection was refused; between tries, what the last one said.
  Death ask(const te_nic_address& address, int64_t now_ns);

 private:
  void start(const te_nic_address& address);
  void finish();
  void close_socket();

  int socket_ = -1;
  bool refused_ = false;
  int64_t next_ns_ = 0;
  int64_t pause_ns_ = 100'000'000;  // doubles: each try costs a stopped peer a place in its backlog
};

}  // namespace te::efa
