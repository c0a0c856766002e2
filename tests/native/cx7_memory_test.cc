// Registration on cx7: relaxed ordering, and memory that comes as a dma-buf.
#include <doctest/doctest.h>

#if __has_include(<infiniband/verbs.h>)
#include <sys/mman.h>

#include <filesystem>

#include "cx7/nic.h"
#include "cx7/provider.h"
#include "tests/native/engine_support.h"
#include "tests/native/verbs_support.h"

namespace te::engine_test {
namespace {

using cx7::Nic;
using test::Fabric;

constexpr size_t kPage = 4096;

// Memory of "another driver": a file in memory. The addresses it is registered under are reserved, but nothing can be read there.
struct Exported {
  explicit Exported(size_t length) : bytes(length), fd(memfd_create("exported", MFD_CLOEXEC)) {
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, static_cast<off_t>(length)) == 0);
    void* own = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void* reserved = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(own != MAP_FAILED);
    REQUIRE(reserved != MAP_FAILED);
    content = static_cast<uint8_t*>(own);
    address = static_cast<uint8_t*>(reserved);
  }
  ~Exported() {
    munmap(content, bytes);
    munmap(address, bytes);
    hide();
  }
  Exported(const Exported&) = delete;
  void hide() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  MemorySpan span(uint64_t offset, uint64_t length) const {
    return {address + offset, length, TE_DEVICE_CUDA, 0, fd, offset};
  }

  size_t bytes;
  int fd;
  uint8_t* content = nullptr;
  uint8_t* address = nullptr;
};

// A NIC of its own over a library from which functions may be missing.
struct LoneNic {
  explicit LoneNic(const std::function<void(cx7::Library&)>& cripple = {}) {
    const cx7::Library* loaded = nullptr;
    REQUIRE(cx7::load_library(&loaded).ok());
    library = *loaded;
    if (cripple) cripple(library);
    te_settings settings{};
    te_settings_defaults(&settings);
    ProviderOptions options;
    options.rdma = settings.rdma;
    std::vector<cx7::Port> ports;
    REQUIRE(cx7::choose_ports(cx7::sysfs_root(), options.rdma, {"standin0"}, 1, &ports).ok());
    const Error error = Nic::open(library, ports.front(), options, &nic);
    REQUIRE_MESSAGE(error.ok(), error.message());
  }
  Error take(const MemorySpan& span) const {
    MemoryKey key;
    Error error = nic->register_memory(span, &key);
    if (error.ok()) CHECK(nic->deregister_memory(key).ok());
    return error;
  }
  Error take_bytes() const {
    static uint8_t memory[100];
    return take({memory, sizeof memory, TE_DEVICE_HOST, 0});
  }

  cx7::Library library;
  std::unique_ptr<Nic> nic;
};

size_t open_files() {
  using Iterator = std::filesystem::directory_iterator;
  return static_cast<size_t>(std::distance(Iterator("/proc/self/fd"), Iterator()));
}

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("cx7 memory: a NIC tells whether relaxed ordering was taken, and why not") {
  Fabric fabric;
  {
    const LoneNic taken;
    CHECK(taken.take_bytes().ok());
    CHECK(taken.nic->info().relaxed_ordering);
    CHECK(taken.nic->info().ordering_reason.empty());

    fabric.command("set relaxed=0");
    const LoneNic refused;
    CHECK(refused.take_bytes().ok());
    CHECK_FALSE(refused.nic->info().relaxed_ordering);
    CHECK(mentions(refused.nic->info().ordering_reason, "Invalid argument"));
    fabric.command("set relaxed=1");

    const LoneNic old([](cx7::Library& library) { library.reg_mr_iova2 = nullptr; });
    CHECK(old.take_bytes().ok());
    CHECK_FALSE(old.nic->info().relaxed_ordering);
    CHECK(mentions(old.nic->info().ordering_reason, "ibv_reg_mr_iova2"));
  }
}

TEST_CASE("cx7 memory: a shortage of memory is not taken for a refusal of relaxed ordering") {
  Fabric fabric;
  {
    const LoneNic lone;
    fabric.command("reg_fail 1");
    CHECK(lone.take_bytes().provider_status() == ENOMEM);
    CHECK(lone.nic->info().relaxed_ordering);
    CHECK(lone.take_bytes().ok());
  }
}

