// Status and Error: how the core says what went wrong. Set-up fills an Error where the failure is first understood;
// the data path passes Status values and numbers and lets the caller's thread build the text.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <string>
#include <utility>

#include "native/te.h"

namespace te {

enum class Status : int32_t {
  kOk = TE_OK,
  kAgain = TE_AGAIN,
  kArgument = TE_ERR_ARGUMENT,
  kRange = TE_ERR_RANGE,
  kConfig = TE_ERR_CONFIG,
  kTransportUnavailable = TE_ERR_TRANSPORT_UNAVAILABLE,
  kRegistration = TE_ERR_REGISTRATION,
  kPeerUnreachable = TE_ERR_PEER_UNREACHABLE,
  kPeerLost = TE_ERR_PEER_LOST,
  kPeerRestarted = TE_ERR_PEER_RESTARTED,
  kRemoteAccess = TE_ERR_REMOTE_ACCESS,
  kRegionClosed = TE_ERR_REGION_CLOSED,
  kTimeout = TE_ERR_TIMEOUT,
  kCancelled = TE_ERR_CANCELLED,
  kTransport = TE_ERR_TRANSPORT,
  kClosed = TE_ERR_CLOSED,
  kForked = TE_ERR_FORKED,
  kExhausted = TE_ERR_EXHAUSTED,
  kDescriptor = TE_ERR_DESCRIPTOR,
  kStale = TE_ERR_STALE,
  kUnsupported = -100,  // inside the core only
};

const char* status_name(Status status);

// Empty (ok) or a reason. Cheap to return when ok.
class [[nodiscard]] Error {
 public:
  Error() = default;
  Error(Status status, std::string message, int provider_status = 0, int nic = -1)
      : status_(status), provider_status_(provider_status), nic_(nic), message_(std::move(message)) {}

  bool ok() const { return status_ == Status::kOk; }
  explicit operator bool() const { return !ok(); }  // `if (Error e = f()) return e;`
  Status status() const { return status_; }
  int provider_status() const { return provider_status_; }
  int nic() const { return nic_; }
  int peer() const { return peer_; }
  Error&& about_peer(int peer) && {
    peer_ = peer;
    return std::move(*this);
  }
  const std::string& message() const { return message_; }

 private:
  Status status_ = Status::kOk;
  int provider_status_ = 0;
  int nic_ = -1;
  int peer_ = -1;
  std::string message_;
};

// printf into a std::string; the compiler checks the arguments.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

// Copies an Error into the C struct; a null `out` is allowed. Returns the status.
int32_t export_error(const Error& error, te_error* out);

}  // namespace te
