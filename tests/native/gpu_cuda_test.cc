// CUDA's driver as it is loaded at run time: why it cannot be, what is kept of it, contexts and texts of errors.
#include "native/gpu/cuda.h"
#include "tests/native/cuda_support.h"

namespace te::test {
namespace {

using namespace te::gpu;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Error failure(const std::string& file) {
  const Variable variable("TE_LIBCUDA", file);
  const Cuda* cuda = nullptr;
  Error error = load_cuda(&cuda);
  CHECK(cuda == nullptr);
  CHECK(error.status() == Status::kTransportUnavailable);
  return error;
}

TEST_CASE("cuda: a library that cannot be loaded is named with its variable") {
  const std::string text = failure("/nowhere/libcuda.so.1").message();
  CAPTURE(text);
  CHECK(contains(text, "TE_LIBCUDA is set to /nowhere/libcuda.so.1"));
  CHECK(contains(text, "correct or unset it"));
}

TEST_CASE("cuda: a library without the driver's functions is refused with the first that is missing") {
  const std::string text = failure("libc.so.6").message();
  CAPTURE(text);
  CHECK(contains(text, "libc.so.6 has no cuInit"));
}

TEST_CASE("cuda: a driver that is too old, has no device or does not start is refused with its version or error") {
  const CudaStandin standin;
  const struct {
    const char *options, *text, *remedy;
  } cases[] = {
      {"version=11030", "supports CUDA 11.3", "470 (CUDA 11.4) or newer"},
      {"devices=0", "cuInit: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)", "CUDA_VISIBLE_DEVICES"},
      {"init=100", "cuInit: CUDA_ERROR_NO_DEVICE", "no GPU is visible"},
      {"init=999", "cuInit: CUDA error 999", "kernel module"},
  };
  for (const auto& each : cases) {
    standin.configure(each.options);
    const std::string text = failure(CudaStandin::new_path()).message();
    CAPTURE(text);
    CHECK(contains(text, each.text));
    CHECK(contains(text, each.remedy));
  }
}

TEST_CASE("cuda: a failure to load is not remembered, a success is") {
  const CudaStandin standin("init=100");
  const std::string file = CudaStandin::new_path();
  CHECK(!failure(file).ok());
  standin.configure("devices=3,version=12040");
  const Variable variable("TE_LIBCUDA", file);
  const Cuda *first = nullptr, *second = nullptr;
  REQUIRE(load_cuda(&first).ok());
  CHECK(first->file == file);
  CHECK(first->devices == 3);
  CHECK(first->version == 12040);
  CHECK((first->range_handle != nullptr));
  CHECK((first->flush_writes != nullptr));
  standin.configure("init=100");
  REQUIRE(load_cuda(&second).ok());
  CHECK(first == second);
}

TEST_CASE("cuda: an error is described by its name and text, or by its number") {
  const CudaStandin standin;
  const Cuda& cuda = standin.load();
  CHECK(cuda.describe(result::kOutOfMemory) == "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  CHECK(cuda.describe(12345) == "CUDA error 12345");
  CHECK(Cuda().describe(2) == "CUDA error 2");
}

TEST_CASE("cuda: the primary context of a device is retained once and is the one that others retain") {
  const CudaStandin standin("devices=2");
  const Cuda& cuda = standin.load();
  const uint64_t references = standin.statistic("references");
  CuContext first = nullptr, again = nullptr, other = nullptr;
  REQUIRE(primary_context(cuda, 0, &first).ok());
  REQUIRE(primary_context(cuda, 0, &again).ok());
  REQUIRE(primary_context(cuda, 1, &other).ok());
  CHECK(first == again);
  CHECK(first != other);
  CHECK(standin.statistic("references") == references + 2);
  const CudaContext theirs(cuda, 1);
  CHECK(theirs.handle == other);
}

TEST_CASE("cuda: a device that is not there is refused by its number") {
  const CudaStandin standin("devices=2");
  const Cuda& cuda = standin.load();
  for (const int device : {-1, 2}) {
    CuContext context = nullptr;
    const Error error = primary_context(cuda, device, &context);
    CHECK(error.status() == Status::kConfig);
    CHECK(contains(error.message(), "cuda:" + std::to_string(device)));
    CHECK(context == nullptr);
  }
  standin.configure("devices=1");  // one that was lost after the start
  CuContext context = nullptr;
  const Error lost = primary_context(cuda, 1, &context);
  CHECK(lost.status() == Status::kTransportUnavailable);
  CHECK(contains(lost.message(), "CUDA_ERROR_INVALID_DEVICE"));
}

TEST_CASE("cuda: a scope makes a context current and puts back what was there") {
  const CudaStandin standin("devices=2");
  const Cuda& cuda = standin.load();
  CuContext first = nullptr, second = nullptr;
  REQUIRE(primary_context(cuda, 0, &first).ok());
  REQUIRE(primary_context(cuda, 1, &second).ok());
  CuPointer at = 0;
  CHECK(cuda.allocate(&at, 64) == result::kInvalidContext);
  {
    const ContextScope outer(cuda, first);
    CHECK(outer.ok());
    {
      const ContextScope inner(cuda, second);
      CHECK(inner.ok());
      REQUIRE(cuda.allocate(&at, 64) == result::kSuccess);
      int ordinal = -1, attribute = pointer_attribute::kDeviceOrdinal;
      void* data = &ordinal;
      REQUIRE(cuda.pointer_attributes(1, &attribute, &data, at) == result::kSuccess);
      CHECK(ordinal == 1);
      CHECK(cuda.free(at) == result::kSuccess);
    }
    std::thread([&] { CHECK(cuda.allocate(&at, 64) == result::kInvalidContext); }).join();
    CuContext popped = nullptr;
    REQUIRE(cuda.pop(&popped) == result::kSuccess);
    CHECK(popped == first);
    REQUIRE(cuda.push(first) == result::kSuccess);
  }
  CHECK(cuda.allocate(&at, 64) == result::kInvalidContext);
  CHECK(!ContextScope(cuda, nullptr).ok());
}

}  // namespace
}  // namespace te::test
