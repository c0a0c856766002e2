// What the stand-in for GDRCopy's library does, held against what the library promises.
#include <cerrno>

#include "tests/native/gdr_support.h"

namespace te::test {
namespace {

using namespace te::gpu;
constexpr uint64_t kPage = kGpuPageBytes;

// The library, bound by hand, beside device memory to pin.
struct GdrRig : CudaRig, GdrStandin {
  explicit GdrRig(const std::string& options = "") : CudaRig("", 3 * kPage), GdrStandin(options) {}

  decltype(Gdr::open) open = bind<decltype(Gdr::open)>("gdr_open");
  decltype(Gdr::close) close = bind<decltype(Gdr::close)>("gdr_close");
  decltype(Gdr::pin) pin = bind<decltype(Gdr::pin)>("gdr_pin_buffer");
  decltype(Gdr::unpin) unpin = bind<decltype(Gdr::unpin)>("gdr_unpin_buffer");
  decltype(Gdr::info) info = bind<decltype(Gdr::info)>("gdr_get_info_v2");
  decltype(Gdr::map) map = bind<decltype(Gdr::map)>("gdr_map");
  decltype(Gdr::unmap) unmap = bind<decltype(Gdr::unmap)>("gdr_unmap");
  decltype(Gdr::runtime_version) version = bind<decltype(Gdr::runtime_version)>("gdr_runtime_get_version");
};

TEST_CASE("gdr stand-in: a window shows the device's bytes at the same place of their page") {
  GdrRig rig;
  GdrContext gdr = rig.open();
  REQUIRE(gdr != nullptr);
  GdrHandle handle;
  REQUIRE(rig.pin(gdr, rig.device + kPage, 2 * kPage, 0, 0, &handle) == 0);
  GdrInfo info;
  REQUIRE(rig.info(gdr, handle, &info) == 0);
  CHECK(info.va == rig.device + kPage);
  CHECK(info.mapped_size == 2 * kPage);
  CHECK(info.page_size == kPage);
  CHECK(+info.mapped == 0);
  void* at = nullptr;
  REQUIRE(rig.map(gdr, handle, &at, 2 * kPage) == 0);
  CHECK(reinterpret_cast<uint64_t>(at) % kPage == 0);
  REQUIRE(rig.info(gdr, handle, &info) == 0);
  CHECK(+info.mapped == 1);
  CHECK(+info.wc_mapping == 1);
  CHECK(info.mapping_type == 1);
  auto* window = static_cast<uint8_t*>(at);
  window[kPage + 5] = 66;
  uint8_t seen = 0;
  REQUIRE(rig.standin.read(rig.device + 2 * kPage + 5, &seen, 1));
  CHECK(seen == 66);
  REQUIRE(rig.cuda.fill(rig.device, 0x5A, rig.bytes, nullptr) == result::kSuccess);
  CHECK(window[kPage + 5] == 0x5A);
  CHECK(rig.unmap(gdr, handle, at, 2 * kPage) == 0);
  CHECK(rig.unpin(gdr, handle) == 0);
  CHECK(rig.close(gdr) == 0);
}

TEST_CASE("gdr stand-in: what is pinned are whole pages of one allocation of device memory") {
  GdrRig rig;
  const CuPointer managed = rig.standin.allocate_managed(4 * kPage);
  const CuPointer aligned = (managed + kPage - 1) / kPage * kPage;
  CuPointer small = 0;
  REQUIRE(rig.cuda.allocate(&small, 100) == result::kSuccess);
  GdrContext gdr = rig.open();
  GdrHandle handle;
  const struct {
    uint64_t at, bytes;
  } refused[] = {{rig.device + 4096, kPage},      {rig.device, kPage + 4096}, {rig.device, 0},
                 {rig.device + kPage, 3 * kPage}, {aligned, kPage},           {kPage, kPage}};
  for (const auto& each : refused) CHECK(rig.pin(gdr, each.at, each.bytes, 0, 0, &handle) == EINVAL);
  REQUIRE(rig.pin(gdr, small, kPage, 0, 0, &handle) == 0);  // the page goes on after the allocation
  CHECK(rig.unpin(gdr, handle) == 0);
  REQUIRE(rig.cuda.free(small) == result::kSuccess);
  CHECK(rig.pin(gdr, small, kPage, 0, 0, &handle) == EINVAL);
  {
    const Variable elsewhere("TE_LIBCUDA", "/nowhere/libcuda.so.1");
    CHECK(rig.pin(gdr, rig.device, kPage, 0, 0, &handle) == EINVAL);
  }
  CHECK(rig.close(gdr) == 0);
  CHECK(rig.cuda.free(managed) == result::kSuccess);
}

TEST_CASE("gdr stand-in: misuse is refused or reported, and counted") {
  GdrRig rig("quiet=1");
  GdrContext gdr = rig.open(), other = rig.open();
  GdrHandle handle;
  void *at = nullptr, *again = nullptr;
  REQUIRE(rig.pin(gdr, rig.device, 2 * kPage, 0, 0, &handle) == 0);
  CHECK(rig.unmap(gdr, handle, rig.standin.view(rig.device), 2 * kPage) == EINVAL);
  CHECK(rig.violated());
  CHECK(rig.map(gdr, handle, &at, 3 * kPage) == EINVAL);
  REQUIRE(rig.map(gdr, handle, &at, kPage) == 0);
  CHECK(rig.map(gdr, handle, &again, kPage) == EAGAIN);
  CHECK(rig.violated());
  CHECK(rig.unmap(gdr, handle, at, 2 * kPage) == EINVAL);
  CHECK(rig.violated());
  CHECK(rig.unmap(other, handle, at, kPage) == EINVAL);
  CHECK(rig.violated());
  CHECK(rig.unpin(gdr, GdrHandle{handle.h + 1}) == EINVAL);
  CHECK(rig.violated());
  CHECK(rig.unpin(gdr, handle) == 0);  // with its window
  CHECK(rig.violated());
  REQUIRE(rig.pin(gdr, rig.device, kPage, 0, 0, &handle) == 0);
  REQUIRE(rig.map(gdr, handle, &at, kPage) == 0);
  CHECK(rig.statistic("mapped") == 1);
  CHECK(rig.close(gdr) == 0);
  CHECK(rig.violated());
  CHECK(rig.close(gdr) == EINVAL);
  CHECK(rig.violated());
  CHECK(rig.close(other) == 0);
}

TEST_CASE("gdr stand-in: options make it fail, or an older one") {
  GdrRig rig;
  for (const char* text : {"open", "open=x", "version=2", "version=2.x", "colour=1"})
    CHECK(rig.try_configure(text) == EINVAL);
  int major = 0, minor = 0;
  rig.version(&major, &minor);
  CHECK(major == 2);
  CHECK(minor == 5);
  rig.configure("open=13");
  errno = 0;
  CHECK(rig.open() == nullptr);
  CHECK(errno == EACCES);
  rig.configure("version=2.4,pin=12");
  rig.version(&major, &minor);
  CHECK(minor == 4);
  GdrContext gdr = rig.open();
  GdrHandle handle;
  CHECK(rig.pin(gdr, rig.device, kPage, 0, 0, &handle) == ENOMEM);
  rig.configure("version=2.4,map=12");
  REQUIRE(rig.pin(gdr, rig.device, kPage, 0, 0, &handle) == 0);
  void* at = nullptr;
  CHECK(rig.map(gdr, handle, &at, kPage) == ENOMEM);
  GdrInfo info;
  info.mapping_type = 99;
  REQUIRE(rig.info(gdr, handle, &info) == 0);
  CHECK(info.mapping_type == 99);  // which that version does not know
  CHECK(rig.unpin(gdr, handle) == 0);
  CHECK(rig.close(gdr) == 0);
}

}  // namespace
}  // namespace te::test
