// Sleeping and asynchronous events. Completion events and those of the device come over two descriptors; an epoll instance makes one
// of them, which the engine can sleep on.
#include <fcntl.h>
#include <sys/epoll.h>

#include <cerrno>

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
  for (const int fd : {channel_->fd, context_->async_fd}) {
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
  return poll_bootstrap() == 0 && entry_count_ == 0 && events_.empty();
}

void Nic::take_async_events() {
  ibv_async_event event{};
  while (library_.get_async_event(context_.get(), &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        if (event.element.port_num == port_.number) up_.store(false, std::memory_order_relaxed);
        break;
      case IBV_EVENT_PORT_ACTIVE:
        if (event.element.port_num == port_.number) up_.store(true, std::memory_order_relaxed);
        break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_SRQ_ERR:
        fatal_ = true;
        up_.store(false, std::memory_order_relaxed);
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
      case IBV_EVENT_PATH_MIG_ERR: {
        const auto found = connection_by_pair_.find(event.element.qp->qp_num);
        const uint32_t connection = found == connection_by_pair_.end() ? kNone : found->second;
        library_.ack_async_event(&event);  // before the queue pair may be destroyed, which waits for it
        if (connection != kNone) switchboard_->fail(connection);
        continue;
      }
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
