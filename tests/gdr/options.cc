#include "tests/gdr/options.h"

#include "tests/standins/text.h"

namespace standin::gdr {
namespace {

constexpr Key<Options, uint64_t> kNumbers[] = {
    {"open", &Options::open}, {"pin", &Options::pin}, {"map", &Options::map}, {"quiet", &Options::quiet}};

bool parse_version(std::string_view text, Options* options) {
  const size_t point = text.find('.');
  return point != std::string_view::npos && parse_value(text.substr(0, point), &options->major) &&
         parse_value(text.substr(point + 1), &options->minor);
}

}  // namespace

bool parse_options(std::string_view text, Options* options) {
  return each_pair(text, [&](std::string_view key, std::string_view value) {
    if (key == "version") return parse_version(value, options);
    for (const auto& each : kNumbers)
      if (each.name == key) return parse_value(value, &(options->*each.member));
    return false;
  });
}

}  // namespace standin::gdr
