#include "tests/verbs/options.h"

#include "tests/standins/text.h"

namespace standin {
namespace {

constexpr Key<Options, uint64_t> kNumbers[] = {{"seed", &Options::seed},
                                               {"steps", &Options::steps},
                                               {"pieces", &Options::pieces},
                                               {"max_msg", &Options::max_msg},
                                               {"max_inline", &Options::max_inline},
                                               {"max_sge", &Options::max_sge},
                                               {"max_qp_wr", &Options::max_qp_wr},
                                               {"max_cqe", &Options::max_cqe},
                                               {"max_srq_wr", &Options::max_srq_wr},
                                               {"max_srq", &Options::max_srq},
                                               {"max_qp", &Options::max_qp},
                                               {"max_mr", &Options::max_mr},
                                               {"max_rd_atom", &Options::max_rd_atom},
                                               {"mtu", &Options::mtu},
                                               {"retry_ticks", &Options::retry_ticks},
                                               {"rnr_ticks", &Options::rnr_ticks},
                                               {"idle_ticks", &Options::idle_ticks},
                                               {"srq_shuffle", &Options::srq_shuffle},
                                               {"dmabuf", &Options::dmabuf},
                                               {"relaxed", &Options::relaxed},
                                               {"fast", &Options::fast},
                                               {"fast_imm", &Options::fast_imm},
                                               {"quiet", &Options::quiet},
                                               {"abort", &Options::abort},
                                               {"ud_delay_ticks", &Options::ud_delay_ticks},
                                               {"late_ticks", &Options::late_ticks}};
constexpr Key<Options, double> kProbabilities[] = {
    {"ud_loss", &Options::ud_loss},       {"ud_dup", &Options::ud_dup}, {"ud_delay", &Options::ud_delay},
    {"ud_reorder", &Options::ud_reorder}, {"ghosts", &Options::ghosts}, {"post_partial", &Options::post_partial},
    {"srq_full", &Options::srq_full},     {"late", &Options::late}};

}  // namespace

bool parse_options(std::string_view text, Options* options) {
  return parse_pairs(text, options, kNumbers, kProbabilities);
}

}  // namespace standin
