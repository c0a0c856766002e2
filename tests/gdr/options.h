// The stand-in's options: "key=value,key=value", one key for each member. See tests/gdr/standin.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace standin::gdr {

struct Options {
  uint64_t open = 0, pin = 0, map = 0, quiet = 0;
  int major = 2, minor = 5;
};

// false: an unknown key or a malformed value; what stands before it is set.
bool parse_options(std::string_view text, Options* options);

}  // namespace standin::gdr
