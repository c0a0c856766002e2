// The stand-ins for CUDA's driver and GDRCopy's library, loaded as the product loads the real ones.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "native/gpu/cuda.h"

namespace te::test {

// Sets a variable of the environment, and puts back what was there.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    if (had_) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (had_) setenv(name_, before_.c_str(), 1);
    else unsetenv(name_);
  }
  Variable(const Variable&) = delete;

 private:
  const char* const name_;
  std::string before_;
  bool had_ = false;
};

// The stand-in's options for as long as this lives. It checks that no object is left and no rule was broken but as expected.
class CudaStandin {
 public:
  explicit CudaStandin(const std::string& options = "") {
    configure(options);
    for (size_t i = 0; i < std::size(kCounted); ++i) counted_[i] = statistic(kCounted[i]);
    violations_ = statistic("violations");
  }
  ~CudaStandin() {
    for (size_t i = 0; i < std::size(kCounted); ++i) {
      CAPTURE(kCounted[i]);
      CHECK(statistic(kCounted[i]) == counted_[i]);
    }
    CHECK(statistic("violations") == violations_);
    symbol<void()>("standin_cuda_clear_errors")();
    configure("");
  }
  CudaStandin(const CudaStandin&) = delete;

  static std::string folder() {
    char path[PATH_MAX] = "";
    static_cast<void>(!readlink("/proc/self/exe", path, sizeof path - 1));
    return std::string(path).substr(0, std::string(path).rfind('/') + 1);
  }
  static std::string path() { return folder() + "libstandin_cuda.so"; }
  // A name of the library that has not been loaded yet: the loader remembers what it has loaded by its name.
  static std::string new_path() {
    static std::string dots;
    return folder() + (dots += "./") + "libstandin_cuda.so";
  }
  template <typename Function>
  static Function* symbol(const char* name) {
    static void* const library = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    auto* found = reinterpret_cast<Function*>(dlsym(library, name));
    REQUIRE((found != nullptr));
    return found;
  }

  void configure(const std::string& options) const {
    CAPTURE(options);
    REQUIRE(symbol<int(const char*)>("standin_cuda_configure")(options.c_str()) == 0);
  }
  uint64_t statistic(const char* name) const {
    const uint64_t value = symbol<uint64_t(const char*)>("standin_cuda_statistic")(name);
    REQUIRE(value != UINT64_MAX);
    return value;
  }
  // There was one more; it is expected.
  bool violated() {
    const bool one = statistic("violations") == violations_ + 1;
    violations_ = statistic("violations");
    return one;
  }
  // The driver, as the product loads it, with the options as they are now.
  const gpu::Cuda& load() const {
    const Variable variable("TE_LIBCUDA", new_path());
    const gpu::Cuda* cuda = nullptr;
    const Error error = gpu::load_cuda(&cuda);
    CAPTURE(error.message());
    REQUIRE(cuda != nullptr);
    return *cuda;
  }
  bool read(uint64_t at, void* out, size_t bytes) const {
    return symbol<int(uint64_t, void*, size_t)>("standin_cuda_read")(at, out, bytes) == 0;
  }
  bool write(uint64_t at, const void* from, size_t bytes) const {
    return symbol<int(uint64_t, const void*, size_t)>("standin_cuda_write")(at, from, bytes) == 0;
  }
  uint8_t* view(uint64_t at) const { return static_cast<uint8_t*>(symbol<void*(uint64_t)>("standin_cuda_view")(at)); }
  uint64_t allocate_managed(size_t bytes) const {
    return symbol<uint64_t(size_t)>("standin_cuda_allocate_managed")(bytes);
  }
  void clear_errors() const { symbol<void()>("standin_cuda_clear_errors")(); }

 private:
  static constexpr const char* kCounted[] = {"allocations", "host_allocations", "streams", "events"};
  uint64_t counted_[std::size(kCounted)] = {}, violations_ = 0;
};

// A device's primary context, current in this thread, and released at the end.
class CudaContext {
 public:
  explicit CudaContext(const gpu::Cuda& cuda, int device = 0) : cuda_(cuda), device_(device) {
    REQUIRE(cuda.primary_retain(&handle, device) == gpu::result::kSuccess);
    REQUIRE(cuda.push(handle) == gpu::result::kSuccess);
  }
  ~CudaContext() {
    gpu::CuContext popped = nullptr;
    CHECK(cuda_.pop(&popped) == gpu::result::kSuccess);
    CHECK(popped == handle);
    CHECK(cuda_.primary_release(device_) == gpu::result::kSuccess);
  }
  CudaContext(const CudaContext&) = delete;

  gpu::CuContext handle = nullptr;

 private:
  const gpu::Cuda& cuda_;
  const int device_;
};

// One device with its context current, a stream, an event and memory of both kinds. at_end: what giving them back answers.
struct CudaRig {
  explicit CudaRig(const std::string& options = "", size_t length = 64 << 10) : standin(options), bytes(length) {
    REQUIRE(cuda.allocate(&device, bytes) == gpu::result::kSuccess);
    REQUIRE(cuda.host_allocate(&memory, bytes, gpu::kHostPortable | gpu::kHostDeviceMap) == gpu::result::kSuccess);
    REQUIRE(cuda.stream_create(&stream, gpu::kStreamNonBlocking) == gpu::result::kSuccess);
    REQUIRE(cuda.event_create(&event, gpu::kEventDisableTiming) == gpu::result::kSuccess);
    host = static_cast<uint8_t*>(memory);
    std::memset(host, 0, bytes);
  }
  ~CudaRig() {
    for (const gpu::CuResult code :
         {cuda.event_destroy(event), cuda.stream_destroy(stream), cuda.free(device), cuda.host_free(memory)})
      CHECK(code == at_end);
  }

  CudaStandin standin;
  const gpu::Cuda& cuda = standin.load();
  const CudaContext context{cuda};
  const size_t bytes;
  gpu::CuPointer device = 0;
  void* memory = nullptr;
  uint8_t* host = nullptr;
  gpu::CuStream stream = nullptr;
  gpu::CuEvent event = nullptr;
  gpu::CuResult at_end = gpu::result::kSuccess;
};

// Asks until the event is ready, or an error.
inline gpu::CuResult await(const gpu::Cuda& cuda, gpu::CuEvent event) {
  for (;;) {
    const gpu::CuResult code = cuda.event_query(event);
    if (code != gpu::result::kNotReady) return code;
    std::this_thread::yield();
  }
}

}  // namespace te::test