TEST_CASE("cx7 memory: an engine whose device refuses relaxed ordering works, and says so") {
  Fabric fabric("relaxed=0");
  {
    Pair pair({"cx7", "", 2, {}, 0}, {"cx7", "", 2, {}, 8});
    require_ok(pair.write(0, 0, 10'000));
    REQUIRE(pair.owner.counted(pair.counter, 1));
    CHECK(pair.landed(0, 0, 10'000));
    te_nic_info info{};
    REQUIRE(te_nic_describe(pair.owner.engine, 1, &info, &pair.owner.error) == TE_OK);
    CHECK(info.relaxed_ordering == 0);
    CHECK(mentions(info.ordering_reason, "Invalid argument"));
  }
}

TEST_CASE("cx7 memory: what a dma-buf cannot do is said in words") {
  Fabric fabric;
  {
    const Exported exported(4 * kPage);
    const LoneNic lone;
    const Error unsupported = lone.take(exported.span(0, 100));  // the devices say EOPNOTSUPP
    CHECK(unsupported.status() == Status::kRegistration);
    CHECK(mentions(unsupported.message(), "standin0"));
    CHECK(mentions(unsupported.message(), "Linux 5.12"));

    const LoneNic old([](cx7::Library& library) { library.reg_dmabuf_mr = nullptr; });
    const Error missing = old.take(exported.span(0, 100));
    CHECK(missing.status() == Status::kRegistration);
    CHECK(mentions(missing.message(), "ibv_reg_dmabuf_mr"));

    fabric.command("set dmabuf=1");
    CHECK(lone.take(exported.span(kPage, 100)).ok());
    MemorySpan shifted = exported.span(kPage, 100);
    shifted.dmabuf_offset += 1;
    CHECK(lone.take(shifted).status() == Status::kArgument);
    CHECK(lone.take(exported.span(0, 0)).status() == Status::kArgument);
    MemorySpan closed = exported.span(0, 100);
    closed.dmabuf_fd = 1000;
    CHECK(lone.take(closed).provider_status() == EBADF);
    CHECK(lone.nic->info().relaxed_ordering);
  }
}

// The source cannot be read by this processor, so nothing of it may be copied into a work request, however short it is.
TEST_CASE("cx7 memory: bytes go from one dma-buf into another, and descriptors are not needed after registration") {
  Fabric fabric("dmabuf=1");
  const size_t files = open_files();
  for (const bool relaxed : {true, false}) {
    CAPTURE(relaxed);
    fabric.command(relaxed ? "set relaxed=1" : "set relaxed=0");
    Exported source(16 * kPage), target(16 * kPage);
    for (size_t i = 0; i < source.bytes; ++i) source.content[i] = static_cast<uint8_t>(i * 7 + (i >> 8));
    std::memset(target.content, 0xEE, target.bytes);
    {
      Player writer({"cx7", "", 2, {}, 0}), owner({"cx7", "", 2, {}, 8});
      te_handle from = TE_NONE, to = TE_NONE;
      const auto add = [](Player& player, Exported& memory, uint64_t offset, uint64_t length, te_handle* handle) {
        REQUIRE(te_region_register_dmabuf(player.engine, memory.address + offset, length, TE_DEVICE_CUDA, 0, memory.fd,
                                          offset, handle, &player.error) == TE_OK);
        memory.hide();
      };
      add(writer, source, kPage, 8 * kPage, &from);
      add(owner, target, 2 * kPage + 8, 8 * kPage, &to);
      te_region_descriptor descriptor{};
      REQUIRE(te_region_describe(owner.engine, to, &descriptor, &owner.error) == TE_OK);
      CHECK(descriptor.device_kind == TE_DEVICE_CUDA);
      const te_handle remote = writer.remote(descriptor);
      uint64_t at = 0;
      for (const uint64_t length : {1u, 64u, 128u, 129u, 5000u}) {
        CAPTURE(length);
        require_ok(writer.submit(kPatience, [&](int64_t timeout, te_error* why) {
          return te_write(writer.engine, from, at, remote, at, length, TE_NONE, TE_FLAG_FLUSH, timeout, why);
        }));
        CHECK(std::memcmp(target.content + 2 * kPage + 8 + at, source.content + kPage + at, length) == 0);
        at += length;
      }
      CHECK(target.content[2 * kPage + 7] == 0xEE);
      CHECK(target.content[2 * kPage + 8 + at] == 0xEE);
      CHECK(te_region_close(writer.engine, from, kPatience, &writer.error) == TE_OK);
      CHECK(te_region_close(owner.engine, to, kPatience, &owner.error) == TE_OK);
    }
  }
  CHECK(open_files() == files);
}

TEST_CASE("engine: a dma-buf that the transport cannot register is a typed error") {
  const Exported exported(kPage);
  for (const char* transport : {"sim", "tcp"}) {
    CAPTURE(std::string(transport));
    Player player({transport, "", 1, {}});
    te_handle region = 77;
    const auto add = [&](int fd, uint64_t length) {
      return te_region_register_dmabuf(player.engine, exported.address, length, TE_DEVICE_CUDA, 0, fd, 0, &region,
                                       &player.error);
    };
    CHECK(add(exported.fd, kPage) == TE_ERR_REGISTRATION);
    CHECK(add(-1, kPage) == TE_ERR_ARGUMENT);
    CHECK(add(1000, kPage) == TE_ERR_ARGUMENT);
    CHECK(add(exported.fd, 0) == TE_ERR_ARGUMENT);
    CHECK(region == 77);
    CHECK(player.stats().regions == 0);
  }
}

}  // namespace te::engine_test
#endif
