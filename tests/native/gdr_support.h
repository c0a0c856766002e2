// The stand-in for GDRCopy's library beside that for CUDA's driver.
#pragma once

#include <atomic>
#include <memory>

#include "native/gpu/gdr.h"
#include "native/gpu/words.h"
#include "tests/native/cuda_support.h"

namespace te::test {

// The stand-in's options for as long as this lives. It checks that no object is left and no rule was broken but as expected.
class GdrStandin {
 public:
  explicit GdrStandin(const std::string& options = "") {
    configure(options);
    for (size_t i = 0; i < std::size(kCounted); ++i) counted_[i] = statistic(kCounted[i]);
    violations_ = statistic("violations");
  }
  ~GdrStandin() {
    for (size_t i = 0; i < std::size(kCounted); ++i) {
      CAPTURE(kCounted[i]);
      CHECK(statistic(kCounted[i]) == counted_[i]);
    }
    CHECK(statistic("violations") == violations_);
    configure("");
  }
  GdrStandin(const GdrStandin&) = delete;

  static std::string path() { return CudaStandin::folder() + "libstandin_gdrapi.so"; }
  // A name that has not been loaded yet, as for the driver's.
  static std::string new_path() {
    static std::string dots;
    return CudaStandin::folder() + (dots += "./") + "libstandin_gdrapi.so";
  }
  template <typename Function>
  static Function bind(const char* name) {
    static void* const library = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    const auto found = reinterpret_cast<Function>(dlsym(library, name));
    REQUIRE((found != nullptr));
    return found;
  }
  static uint64_t statistic(const char* name) {
    return bind<uint64_t (*)(const char*)>("standin_gdrapi_statistic")(name);
  }
  static int try_configure(const std::string& options) {
    return bind<int (*)(const char*)>("standin_gdrapi_configure")(options.c_str());
  }
  static void configure(const std::string& options) { REQUIRE(try_configure(options) == 0); }
  bool violated() {
    const bool one = statistic("violations") == violations_ + 1;
    violations_ = statistic("violations");
    return one;
  }

 private:
  static constexpr const char* kCounted[] = {"opened", "pinned", "mapped"};
  uint64_t counted_[std::size(kCounted)] = {}, violations_ = 0;
};

// Both, as the product finds them: what it loads within this scope is loaded anew.
struct GpuStandins {
  explicit GpuStandins(const std::string& cuda_options = "", const std::string& gdr_options = "")
      : standin(cuda_options), gdr(gdr_options) {
    const Error error = gpu::load_cuda(&cuda);
    REQUIRE_MESSAGE(error.ok(), error.message());
  }

  // The word at a device's address, as the device would load it.
  uint64_t seen(uint64_t at) const {
    uint8_t* view = standin.view(at);
    auto* word = reinterpret_cast<std::atomic<uint64_t>*>(view != nullptr ? reinterpret_cast<uint64_t>(view) : at);
    return word->load(std::memory_order_acquire);
  }
  // As the device would raise it.
  void raise(uint64_t at, uint64_t by = 1) const {
    uint8_t* view = standin.view(at);
    auto* word = reinterpret_cast<std::atomic<uint64_t>*>(view != nullptr ? reinterpret_cast<uint64_t>(view) : at);
    word->fetch_add(by, std::memory_order_release);
  }

  CudaStandin standin;
  GdrStandin gdr;
  const Variable cuda_library{"TE_LIBCUDA", CudaStandin::new_path()};
  const Variable gdr_library{"TE_LIBGDRAPI", GdrStandin::new_path()};
  const gpu::Cuda* cuda = nullptr;
};

// What words cost to read, by their kind, for as long as this lives.
class ReadCosts {
 public:
  ReadCosts(double mapped, double gdr) {
    mapped_ = mapped;
    gdr_ = gdr;
    gpu::read_cost.store([](const gpu::Word& word) { return word.kind == gpu::WordKind::kGdr ? gdr_ : mapped_; });
  }
  ~ReadCosts() { gpu::read_cost.store(&gpu::read_cost_ns); }
  ReadCosts(const ReadCosts&) = delete;

 private:
  static inline double mapped_ = 0, gdr_ = 0;
};

}  // namespace te::test
