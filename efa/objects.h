// The libfabric objects of one NIC, and what happens to those of shm when a NIC closes.
#pragma once

#include "efa/library.h"

#ifdef TE_HAVE_LIBFABRIC
#include <string>
#include <unordered_map>

namespace te::efa {

// Closed from the bottom up: the endpoint first, then what it was bound to. Whatever is in flight ends with it.
struct Objects {
  FidPtr<fid_fabric> fabric;
  FidPtr<fid_domain> domain;
  std::unordered_map<fid_mr*, FidPtr<fid_mr>> memory;  // so that regions left open do not keep the domain open
  FidPtr<fid_av> addresses;
  FidPtr<fid_cq> queue;
  FidPtr<fid_ep> endpoint;
};

// libfabric's shm maps an endpoint once per process, and closing it takes that mapping away from under every other
// endpoint of the process that has met it: its next poll or post ends in SIGSEGV (1.17, measured). So the objects of a
// closed shm NIC are kept until no live NIC of this process is related to it, that is, has opened a path to it or was
// the target of one. What lingers is its segment: 16 MiB of address space, of which little was ever touched.
namespace local_endpoints {

void add(const std::string& name);
void relate(const std::string& one, const std::string& other);  // names that are not of this process are ignored
void close(const std::string& name, Objects objects);
// Was it an endpoint of this process that has closed? libfabric still finds such a name in a list of its own, and follows a pointer
// that dangles: inserting it as an address ends in SIGSEGV (1.17, measured).
bool ended(const std::string& name);

}  // namespace local_endpoints

}  // namespace te::efa
#endif
