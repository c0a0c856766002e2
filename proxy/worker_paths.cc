// Paths that come, break and are mended: providers whose paths are connections (Capabilities::connected_paths) say when one is there and
// when it has failed.
//
// The peer is lost with the path that carries the control messages, or with its only one. Any other path that breaks takes its
// own work requests with it (their transfers fail, named by the NIC), and nothing else: new work is dealt to the NICs that are
// left, and so is queued work of which nothing has been posted. What was begun is not moved: bytes over one NIC and the
// immediate that announces them over another have no order. The path is made anew until it is up again.
#include <algorithm>
#include <bit>
#include <cstdio>

#include "proxy/worker.h"

namespace te {
namespace {

constexpr uint32_t kControlNic = 0;
constexpr uint32_t kMostReopened = 8;  // while connecting
constexpr int64_t kFirstMend = 100'000'000, kLongestMend = 5'000'000'000;

}  // namespace

PathId* Worker::path_slot(Session& s, uint32_t nic, PathId path, uint32_t* remote_nic) {
  *remote_nic = TE_MAX_NICS;
  if (!s.paths_open) return nullptr;
  if (s.paths[nic] == path) return &s.paths[nic];
  for (Session::ExtraPath& extra : s.extra_paths) {
    if (extra.nic != nic || extra.path != path) continue;
    *remote_nic = extra.remote_nic;
    return &extra.path;
  }
  return nullptr;
}

void Worker::path_changed(uint32_t nic, const Completion& c) {
  for (Peer* peer = known_.front(); peer != nullptr; peer = known_.next(peer)) {
    uint32_t remote_nic = 0;
    PathId* slot = path_slot(peer->session, nic, c.path, &remote_nic);
    if (slot == nullptr) continue;
    if (c.kind == CompletionKind::kPathUp) return path_up(*peer, nic, remote_nic);
    return path_down(*peer, nic, remote_nic, slot, c);
  }
}

// remote_nic: TE_MAX_NICS for the path of the pair.
void Worker::path_up(Peer& peer, uint32_t nic, uint32_t remote_nic) {
  Session& s = peer.session;
  const bool extra = remote_nic != TE_MAX_NICS;
  const auto mended = std::find_if(s.broken.begin(), s.broken.end(), [&](const Session::Broken& broken) {
    return broken.nic == nic && broken.extra == extra && (!extra || broken.remote_nic == remote_nic);
  });
  if (mended == s.broken.end()) {
    if (s.paths_coming > 0 && --s.paths_coming == 0) s.hello_at = now_;
    return;
  }
  s.broken.erase(mended);
  if (!extra) s.paths_down &= ~(1u << nic);
  ++peer.epoch;
  if (!peer.ready.empty()) schedule(peer);
}

void Worker::path_down(Peer& peer, uint32_t nic, uint32_t remote_nic, PathId* slot, const Completion& c) {
  Session& s = peer.session;
  bump(nics_[nic].statistics.errors);
  const bool connecting = peer.state.load(std::memory_order_relaxed) == TE_PEER_CONNECTING;
  const bool extra = remote_nic != TE_MAX_NICS;
  const uint32_t theirs = extra ? remote_nic : paired_nic(nic, peer.address.nic_count);
  const char* why = c.detail == nullptr ? "the connection failed" : c.detail;
  // The other side may be giving up an older connection at the very moment in which we make a new one.
  if (connecting && c.status == Status::kPeerLost && s.paths_reopened < kMostReopened) {
    ++s.paths_reopened;
    provider_.close_path(nic, *slot);
    *slot = kNoPath;
    const Error error = provider_.open_path(nic, peer.address.nics[theirs], peer.address.generation, slot);
    if (!error) return;  // as before: it is coming
    return lose(peer, Status::kPeerUnreachable, error.message().c_str());
  }
  const bool spared = !connecting && c.status != Status::kPeerRestarted && (extra || nic != kControlNic) &&
                      !s.their_bye && !s.saying_bye;
  if (!spared) {
    if (c.status == Status::kPeerRestarted) peer.fate.store(Fate::kRestarted, std::memory_order_relaxed);
    const Status status = connecting && c.status == Status::kPeerLost ? Status::kPeerUnreachable : c.status;
    char text[320];
    std::snprintf(text, sizeof text, "NIC %u: %s", nic, why);
    return lose(peer, !connecting && status == Status::kPeerUnreachable ? Status::kPeerLost : status, text);
  }
  provider_.close_path(nic, *slot);
  *slot = kNoPath;
  if (!extra) s.paths_down |= 1u << nic;
  ++peer.epoch;
  const auto known = std::find_if(s.broken.begin(), s.broken.end(), [&](const Session::Broken& broken) {
    return broken.nic == nic && broken.extra == extra && broken.remote_nic == theirs;
  });
  if (known == s.broken.end()) s.broken.push_back({nic, theirs, extra, now_ + kFirstMend, kFirstMend});
  else known->retry_at = now_ + known->wait;
  if (!peer.ready.empty()) schedule(peer);
}

// On the clock.
void Worker::mend_paths(Peer& peer) {
  Session& s = peer.session;
  for (Session::Broken& broken : s.broken) {
    PathId* slot = &s.paths[broken.nic];
    for (Session::ExtraPath& extra : s.extra_paths)
      if (broken.extra && extra.nic == broken.nic && extra.remote_nic == broken.remote_nic) slot = &extra.path;
    if (*slot != kNoPath || now_ < broken.retry_at) continue;
    broken.wait = std::min(2 * broken.wait, kLongestMend);
    broken.retry_at = now_ + broken.wait;
    if (provider_.open_path(broken.nic, peer.address.nics[broken.remote_nic], peer.address.generation, slot))
      *slot = kNoPath;
  }
}

void Worker::nic_changed(uint32_t nic, bool up) {
  if (up) nics_up_ |= 1u << nic;
  else nics_up_ &= ~(1u << nic);
  if (!up) bump(nics_[nic].statistics.errors);
  for (Peer* peer = known_.front(); peer != nullptr; peer = known_.next(peer)) ++peer->epoch;
}

// The NICs over which work towards the peer is dealt out.
uint32_t Worker::usable_nics(const Peer& peer) const {
  const uint32_t connected = all_nics_ & ~peer.session.paths_down;
  return (connected & nics_up_) != 0 ? connected & nics_up_ : connected != 0 ? connected : all_nics_;
}

// A part whose NIC has no path any more. False: some of it was posted.
bool Worker::reroute(Peer& peer, Operation& op, Part& part) {
  const uint32_t usable = usable_nics(peer);
  if (part.next != 0 || op.phase == Phase::kFlush || (usable >> part.nic & 1) != 0) return false;
  peer.next_nic = (peer.next_nic + 1) % nic_count_;
  for (uint32_t i = 0; i < nic_count_; ++i) {
    const uint32_t nic = (peer.next_nic + i) % nic_count_;
    if ((usable >> nic & 1) == 0) continue;
    part.nic = static_cast<uint8_t>(nic);
    return true;
  }
  return false;
}

}  // namespace te
