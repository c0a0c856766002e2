#include "native/status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace te {

const char* status_name(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kAgain:
      return "again";
    case Status::kArgument:
      return "argument";
    case Status::kRange:
      return "range";
    case Status::kConfig:
      return "config";
    case Status::kTransportUnavailable:
      return "transport unavailable";
    case Status::kRegistration:
      return "registration";
    case Status::kPeerUnreachable:
      return "peer unreachable";
    case Status::kPeerLost:
      return "peer lost";
    case Status::kPeerRestarted:
      return "peer restarted";
    case Status::kRemoteAccess:
      return "remote access";
    case Status::kRegionClosed:
      return "region closed";
    case Status::kTimeout:
      return "timeout";
    case Status::kCancelled:
      return "cancelled";
    case Status::kTransport:
      return "transport";
    case Status::kClosed:
      return "closed";
    case Status::kForked:
      return "forked";
    case Status::kExhausted:
      return "exhausted";
    case Status::kStale:
      return "stale handle";
    case Status::kDescriptor:
      return "descriptor";
    case Status::kUnsupported:
      return "unsupported";
  }
  return "unknown";
}

std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  const int length = std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return std::string(text, static_cast<size_t>(std::clamp(length, 0, static_cast<int>(sizeof text) - 1)));
}

int32_t export_error(const Error& error, te_error* out) {
  const auto status = static_cast<int32_t>(error.status());
  if (out == nullptr) return status;
  *out = te_error{};
  out->status = status;
  out->nic = error.nic();
  out->provider_status = error.provider_status();
  out->peer = error.peer();
  const size_t length = std::min(error.message().size(), sizeof out->message - 1);
  std::memcpy(out->message, error.message().data(), length);
  return status;
}

}  // namespace te
