// libfabric, loaded at run time: nothing here is linked, so the package imports on machines without it. Everything else
// of libfabric's API is inline and goes through the tables of the objects that these functions return.
#pragma once

#if __has_include(<rdma/fabric.h>)
#define TE_HAVE_LIBFABRIC 1
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <csignal>
#include <memory>
#include <string>

#include "native/status.h"

namespace te::efa {

struct Library {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  uint32_t version = 0;  // FI_VERSION(major, minor) of the library
  std::string name;      // "libfabric 1.17.0"

  // "Connection refused (111)" for a code of either sign.
  std::string describe(int64_t code) const;
};

// Loads the library that TE_LIBFABRIC names at the first call that sees this name; later ones return the same object,
// which is never unloaded. A failure is not remembered: the library may be installed while the process runs.
Error load_library(const Library** out);

// libfabric's shm provider takes over SIGBUS, SIGSEGV, SIGTERM and SIGINT to unlink its files (and then forgets the
// signal where the disposition was the default: SIGTERM no longer ends the process). A library must not do that to its
// host, so every call that may install handlers runs under this guard, which puts the old ones back; what a killed
// process leaves in /dev/shm is swept by the next one to open (doorbell.h).
class SignalGuard {
 public:
  SignalGuard();
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  static constexpr int kSignals[] = {SIGBUS, SIGSEGV, SIGTERM, SIGINT};
  struct sigaction saved_[4];
};

struct FreeInfo {
  const Library* library = nullptr;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, FreeInfo>;

// Owns any libfabric object. Members are declared in the order of creation, so that they close in the reverse order.
template <typename Object>
struct CloseFid {
  void operator()(Object* object) const { fi_close(&object->fid); }
};
template <typename Object>
using FidPtr = std::unique_ptr<Object, CloseFid<Object>>;

}  // namespace te::efa
#endif
