#include "tests/cuda/options.h"

#include "native/gpu/gdr.h"
#include "tests/standins/text.h"

namespace standin::cuda {
namespace {

constexpr Key<Options, uint64_t> kNumbers[] = {{"devices", &Options::devices},
                                               {"version", &Options::version},
                                               {"init", &Options::init},
                                               {"dmabuf", &Options::dmabuf},
                                               {"flush", &Options::flush},
                                               {"memory", &Options::memory},
                                               {"offset", &Options::offset},
                                               {"copy_delay_us", &Options::copy_delay_us},
                                               {"copy_fail_after", &Options::copy_fail_after},
                                               {"host_alloc_fail", &Options::host_alloc_fail},
                                               {"hold", &Options::hold},
                                               {"quiet", &Options::quiet}};

bool parse_ordering(std::string_view text, int* ordering) {
  if (text == "none") return *ordering = te::gpu::kOrderingNone, true;
  if (text == "owner") return *ordering = te::gpu::kOrderingOwner, true;
  if (text == "all") return *ordering = te::gpu::kOrderingAll, true;
  return false;
}

}  // namespace

bool parse_options(std::string_view text, Options* options) {
  return each_pair(text,
                   [&](std::string_view key, std::string_view value) {
                     if (key == "ordering") return parse_ordering(value, &options->ordering);
                     for (const auto& each : kNumbers)
                       if (each.name == key) return parse_value(value, &(options->*each.member));
                     return false;
                   }) &&
         options->devices <= kMostDevices && options->offset % 512 == 0 && options->offset < te::gpu::kGpuPageBytes;
}

}  // namespace standin::cuda
