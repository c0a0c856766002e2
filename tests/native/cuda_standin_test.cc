// What the stand-in for CUDA's driver does, held against what the driver promises.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "native/gpu/gdr.h"
#include "tests/native/cuda_support.h"

namespace te::test {
namespace {

using namespace te::gpu;
namespace fs = std::filesystem;

constexpr size_t kPage = 4096;

template <typename Value>
Value attribute_of(const Cuda& cuda, int which, CuPointer at) {
  Value value;
  std::memset(&value, 0xFF, sizeof value);
  void* data = &value;
  REQUIRE(cuda.pointer_attributes(1, &which, &data, at) == result::kSuccess);
  return value;
}

TEST_CASE("cuda stand-in: options that are not understood are refused and change nothing") {
  const CudaStandin standin("devices=3");
  auto* configure = CudaStandin::symbol<int(const char*)>("standin_cuda_configure");
  for (const char* text :
       {"devices", "devices=", "devices=x", "devices=17", "ordering=some", "offset=100", "colour=1"}) {
    CAPTURE(std::string(text));
    CHECK(configure(text) == EINVAL);
  }
  CHECK(configure(nullptr) == EINVAL);
  CHECK(standin.load().devices == 3);
}

TEST_CASE("cuda stand-in: nothing works before cuInit, and nothing in a child") {
  const fs::path copy = CudaStandin::folder() + "libstandin_cuda_copy.so";
  fs::copy_file(CudaStandin::path(), copy, fs::copy_options::overwrite_existing);
  void* library = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  fs::remove(copy);
  REQUIRE(library != nullptr);
  int count = 0;
  auto* device_count = reinterpret_cast<CuResult (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  auto* version = reinterpret_cast<CuResult (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  CHECK(version(&count) == result::kSuccess);
  CHECK(device_count(&count) == result::kNotInitialized);

  const CudaStandin standin;
  const Cuda& cuda = standin.load();
  const pid_t child = fork();
  if (child == 0) _exit(cuda.device_count(&count) == result::kNotInitialized ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(cuda.device_count(&count) == result::kSuccess);
}

TEST_CASE("cuda stand-in: attributes of devices follow the options") {
  const CudaStandin standin("devices=2");
  const Cuda& cuda = standin.load();
  const auto get = [&](int which) {
    int value = -1;
    REQUIRE(cuda.device_attribute(&value, which, 1) == result::kSuccess);
    return value;
  };
  CHECK(get(device_attribute::kDmaBuf) == 1);
  CHECK(get(device_attribute::kGpuDirectRdma) == 1);
  CHECK(get(device_attribute::kWritesOrdering) == kOrderingOwner);
  CHECK(get(device_attribute::kFlushOptions) == kFlushByHost);
  standin.configure("devices=2,dmabuf=0,ordering=none,flush=0");
  CHECK(get(device_attribute::kDmaBuf) == 0);
  CHECK(get(device_attribute::kWritesOrdering) == kOrderingNone);
  CHECK(get(device_attribute::kFlushOptions) == 0);
  int value = 0;
  CHECK(cuda.device_attribute(&value, device_attribute::kDmaBuf, 2) == result::kInvalidDevice);
  CHECK(cuda.device_attribute(&value, 9999, 0) == result::kInvalidValue);
  char text[32] = "";
  REQUIRE(cuda.pci_bus_id(text, sizeof text, 1) == result::kSuccess);
  CHECK(std::string(text) == "0000:42:00.0");
  CHECK(cuda.pci_bus_id(text, 12, 1) == result::kInvalidValue);
  CHECK(cuda.device_name(text, sizeof text, 0) == result::kSuccess);
}

TEST_CASE("cuda stand-in: the last release of a primary context takes what was made in it along") {
  const CudaStandin standin("devices=16");
  const Cuda& cuda = standin.load();
  constexpr CuDevice kDevice = 15;  // which nothing else has retained
  CuContext context = nullptr, again = nullptr;
  unsigned flags = 0;
  int active = -1;
  CHECK(cuda.primary_release(kDevice) == result::kInvalidContext);
  REQUIRE(cuda.primary_retain(&context, kDevice) == result::kSuccess);
  REQUIRE(cuda.primary_retain(&again, kDevice) == result::kSuccess);
  CHECK(context == again);
  REQUIRE(cuda.push(context) == result::kSuccess);
  CuPointer at = 0;
  CuStream stream = nullptr;
  CuEvent event = nullptr;
  REQUIRE(cuda.allocate(&at, 100) == result::kSuccess);
  REQUIRE(cuda.stream_create(&stream, 0) == result::kSuccess);
  REQUIRE(cuda.event_create(&event, 0) == result::kSuccess);
  REQUIRE(cuda.primary_release(kDevice) == result::kSuccess);
  REQUIRE(cuda.primary_state(kDevice, &flags, &active) == result::kSuccess);
  CHECK(active == 1);
  CHECK(cuda.event_query(event) == result::kSuccess);
  REQUIRE(cuda.primary_release(kDevice) == result::kSuccess);
  REQUIRE(cuda.primary_state(kDevice, &flags, &active) == result::kSuccess);
  CHECK(active == 0);
  CHECK(cuda.event_query(event) == result::kInvalidContext);
  CHECK(cuda.push(context) == result::kInvalidContext);
  CHECK(cuda.pop(&context) == result::kSuccess);
  CHECK(cuda.pop(&context) == result::kInvalidContext);
}

TEST_CASE("cuda stand-in: device memory is not the CPU's, neither while it lives nor afterwards") {
  const CudaStandin standin;
  const Cuda& cuda = standin.load();
  const CudaContext context(cuda);
  CuPointer at = 0;
  REQUIRE(cuda.allocate(&at, 100'000) == result::kSuccess);
  auto* stray = reinterpret_cast<volatile uint8_t*>(at);
  // Asked of the kernel: a sanitizer would report the access itself.
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  CHECK(write(ends[1], const_cast<const uint8_t*>(stray), 1) == -1);
  CHECK(errno == EFAULT);
  const uint8_t sent = 77;
  uint8_t got = 0;
  REQUIRE(standin.write(at + 99'999, &sent, 1));
  REQUIRE(standin.read(at + 99'999, &got, 1));
  CHECK(got == 77);
  CHECK(standin.view(at)[99'999] == 77);
  CHECK(!standin.read(at + 99'999, &got, 2));
  REQUIRE(cuda.free(at) == result::kSuccess);
  CHECK(write(ends[1], const_cast<const uint8_t*>(stray), 1) == -1);
  CHECK(standin.view(at) == nullptr);
  CHECK(cuda.free(at) == result::kInvalidValue);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("cuda stand-in: an address that was freed comes back, under a new id and with other bytes") {
  const CudaStandin standin;
  const Cuda& cuda = standin.load();
  const CudaContext context(cuda);
  CuPointer first = 0, second = 0;
  REQUIRE(cuda.allocate(&first, 70'000) == result::kSuccess);
  const auto id = attribute_of<uint64_t>(cuda, pointer_attribute::kBufferId, first);
  standin.view(first)[5] = 99;
  REQUIRE(cuda.free(first) == result::kSuccess);
  REQUIRE(cuda.allocate(&second, 80'000) == result::kSuccess);
  CHECK(second == first);
  CHECK(attribute_of<uint64_t>(cuda, pointer_attribute::kBufferId, second) > id);
  CHECK(standin.view(second)[5] == 0);
  CHECK(cuda.free(second) == result::kSuccess);
}

TEST_CASE("cuda stand-in: memory is limited, and its start may lie within a page") {
  const CudaStandin standin("memory=196608,offset=1536");
  const Cuda& cuda = standin.load();
  const CudaContext context(cuda);
  CuPointer at = 0, more = 0;
  CHECK(cuda.allocate(&at, 0) == result::kInvalidValue);
  REQUIRE(cuda.allocate(&at, 2 * kGpuPageBytes) == result::kSuccess);
  CHECK(at % kGpuPageBytes == 1536);
  CHECK(cuda.allocate(&more, 1) == result::kOutOfMemory);
  CuPointer base = 0;
  size_t bytes = 0;
  REQUIRE(cuda.address_range(&base, &bytes, at + 7) == result::kSuccess);
  CHECK(base == at);
  CHECK(bytes == 2 * kGpuPageBytes);
  CHECK(standin.view(at - 1536) == standin.view(at) - 1536);
  CHECK(cuda.free(at) == result::kSuccess);
}

TEST_CASE("cuda stand-in: pointers are told apart by their attributes") {
  CudaRig rig;
  const Cuda& cuda = rig.cuda;
  namespace a = pointer_attribute;
  const CuPointer managed = rig.standin.allocate_managed(1000);
  const auto host = reinterpret_cast<CuPointer>(rig.host);
  const struct {
    CuPointer at, base;
    size_t bytes;
    unsigned type;
    bool seen, managed;
  } cases[] = {{rig.device + 77, rig.device, rig.bytes, memory_type::kDevice, false, false},
               {host + 77, host, rig.bytes, memory_type::kHost, true, false},
               {managed + 77, managed, 1000, memory_type::kDevice, true, true}};
  for (const auto& each : cases) {
    CHECK(attribute_of<CuContext>(cuda, a::kContext, each.at) == rig.context.handle);
    CHECK(attribute_of<unsigned>(cuda, a::kMemoryType, each.at) == each.type);
    CHECK(attribute_of<CuPointer>(cuda, a::kDevicePointer, each.at) == each.at);
    CHECK(attribute_of<CuPointer>(cuda, a::kHostPointer, each.at) == (each.seen ? each.at : 0));
    CHECK(attribute_of<uint64_t>(cuda, a::kBufferId, each.at) > 0);
    CHECK(attribute_of<unsigned>(cuda, a::kIsManaged, each.at) == each.managed);
    CHECK(attribute_of<int>(cuda, a::kDeviceOrdinal, each.at) == 0);
    CHECK(attribute_of<CuPointer>(cuda, a::kRangeStart, each.at) == each.base);
    CHECK(attribute_of<size_t>(cuda, a::kRangeSize, each.at) == each.bytes);
    CHECK(attribute_of<unsigned>(cuda, a::kMapped, each.at) == 1);
    CuPointer base = 0;
    CHECK(cuda.address_range(&base, nullptr, each.at) == result::kSuccess);
    CHECK(base == each.base);
  }
  CHECK(rig.standin.view(managed) == nullptr);
  std::vector<uint8_t> plain(100);
  const auto unknown = reinterpret_cast<CuPointer>(plain.data());
  for (const CuPointer at : {unknown, rig.device + rig.bytes}) {
    CHECK(attribute_of<CuContext>(cuda, a::kContext, at) == nullptr);
    CHECK(attribute_of<unsigned>(cuda, a::kMemoryType, at) == 0);
    CHECK(attribute_of<uint64_t>(cuda, a::kBufferId, at) == 0);
    CHECK(attribute_of<unsigned>(cuda, a::kIsManaged, at) == 0);
    CHECK(attribute_of<int>(cuda, a::kDeviceOrdinal, at) == -2);
    CHECK(attribute_of<size_t>(cuda, a::kRangeSize, at) == ~size_t{0});  // left alone
    CHECK(cuda.address_range(nullptr, nullptr, at) == result::kNotFound);
  }
  CHECK(cuda.free(managed) == result::kSuccess);
}

TEST_CASE("cuda stand-in: a dma-buf begins where its range does and outlives the memory") {
  const CudaStandin standin;
  const Cuda& cuda = standin.load();
  const CudaContext context(cuda);
  CuPointer at = 0;
  REQUIRE(cuda.allocate(&at, 5 * kPage + 100) == result::kSuccess);
  int file = -1;
  REQUIRE(cuda.range_handle(&file, at + 2 * kPage, 4 * kPage, kDmaBufDescriptor, 0) == result::kSuccess);
  standin.view(at)[2 * kPage + 3] = 44;
  const off_t begin = lseek(file, 0, SEEK_CUR);
  auto* seen = static_cast<uint8_t*>(mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, begin));
  REQUIRE(seen != MAP_FAILED);
  CHECK(seen[3] == 44);
  seen[4] = 45;
  CHECK(standin.view(at)[2 * kPage + 4] == 45);

  int none = -1;
  const struct {
    uint64_t from, bytes;
    int type;
    unsigned long long flags;
    CuResult code;
  } cases[] = {{100, kPage, 1, 0, result::kInvalidValue},
               {0, 5 * kPage + 100, 1, 0, result::kInvalidValue},
               {0, 0, 1, 0, result::kInvalidValue},
               {0, 1 << 20, 1, 0, result::kInvalidValue},
               {6 * kPage, kPage, 1, 0, result::kInvalidValue},
               {0, kPage, 2, 0, result::kInvalidValue},
               {0, kPage, 1, 1, result::kNotSupported},
               {0, kPage, 1, 4, result::kInvalidValue}};
  for (const auto& each : cases) {
    CAPTURE(each.from);
    CAPTURE(each.bytes);
    CHECK(cuda.range_handle(&none, at + each.from, each.bytes, each.type, each.flags) == each.code);
  }
  CHECK(cuda.range_handle(&none, at + (1 << 20), kPage, 1, 0) == result::kInvalidValue);
  standin.configure("dmabuf=0");
  CHECK(cuda.range_handle(&none, at, kPage, 1, 0) == result::kNotSupported);
  CHECK(none == -1);
  CHECK(cuda.free(at) == result::kSuccess);
  CHECK(seen[4] == 45);
  munmap(seen, 4 * kPage);
  close(file);
}

}  // namespace
}  // namespace te::test
