#include "efa/probe.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace te::efa {
namespace {

constexpr int64_t kLongestPause = 10'000'000'000;

}  // namespace

ConnectProbe& ConnectProbe::operator=(ConnectProbe&& other) noexcept {
  if (this == &other) return *this;
  close_socket();
  socket_ = std::exchange(other.socket_, -1);
  refused_ = other.refused_;
  next_ns_ = other.next_ns_;
  pause_ns_ = other.pause_ns_;
  return *this;
}

Death ConnectProbe::ask(const te_nic_address& address, int64_t now_ns) {
  if (refused_) return Death::kProven;
  if (socket_ >= 0) {
    finish();
  } else if (now_ns >= next_ns_) {
    next_ns_ = now_ns + pause_ns_;
    pause_ns_ = std::min(2 * pause_ns_, kLongestPause);
    start(address);
  }
  return refused_ ? Death::kProven : socket_ >= 0 ? Death::kAsking : Death::kNotProven;
}

void ConnectProbe::start(const te_nic_address& address) {
  sockaddr_storage to{};
  if (address.length < sizeof(sockaddr_in) || address.length > sizeof to) return;
  std::memcpy(&to, address.bytes, address.length);
  if (to.ss_family != AF_INET && to.ss_family != AF_INET6) return;
  socket_ = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) return;
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&to), address.length) == 0) return close_socket();
  if (errno == EINPROGRESS) return;
  refused_ = errno == ECONNREFUSED;
  close_socket();
}

void ConnectProbe::finish() {
  pollfd ready{socket_, POLLOUT, 0};
  if (poll(&ready, 1, 0) <= 0) return;
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &length) == 0) refused_ = error == ECONNREFUSED;
  close_socket();
}

void ConnectProbe::close_socket() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

}  // namespace te::efa
