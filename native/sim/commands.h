// Faults injected at run time, from any thread: Provider::inject. Numbers are decimal.
//
//   nic_down N, nic_up N         operations of NIC N fail with kTransport, and so do peers' towards it
//   kill                         the process is gone: nothing it posted lands; its peers' operations never end
//   kill_loud                    likewise, but they end with kPeerLost
//   partition ID, heal [ID]      silence between this engine and the one with this identity (32 hex digits); operations
//                                wait and go on after heal, as if retransmitted. heal without ID: with everyone
//   pause, resume                what this engine posts does not land; it waits
//   error_next N [FATE]          the next N writes fail. FATE: clean, unknown, partial, landed, late (see Fate);
//                                absent: by chance
//   fail_after N [FATE]          N writes leave first, then one fails
//   flip_next [N]                N (1) landing pieces of writes get one bit flipped
//   register_fail N              the next N registrations fail
//   stats                        ok, with "name=value name=value ..." (struct Counts) as message
#pragma once

#include <string_view>

#include "native/sim/fabric.h"
#include "native/sim/host.h"

namespace te::sim {

// With the fabric's mutex held. kArgument: an unknown or malformed command.
Error run_command(Fabric& fabric, Host& host, std::string_view command);

}  // namespace te::sim
