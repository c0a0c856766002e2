// The streams, copies and events of the stand-in for CUDA's driver, held against what the driver promises.
#include <vector>

#include "tests/native/cuda_support.h"

namespace te::test {
namespace {

using namespace te::gpu;

TEST_CASE("cuda stand-in: an event is ready when what was before it is done, in order") {
  CudaRig rig("copy_delay_us=200");
  const Cuda& cuda = rig.cuda;
  CHECK(cuda.event_query(rig.event) == result::kSuccess);  // never recorded
  for (size_t i = 0; i < rig.bytes; ++i) rig.host[i] = static_cast<uint8_t>(i * 7 + (i >> 8));
  rig.standin.configure("hold=1");
  const size_t half = rig.bytes / 2;
  REQUIRE(cuda.copy_to_device(rig.device, rig.host, half, rig.stream) == result::kSuccess);
  REQUIRE(cuda.copy_to_host(rig.host + half, rig.device, half, rig.stream) == result::kSuccess);
  REQUIRE(cuda.fill(rig.device, 0xAB, half, rig.stream) == result::kSuccess);
  REQUIRE(cuda.event_record(rig.event, rig.stream) == result::kSuccess);
  CHECK(cuda.event_query(rig.event) == result::kNotReady);
  uint8_t first = 77;
  REQUIRE(rig.standin.read(rig.device + 9, &first, 1));
  CHECK(first == 0);
  rig.standin.configure("copy_delay_us=100");
  REQUIRE(await(cuda, rig.event) == result::kSuccess);
  CHECK(std::memcmp(rig.host, rig.host + half, half) == 0);
  REQUIRE(rig.standin.read(rig.device + 9, &first, 1));
  CHECK(first == 0xAB);
}

TEST_CASE("cuda stand-in: an event recorded again is ready when the latest record is reached") {
  CudaRig rig;
  REQUIRE(rig.cuda.event_record(rig.event, rig.stream) == result::kSuccess);
  REQUIRE(await(rig.cuda, rig.event) == result::kSuccess);
  rig.standin.configure("hold=1");
  REQUIRE(rig.cuda.event_record(rig.event, rig.stream) == result::kSuccess);
  CHECK(rig.cuda.event_query(rig.event) == result::kNotReady);
  rig.standin.configure("");
  CHECK(await(rig.cuda, rig.event) == result::kSuccess);
}

TEST_CASE("cuda stand-in: synchronising a stream, freeing memory and destroying the stream wait for its copies") {
  for (const char* how : {"synchronise", "free", "free host", "destroy"}) {
    CAPTURE(std::string(how));
    CudaRig rig("copy_delay_us=1000");
    const Cuda& cuda = rig.cuda;
    CuStream other = nullptr;
    CuPointer at = 0;
    void* host = nullptr;
    REQUIRE(cuda.stream_create(&other, kStreamNonBlocking) == result::kSuccess);
    REQUIRE(cuda.allocate(&at, 100) == result::kSuccess);
    REQUIRE(cuda.host_allocate(&host, 100, 0) == result::kSuccess);
    const uint64_t copies = rig.standin.statistic("copies");
    for (int i = 0; i < 3; ++i) REQUIRE(cuda.copy_to_device(at, host, 100, other) == result::kSuccess);
    const std::string name = how;
    if (name == "synchronise") CHECK(cuda.stream_synchronize(other) == result::kSuccess);
    if (name == "free") CHECK(cuda.free(at) == result::kSuccess);
    if (name == "free host") CHECK(cuda.host_free(host) == result::kSuccess);
    if (name == "destroy") CHECK(cuda.stream_destroy(other) == result::kSuccess);
    CHECK(rig.standin.statistic("copies") == copies + 3);
    if (name != "free") CHECK(cuda.free(at) == result::kSuccess);
    if (name != "free host") CHECK(cuda.host_free(host) == result::kSuccess);
    if (name != "destroy") CHECK(cuda.stream_destroy(other) == result::kSuccess);
  }
}

TEST_CASE("cuda stand-in: stream 0 waits for blocking streams, not for others, and is done at the return") {
  CudaRig rig;
  const Cuda& cuda = rig.cuda;
  CuStream blocking = nullptr;
  REQUIRE(cuda.stream_create(&blocking, 0) == result::kSuccess);
  REQUIRE(cuda.fill(rig.device, 1, 100, blocking) == result::kSuccess);
  REQUIRE(cuda.copy_to_host(rig.host, rig.device, 100, nullptr) == result::kSuccess);
  CHECK(rig.host[99] == 1);
  rig.standin.configure("hold=1");
  REQUIRE(cuda.fill(rig.device, 2, 100, rig.stream) == result::kSuccess);
  REQUIRE(cuda.copy_to_host(rig.host, rig.device, 100, nullptr) == result::kSuccess);
  CHECK(rig.host[99] == 1);
  CHECK(cuda.stream_synchronize(nullptr) == result::kSuccess);
  rig.standin.configure("");
  CHECK(cuda.stream_synchronize(rig.stream) == result::kSuccess);
  CHECK(cuda.stream_destroy(blocking) == result::kSuccess);
}

TEST_CASE("cuda stand-in: an async copy of pageable memory is refused, and of another context's that is not portable") {
  CudaRig rig("devices=2,quiet=1");
  const Cuda& cuda = rig.cuda;
  uint8_t pageable[16] = {};
  void* own = nullptr;
  REQUIRE(cuda.host_allocate(&own, 16, 0) == result::kSuccess);
  CHECK(cuda.copy_to_device(rig.device, pageable, 16, rig.stream) == result::kInvalidValue);
  CHECK(rig.standin.violated());
  CHECK(cuda.copy_to_host(rig.host + rig.bytes - 8, rig.device, 16, rig.stream) == result::kInvalidValue);
  CHECK(rig.standin.violated());
  CHECK(cuda.copy_to_device(rig.device, own, 16, rig.stream) == result::kSuccess);
  CHECK(cuda.stream_synchronize(rig.stream) == result::kSuccess);
  CuPointer seen = 0;
  CHECK(cuda.host_device_pointer(&seen, own, 0) == result::kInvalidValue);
  CHECK(cuda.host_device_pointer(&seen, rig.host + 5, 0) == result::kSuccess);
  CHECK(seen == reinterpret_cast<CuPointer>(rig.host + 5));
  {
    const CudaContext other(cuda, 1);
    CuPointer at = 0;
    REQUIRE(cuda.allocate(&at, 16) == result::kSuccess);
    CHECK(cuda.copy_to_device(at, rig.host, 16, nullptr) == result::kSuccess);
    CHECK(cuda.copy_to_device(at, own, 16, nullptr) == result::kInvalidValue);
    CHECK(rig.standin.violated());
    CHECK(cuda.free(at) == result::kSuccess);
  }
  CHECK(cuda.host_free(static_cast<uint8_t*>(own) + 1) == result::kInvalidValue);
  CHECK(cuda.free(reinterpret_cast<CuPointer>(own)) == result::kInvalidValue);
  CHECK(cuda.host_free(own) == result::kSuccess);
  rig.standin.configure("host_alloc_fail=1");
  CHECK(cuda.host_allocate(&own, 16, 0) == result::kOutOfMemory);
}

TEST_CASE("cuda stand-in: streams and events need their own context, and handles end with their object") {
  CudaRig rig("devices=2,quiet=1");
  const Cuda& cuda = rig.cuda;
  {
    const CudaContext other(cuda, 1);
    CuEvent event = nullptr;
    REQUIRE(cuda.event_create(&event, 0) == result::kSuccess);
    for (const CuResult code :
         {cuda.event_query(rig.event), cuda.event_record(event, rig.stream), cuda.event_record(rig.event, nullptr),
          cuda.stream_synchronize(rig.stream), cuda.stream_destroy(rig.stream), cuda.event_destroy(rig.event)})
      CHECK(code == result::kInvalidHandle);
    for (int i = 0; i < 6; ++i) static_cast<void>(rig.standin.violated());
    CHECK(cuda.event_query(event) == result::kSuccess);
    CHECK(cuda.event_destroy(event) == result::kSuccess);
  }
  CuStream stream = nullptr;
  CuEvent event = nullptr;
  REQUIRE(cuda.stream_create(&stream, 0) == result::kSuccess);
  REQUIRE(cuda.event_create(&event, 0) == result::kSuccess);
  CHECK(cuda.stream_destroy(stream) == result::kSuccess);
  CHECK(cuda.event_destroy(event) == result::kSuccess);
  CHECK(cuda.stream_destroy(stream) == result::kInvalidHandle);
  CHECK(rig.standin.violated());
  CHECK(cuda.event_destroy(event) == result::kInvalidHandle);
  CHECK(rig.standin.violated());
  CHECK(cuda.event_query(event) == result::kInvalidHandle);
  CHECK(rig.standin.violated());
  std::thread([&] {
    CHECK(cuda.event_query(rig.event) == result::kInvalidContext);
    CHECK(cuda.stream_synchronize(rig.stream) == result::kInvalidContext);
  }).join();
}

TEST_CASE("cuda stand-in: an illegal address sticks to the context, and only to it") {
  CudaRig rig("devices=2");
  const Cuda& cuda = rig.cuda;
  const CuPointer past = rig.device + rig.bytes - 8;
  CHECK(cuda.copy_to_device(past, rig.host, 8, rig.stream) == result::kSuccess);
  CHECK(cuda.copy_to_device(past, rig.host, 9, rig.stream) == result::kIllegalAddress);
  CuPointer at = 0;
  CHECK(cuda.allocate(&at, 8) == result::kIllegalAddress);
  CHECK(cuda.event_query(rig.event) == result::kIllegalAddress);
  CHECK(cuda.stream_synchronize(rig.stream) == result::kIllegalAddress);
  {
    const CudaContext other(cuda, 1);
    CHECK(cuda.allocate(&at, 8) == result::kSuccess);
    CHECK(cuda.free(at) == result::kSuccess);
  }
  SUBCASE("freeing and destroying work and answer it") { rig.at_end = result::kIllegalAddress; }
  SUBCASE("a test may clear it") {
    rig.standin.clear_errors();
    CHECK(cuda.event_query(rig.event) == result::kSuccess);
  }
}

TEST_CASE("cuda stand-in: the copy that is to fail does when it is carried out, and nothing after it is") {
  CudaRig rig;
  const Cuda& cuda = rig.cuda;
  rig.standin.configure("copy_fail_after=2,hold=1");
  rig.host[0] = 1;
  rig.host[1] = 2;
  const uint64_t copies = rig.standin.statistic("copies");
  for (int i = 0; i < 3; ++i)
    REQUIRE(cuda.copy_to_device(rig.device + static_cast<unsigned>(i), rig.host, 1, rig.stream) == result::kSuccess);
  REQUIRE(cuda.event_record(rig.event, rig.stream) == result::kSuccess);
  CHECK(cuda.event_query(rig.event) == result::kNotReady);
  rig.standin.configure("");
  CHECK(await(cuda, rig.event) == result::kIllegalAddress);
  CHECK(cuda.stream_synchronize(rig.stream) == result::kIllegalAddress);
  CHECK(rig.standin.statistic("copies") == copies + 1);
  CHECK(rig.standin.view(rig.device)[0] == 1);
  CHECK(rig.standin.view(rig.device)[1] == 0);
  rig.at_end = result::kIllegalAddress;
}

TEST_CASE("cuda stand-in: writes of other devices are flushed where the host can") {
  CudaRig rig;
  const Cuda& cuda = rig.cuda;
  const uint64_t flushes = rig.standin.statistic("flushes");
  CHECK(cuda.flush_writes(kFlushCurrentContext, kFlushToOwner) == result::kSuccess);
  CHECK(cuda.flush_writes(kFlushCurrentContext, 0) == result::kInvalidValue);
  CHECK(cuda.flush_writes(1, kFlushToOwner) == result::kInvalidValue);
  rig.standin.configure("flush=0");
  CHECK(cuda.flush_writes(kFlushCurrentContext, kFlushToOwner) == result::kNotSupported);
  CHECK(rig.standin.statistic("flushes") == flushes + 1);
  std::thread([&] { CHECK(cuda.flush_writes(kFlushCurrentContext, kFlushToOwner) == result::kInvalidContext); }).join();
}

TEST_CASE("cuda stand-in: threads copy at once, each in a stream of its own") {
  CudaRig rig("", 1 << 20);
  const Cuda& cuda = rig.cuda;
  constexpr size_t kThreads = 4, kRounds = 50;
  const size_t part = rig.bytes / kThreads / 2;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const ContextScope scope(cuda, rig.context.handle);
      CuStream stream = nullptr;
      CuEvent event = nullptr;
      CHECK(cuda.stream_create(&stream, kStreamNonBlocking) == result::kSuccess);
      CHECK(cuda.event_create(&event, kEventDisableTiming) == result::kSuccess);
      uint8_t *from = rig.host + 2 * t * part, *to = from + part;
      for (size_t round = 0; round < kRounds; ++round) {
        std::memset(from, static_cast<int>(t * kRounds + round), part);
        CHECK(cuda.copy_to_device(rig.device + t * part, from, part, stream) == result::kSuccess);
        CHECK(cuda.copy_to_host(to, rig.device + t * part, part, stream) == result::kSuccess);
        CHECK(cuda.event_record(event, stream) == result::kSuccess);
        CHECK(await(cuda, event) == result::kSuccess);
        CHECK(std::memcmp(from, to, part) == 0);
      }
      CHECK(cuda.event_destroy(event) == result::kSuccess);
      CHECK(cuda.stream_destroy(stream) == result::kSuccess);
    });
  for (std::thread& each : threads) each.join();
}

}  // namespace
}  // namespace te::test
