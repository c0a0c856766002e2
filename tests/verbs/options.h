// The stand-in's options: "key=value,key=value", one key for each member. See tests/verbs/standin.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace standin {

struct Options {
  uint64_t seed = 1, steps = 32, pieces = 4;
  uint64_t max_msg = 1 << 20, max_inline = 128, max_sge = 4, max_qp_wr = 8192, max_cqe = 65535, max_srq_wr = 16384,
           max_qp = 4096, max_mr = 65536, max_srq = 65536, max_rd_atom = 16, mtu = 4096;
  uint64_t retry_ticks = 1000, rnr_ticks = 64, idle_ticks = 200;
  uint64_t srq_shuffle = 1, dmabuf = 0, relaxed = 1, fast = 0, fast_imm = 0, quiet = 0, abort = 0;
  double ud_loss = 0, ud_dup = 0, ud_reorder = 0, ud_delay = 0;
  uint64_t ud_delay_ticks = 500;
  double post_partial = 0, srq_full = 0, ghosts = 0, late = 0;
  uint64_t late_ticks = 200;
};

// false: an unknown key or a malformed value; what stands before it is set.
bool parse_options(std::string_view text, Options* options);

}  // namespace standin
