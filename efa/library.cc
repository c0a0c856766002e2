#include "efa/library.h"

#ifdef TE_HAVE_LIBFABRIC
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "native/system.h"

namespace te::efa {
namespace {

// The symbol version that carries the structures of the headers we were built with (libfabric.map of each release).
// A newer library keeps the old ones, so that one build runs with every library that is not older than its headers.
constexpr int kAbi = FI_MAJOR_VERSION == 1                           ? (FI_MINOR_VERSION < 20 ? 3 : 7)
                     : FI_MAJOR_VERSION == 2 && FI_MINOR_VERSION < 5 ? 8
                                                                     : 9;

// The newest of the versions `newest` down to `oldest` of a symbol that the library has.
void* find_symbol(void* handle, const char* name, int newest, int oldest) {
  for (int abi = newest; abi >= oldest; --abi) {
    if (void* symbol = dlvsym(handle, name, format("FABRIC_1.%d", abi).c_str())) return symbol;
  }
  return nullptr;
}

template <typename Function>
bool bind(void* handle, const char* name, int oldest, Function* out) {
  *out = reinterpret_cast<Function>(find_symbol(handle, name, kAbi, oldest));
  return *out != nullptr;
}

// `named`: by TE_LIBFABRIC.
Error load(const std::string& file, bool named, Library* library) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const std::string reason = dlerror();
    if (named)
      return Error(Status::kTransportUnavailable,
                   format("TE_LIBFABRIC is set to %s, which cannot be loaded: %s: correct or unset it", file.c_str(),
                          reason.c_str()));
    if (reason.rfind(file, 0) != 0 || reason.find("No such file") == std::string::npos)  // it, or what it needs
      return Error(Status::kTransportUnavailable, format("%s cannot be loaded: %s", file.c_str(), reason.c_str()));
    return Error(
        Status::kTransportUnavailable,
        format("%s not found: install libfabric1 (Debian, Ubuntu), libfabric (others) or AWS's EFA installer, or "
               "set TE_LIBFABRIC to its path (%s)",
               file.c_str(), reason.c_str()));
  }
  decltype(&::fi_version) version = nullptr;
  decltype(&::fi_tostr) tostr = nullptr;
  // fi_getinfo and its kin must have exactly the ABI of our headers; the others have not changed since 1.0 or 1.1.
  const bool complete =
      bind(handle, "fi_version", 0, &version) && bind(handle, "fi_tostr", 0, &tostr) &&
      bind(handle, "fi_strerror", 0, &library->strerror) && bind(handle, "fi_fabric", 1, &library->fabric) &&
      bind(handle, "fi_getinfo", kAbi, &library->getinfo) && bind(handle, "fi_freeinfo", kAbi, &library->freeinfo) &&
      bind(handle, "fi_dupinfo", kAbi, &library->dupinfo);
  if (!complete) {
    const uint32_t found = version != nullptr ? version() : 0;
    dlclose(handle);
    return Error(
        Status::kTransportUnavailable,
        format("%s is libfabric %u.%u, older than the headers this package was built with (%d.%d): install a newer one",
               file.c_str(), FI_MAJOR(found), FI_MINOR(found), FI_MAJOR_VERSION, FI_MINOR_VERSION));
  }
  library->version = version();
  const char* text = tostr("", FI_TYPE_VERSION);
  library->name = text != nullptr && *text != '\0'
                      ? format("libfabric %s", text)
                      : format("libfabric %u.%u", FI_MAJOR(library->version), FI_MINOR(library->version));
  return {};
}

}  // namespace

std::string Library::describe(int64_t code) const {
  const int number = static_cast<int>(code < 0 ? -code : code);
  return format("%s (%d)", strerror(number), number);
}

Error load_library(const Library** out) {
  static std::mutex mutex;
  static std::map<std::string, Library> loaded;
  [[maybe_unused]] static const bool held = (hold_across_forks(&mutex), true);
  const char* variable = std::getenv("TE_LIBFABRIC");
  const bool named = variable != nullptr && *variable != '\0';
  const std::string file = named ? variable : "libfabric.so.1";
  const std::lock_guard lock(mutex);
  auto found = loaded.find(file);
  if (found == loaded.end()) {
    SignalGuard guard;
    Library candidate;
    if (Error error = load(file, named, &candidate)) return error;
    found = loaded.emplace(file, candidate).first;
  }
  *out = &found->second;
  return {};
}

SignalGuard::SignalGuard() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], nullptr, &saved_[i]);
}

SignalGuard::~SignalGuard() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &saved_[i], nullptr);
}

}  // namespace te::efa
#endif
