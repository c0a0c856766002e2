// The library as a whole: its start, and what tests ask of the stand-in itself (tests/gdr/standin.h).
#include "tests/gdr/library.h"

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "tests/gdr/standin.h"

namespace standin::gdr {

Library& Library::get() {
  static Library* const library = new Library;
  return *library;
}

Library::Library() {
  const char* text = std::getenv("TE_STANDIN_GDRAPI");
  if (text != nullptr && !parse_options(text, &initial)) {
    std::fprintf(stderr, "standin_gdrapi: TE_STANDIN_GDRAPI=\"%s\" is not understood; see tests/gdr/standin.h\n", text);
    std::abort();
  }
  options = initial;
}

void Library::violation(const char* format, ...) {
  ++violations;
  if (options.quiet != 0) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "standin_gdrapi: %s\n", text);
}

}  // namespace standin::gdr

using standin::gdr::Library;

extern "C" {

int standin_gdrapi_configure(const char* text) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  standin::gdr::Options wanted = library.initial;
  if (text == nullptr || !parse_options(text, &wanted)) return EINVAL;
  library.options = wanted;
  return 0;
}

uint64_t standin_gdrapi_statistic(const char* name) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  const std::string_view wanted = name == nullptr ? "" : name;
  const auto mapped = [](const auto& each) { return each.second.mapped_bytes != 0; };
  if (wanted == "opened") return library.opened.size();
  if (wanted == "pinned") return library.pinned.size();
  if (wanted == "mapped")
    return static_cast<uint64_t>(std::count_if(library.pinned.begin(), library.pinned.end(), mapped));
  if (wanted == "pins") return library.pins;
  if (wanted == "maps") return library.maps;
  if (wanted == "violations") return library.violations;
  return UINT64_MAX;
}

}  // extern "C"
