// GDRCopy's library as it is loaded at run time: why it cannot be, and what to do about it.
#include <cerrno>
#include <vector>

#include "tests/native/gdr_support.h"

namespace te::test {
namespace {

using namespace te::gpu;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string failure(const std::string& file) {
  const Variable variable("TE_LIBGDRAPI", file);
  const Gdr* gdr = nullptr;
  const Error error = load_gdr(&gdr);
  CHECK(gdr == nullptr);
  CHECK(error.status() == Status::kTransportUnavailable);
  return error.message();
}

const Gdr* success(const std::string& file) {
  const Variable variable("TE_LIBGDRAPI", file);
  const Gdr* gdr = nullptr;
  const Error error = load_gdr(&gdr);
  REQUIRE_MESSAGE(error.ok(), error.message());
  return gdr;
}

}  // namespace

TEST_CASE("gdr: a library that cannot be loaded is named with its variable") {
  const std::string text = failure("/nowhere/libgdrapi.so.2");
  CAPTURE(text);
  CHECK(contains(text, "TE_LIBGDRAPI is set to /nowhere/libgdrapi.so.2"));
  CHECK(contains(text, "correct or unset it"));
}

TEST_CASE("gdr: where no variable names it and it is not installed, the packages are named") {
  if (void* installed = dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_LOCAL); installed != nullptr) {
    dlclose(installed);
    MESSAGE("skipped: GDRCopy is installed");
    return;
  }
  const std::string text = failure("");
  CAPTURE(text);
  CHECK(contains(text, "libgdrapi.so.2 cannot be loaded: GDRCopy is not installed"));
  CHECK(contains(text, "package libgdrapi"));
}

TEST_CASE("gdr: a library without the functions is refused with the first that is missing") {
  const std::string text = failure("libc.so.6");
  CAPTURE(text);
  CHECK(contains(text, "libc.so.6 has no gdr_open"));
  CHECK(contains(text, "2.0 or newer is needed"));
}

TEST_CASE("gdr: one before 2.0 is refused, with its version and the one that is needed") {
  GdrStandin standin;
  const std::string file = GdrStandin::new_path();
  for (const char* version : {"1.0", "1.9"}) {
    standin.configure(std::string("version=") + version);
    const std::string text = failure(file);
    CAPTURE(text);
    CHECK(contains(text, file));
    CHECK(contains(text, std::string("is GDRCopy ") + version));
    CHECK(contains(text, "2.0 or newer is needed: install a newer one"));
  }
  standin.configure("version=2.0");
  const Gdr* gdr = success(file);
  CHECK(gdr->file == file);
  CHECK(gdr->major == 2);
  CHECK(gdr->minor == 0);
  standin.configure("version=3.1");
  CHECK(success(GdrStandin::new_path())->major == 3);
}

TEST_CASE("gdr: a device file that is missing, forbidden or one too many is told with the remedy") {
  GdrStandin standin;
  const struct {
    int code;
    std::vector<const char*> parts;
  } cases[] = {
      {ENOENT, {"/dev/gdrdrv is missing", "modprobe gdrdrv", "--device /dev/gdrdrv"}},
      {EACCES, {"permission denied for /dev/gdrdrv", "chmod 0666", "--device /dev/gdrdrv"}},
      {EPERM, {"permission denied for /dev/gdrdrv", "chmod 0666", "--device /dev/gdrdrv"}},
      {EMFILE, {"Too many open files", "ulimit -n"}},
      {EIO, {"/dev/gdrdrv"}},  // not of opening it, maybe: the device file is asked, which says what it says
      {ENOTTY, {"/dev/gdrdrv"}},
  };
  const std::string file = GdrStandin::new_path();
  for (const auto& each : cases) {
    standin.configure("open=" + std::to_string(each.code));
    const std::string text = failure(file);
    CAPTURE(text);
    for (const char* part : each.parts) CHECK(contains(text, part));
  }
}

TEST_CASE("gdr: a failure is not remembered, and what is loaded is") {
  GdrStandin standin("open=13");
  const std::string file = GdrStandin::new_path();
  failure(file);
  failure(file);
  standin.configure("");
  const Gdr* gdr = success(file);
  standin.configure("open=13");
  CHECK(success(file) == gdr);
  GdrContext context = nullptr;
  const Error error = open_gdr(*gdr, &context);
  CHECK(error.status() == Status::kTransportUnavailable);
  CHECK(contains(error.message(), "permission denied"));
  CHECK(context == nullptr);
  standin.configure("");
  REQUIRE(open_gdr(*gdr, &context).ok());
  CHECK(gdr->close(context) == 0);
}

TEST_CASE("gdr: threads that load it at once find one") {
  const GdrStandin standin;
  const Variable variable("TE_LIBGDRAPI", GdrStandin::new_path());
  const Gdr* found[8] = {};
  std::vector<std::thread> threads;
  for (const Gdr*& each : found) threads.emplace_back([&each] { CHECK(load_gdr(&each).ok()); });
  for (std::thread& thread : threads) thread.join();
  for (const Gdr* each : found) {
    CHECK(each != nullptr);
    CHECK(each == found[0]);
  }
}

}  // namespace te::test
