#include "tests/fabric/options.h"

#include "tests/standins/text.h"

namespace srd {
namespace {

constexpr standin::Key<Options, uint64_t> kNumbers[] = {
    {"devices", &Options::devices},
    {"seed", &Options::seed},
    {"steps", &Options::steps},
    {"pieces", &Options::pieces},
    {"reorder", &Options::reorder},
    {"direct", &Options::direct},
    {"unsolicited", &Options::unsolicited},
    {"wait_fd", &Options::wait_fd},
    {"hmem", &Options::hmem},
    {"emulated", &Options::emulated},
    {"max_rma", &Options::max_rma},
    {"max_msg", &Options::max_msg},
    {"tx_size", &Options::tx_size},
    {"rx_size", &Options::rx_size},
    {"max_cq", &Options::max_cq},
    {"retry_ticks", &Options::retry_ticks},
    {"retries", &Options::retries},
    {"rnr_ticks", &Options::rnr_ticks},
    {"rnr_retries", &Options::rnr_retries},
    {"error_every", &Options::error_every},
    {"error_status", &Options::error_status},
    {"free", &Options::free},
    {"quiet", &Options::quiet},
    {"abort", &Options::abort},
};
constexpr standin::Key<Options, double> kProbabilities[] = {
    {"eagain", &Options::eagain}, {"ghosts", &Options::ghosts}, {"stale", &Options::stale}};

}  // namespace

bool parse_options(std::string_view text, Options* options) {
  return standin::parse_pairs(text, options, kNumbers, kProbabilities);
}

}  // namespace srd
