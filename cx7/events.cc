// Sleeping and asynchronous events. Completion events, those of the device and resolved addresses come over a descriptor each; an epoll
// instance makes one of them, which the engine can sleep on.
#include <fcntl.h>
#include <sys/epoll.h>

#include <cerrno>
#include <cstring>

#include "cx7/nic.h"
#include "native/system.h"

#ifdef TE_HAVE_VERBS
namespace te::cx7 {

Error Nic::open_sleep() {
  for (const int fd : {channel_->fd, context_->async_fd}) {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return fail("fcntl of an event descriptor", errno);
  }
  if (!options_.want_wait_fd) return {};
  wait_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (wait_fd_ < 0) return fail("epoll_create1", errno);
  for (const int fd : {channel_->fd, context_->async_fd, resolver_->fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(wait_fd_, EPOLL_CTL_ADD, fd, &event) != 0) return fail("epoll_ctl", errno);
  }
  return {};
}

void Nic::drain_channel() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (library_.get_cq_event(channel_.get(), &queue, &context) == 0) library_.ack_cq_events(queue, 1);
}

// Once notification is asked for, every later completion raises the descriptor; those before it are found by the look that follows.
bool Nic::arm() {
  if (entry_next_ < entry_count_ || !events_.empty() || !markers_due_.empty()) return false;
  drain_channel();
  take_async_events();
  if (ibv_req_notify_cq(completions_.get(), 0) != 0 || ibv_req_notify_cq(bootstrap_completions_.get(), 0) != 0)
    return false;
  entry_next_ = 0;
  const int count = ibv_poll_cq(completions_.get(), kBatch, entries_);
  entry_count_ = count > 0 ? static_cast<uint32_t>(count) : 0;
  if (entry_count_ == 0) ++empty_polls_;
  return poll_bootstrap() == 0 && entry_count_ == 0 && events_.empty();
}

// nullptr: all is well. What has failed for good stays so.
void Nic::set_state(const char* trouble) {
  if (fatal_) return;
  const bool was_up = up_.load(std::memory_order_relaxed);
  state_.store(trouble == nullptr ? "" : trouble, std::memory_order_relaxed);
  up_.store(trouble == nullptr, std::memory_order_relaxed);
  if (was_up == (trouble == nullptr)) return;
  Completion event;
  event.kind = trouble == nullptr ? CompletionKind::kNicUp : CompletionKind::kNicDown;
  events_.push_back(event);
}

// Connections that are there live on, but no new one can be made, and the address that peers have is that of this queue pair.
void Nic::bootstrap_failed() {
  set_state("its datagram queue pair failed: open the engine anew");
  fatal_ = true;
}

// The address under which peers know this NIC was given out at the start. If the port has another one now, they cannot reach it.
void Nic::check_address() {
  ibv_port_attr port{};
  ibv_gid gid{};
  if (library_.query_port(context_.get(), port_.number, reinterpret_cast<_compat_ibv_port_attr*>(&port)) != 0) return;
  if (port.state != IBV_PORT_ACTIVE) return set_state("port down");
  const bool same_gid = library_.query_gid(context_.get(), port_.number, port_.gid_index, &gid) == 0 &&
                        std::memcmp(gid.raw, own_.gid, sizeof gid.raw) == 0;
  set_state(!same_gid                                ? "the port's GID has changed: open the engine anew"
            : !own_.ethernet && port.lid != own_.lid ? "the port's LID has changed: open the engine anew"
                                                     : nullptr);
}

void Nic::take_async_events() {
  ibv_async_event event{};
  while (library_.get_async_event(context_.get(), &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        if (event.element.port_num == port_.number) set_state("port down");
        break;
      case IBV_EVENT_PORT_ACTIVE:
      case IBV_EVENT_GID_CHANGE:
      case IBV_EVENT_LID_CHANGE:
        if (event.element.port_num == port_.number) check_address();
        break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_SRQ_ERR:
        set_state(event.event_type == IBV_EVENT_DEVICE_FATAL ? "device lost" : "a queue of the device failed");
        fatal_ = true;
        switchboard_->fail_all();
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
      case IBV_EVENT_PATH_MIG_ERR: {
        const auto found = connection_by_pair_.find(event.element.qp->qp_num);
        const uint32_t connection = found == connection_by_pair_.end() ? kNone : found->second;
        if (event.element.qp == bootstrap_.get()) bootstrap_failed();
        library_.ack_async_event(&event);  // before the queue pair may be destroyed, which waits for it
        if (connection != kNone) switchboard_->fail(connection);
        continue;
      }
      case IBV_EVENT_QP_LAST_WQE_REACHED:
        for (const auto& queue : queues_)
          if (queue != nullptr && queue->pair.get() == event.element.qp) queue->receives_ended = true;
        break;
      case IBV_EVENT_COMM_EST:
        note_traffic(event.element.qp->qp_num);
        break;
      default:
        break;
    }
    library_.ack_async_event(&event);
  }
}

}  // namespace te::cx7
#endif
