#include "tests/verbs/options.h"

#include <charconv>

namespace standin {
namespace {

struct Number {
  std::string_view key;
  uint64_t Options::* member;
};
struct Probability {
  std::string_view key;
  double Options::* member;
};

constexpr Number kNumbers[] = {{"seed", &Options::seed},
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
constexpr Probability kProbabilities[] = {{"ud_loss", &Options::ud_loss},   {"ud_dup", &Options::ud_dup},
                                          {"ud_delay", &Options::ud_delay}, {"ud_reorder", &Options::ud_reorder},
                                          {"ghosts", &Options::ghosts},     {"post_partial", &Options::post_partial},
                                          {"srq_full", &Options::srq_full}, {"late", &Options::late}};

template <typename Value>
bool parse(std::string_view text, Value* value) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return code == std::errc() && end == text.data() + text.size();
}

bool set(std::string_view key, std::string_view value, Options* options) {
  for (const Number& each : kNumbers)
    if (each.key == key) return parse(value, &(options->*each.member));
  for (const Probability& each : kProbabilities)
    if (each.key == key) return parse(value, &(options->*each.member));
  return false;
}

}  // namespace

bool parse_options(std::string_view text, Options* options) {
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view pair = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const size_t equals = pair.find('=');
    if (equals == std::string_view::npos || !set(pair.substr(0, equals), pair.substr(equals + 1), options))
      return false;
  }
  return true;
}

}  // namespace standin
