// The bare libfabric loop that the engine is compared with: one endpoint, one region, one window, and nothing that a user of one-sided
// writes could do without. No checks, no credits, no threads: the floor of the provider on this machine.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tools/bench/support.h"

namespace bench {

class Bare {
 public:
  Bare(const char* provider, uint8_t* memory, uint64_t bytes, int control) : memory_(memory), control_(control) {
    fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->fabric_attr->prov_name = strdup(provider);
    const bool by_address = std::strstr(provider, "shm") == nullptr;
    // The same meaning of "completed" as the engine's: placed at the target where the provider can say so. shm cannot: asked for it,
    // libfabric 1.17's loses immediates.
    flags_ = by_address ? FI_COMPLETION | FI_DELIVERY_COMPLETE : FI_COMPLETION;
    check(fi_getinfo(FI_VERSION(1, 17), by_address ? "127.0.0.1" : nullptr, nullptr, by_address ? FI_SOURCE : 0, hints,
                     &info_),
          "fi_getinfo");
    fi_freeinfo(hints);
    check(fi_fabric(info_->fabric_attr, &fabric_, nullptr), "fi_fabric");
    check(fi_domain(fabric_, info_, &domain_, nullptr), "fi_domain");
    fi_av_attr av{};
    av.type = info_->domain_attr->av_type == FI_AV_UNSPEC ? FI_AV_TABLE : info_->domain_attr->av_type;
    check(fi_av_open(domain_, &av, &av_, nullptr), "fi_av_open");
    fi_cq_attr cq{};
    cq.format = FI_CQ_FORMAT_DATA;
    cq.size = 4096;
    check(fi_cq_open(domain_, &cq, &cq_, nullptr), "fi_cq_open");
    check(fi_endpoint(domain_, info_, &endpoint_, nullptr), "fi_endpoint");
    check(fi_ep_bind(endpoint_, &av_->fid, 0), "bind av");
    check(fi_ep_bind(endpoint_, &cq_->fid, FI_TRANSMIT | FI_RECV), "bind cq");
    check(fi_enable(endpoint_), "fi_enable");
    const uint64_t key = (info_->domain_attr->mr_mode & FI_MR_PROV_KEY) != 0 ? 0 : 7;
    check(fi_mr_reg(domain_, memory, bytes, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, key, 0, &region_,
                    nullptr),
          "fi_mr_reg");
    exchange();
  }

  // One write; with_immediate is what the peer counts. Waits only while the provider says "later".
  void write(uint64_t source, uint64_t target, uint64_t length, bool with_immediate) {
    void* context = &contexts_[posted_++ % kContexts];
    for (;;) {
      iovec local{memory_ + source, length};
      void* descriptor = fi_mr_desc(region_);
      fi_rma_iov remote{peer_base_ + target, length, peer_key_};
      fi_msg_rma message{&local, &descriptor, 1, peer_, &remote, 1, context, 1};
      const ssize_t status = fi_writemsg(endpoint_, &message, flags_ | (with_immediate ? FI_REMOTE_CQ_DATA : 0));
      if (status == 0) return;
      if (status != -FI_EAGAIN) check(static_cast<int>(status), "write");
      poll();
    }
  }

  void poll() {
    fi_cq_data_entry entries[16];
    const ssize_t got = fi_cq_read(cq_, entries, 16);
    if (got > 0) {
      idle_ = 0;
      for (ssize_t i = 0; i < got; ++i) {
        if ((entries[i].flags & FI_REMOTE_WRITE) != 0) ++arrived_;
        else ++completed_;
      }
    } else if (got == -FI_EAGAIN || got == 0) {
      if (++idle_ > 2000) {
        sched_yield();
        idle_ = 0;
      }
    } else {
      check(static_cast<int>(got), "fi_cq_read");
    }
  }

  void window(uint64_t depth) {
    while (posted_ - completed_ >= depth) poll();
  }
  void drain() { window(1); }
  void wait_arrived(uint64_t count) {
    while (arrived_ < count) poll();
  }
  uint64_t arrived() const { return arrived_; }

 private:
  static constexpr size_t kContexts = 512;
  struct Name {
    char address[256];
    uint64_t length, base, key;
  };

  static void check(int status, const char* what) {
    if (status >= 0) return;
    std::fprintf(stderr, "bare loop: %s: %s\n", what, fi_strerror(-status));
    std::_Exit(2);
  }

  void exchange() {
    Name mine{}, theirs{};
    mine.length = sizeof mine.address;
    check(fi_getname(&endpoint_->fid, mine.address, &mine.length), "fi_getname");
    mine.base = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(memory_) : 0;
    mine.key = fi_mr_key(region_);
    send_all(control_, &mine, sizeof mine);
    receive_all(control_, &theirs, sizeof theirs);
    if (fi_av_insert(av_, theirs.address, 1, &peer_, 0, nullptr) != 1) check(-FI_EINVAL, "fi_av_insert");
    peer_base_ = theirs.base;
    peer_key_ = theirs.key;
  }

  uint8_t* memory_;
  int control_;
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* av_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  fid_mr* region_ = nullptr;
  fi_addr_t peer_ = 0;
  uint64_t peer_base_ = 0, peer_key_ = 0;
  uint64_t posted_ = 0, completed_ = 0, arrived_ = 0;
  uint64_t flags_ = 0;
  int idle_ = 0;
  fi_context2 contexts_[kContexts] = {};
};

}  // namespace bench
