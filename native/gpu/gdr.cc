#include "native/gpu/gdr.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "native/system.h"

namespace te::gpu {
namespace {

constexpr const char* kDevice = "/dev/gdrdrv";
constexpr int kOldestMajor = 2;

Error unavailable(std::string why) { return Error(Status::kTransportUnavailable, std::move(why)); }

template <typename Function>
bool bind(void* handle, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, name));
  return *out != nullptr;
}

// The first function that is missing, or null.
const char* bind_all(void* handle, Gdr* g) {
  struct Entry {
    const char* name;
    bool found;
  };
  const Entry entries[] = {
      {"gdr_open", bind(handle, "gdr_open", &g->open)},
      {"gdr_close", bind(handle, "gdr_close", &g->close)},
      {"gdr_pin_buffer", bind(handle, "gdr_pin_buffer", &g->pin)},
      {"gdr_unpin_buffer", bind(handle, "gdr_unpin_buffer", &g->unpin)},
      {"gdr_get_info_v2", bind(handle, "gdr_get_info_v2", &g->info)},
      {"gdr_map", bind(handle, "gdr_map", &g->map)},
      {"gdr_unmap", bind(handle, "gdr_unmap", &g->unmap)},
      {"gdr_runtime_get_version", bind(handle, "gdr_runtime_get_version", &g->runtime_version)},
  };
  for (const Entry& entry : entries)
    if (!entry.found) return entry.name;
  return nullptr;
}

// Why the device file cannot be opened; 0: it can.
int try_device() {
  const int fd = ::open(kDevice, O_RDWR | O_CLOEXEC);
  if (fd < 0) return errno;
  ::close(fd);
  return 0;
}

// gdr_open promises no more than null. Of opening the device file, errno is most often still there (gdr_open frees and may log after
// it); any other value may come from elsewhere, and then the device file itself is asked.
Error why_not_open(const std::string& file, int left) {
  const bool telling = left == ENOENT || left == EACCES || left == EPERM || left == EMFILE || left == ENFILE;
  const int code = telling ? left : try_device();
  if (code == ENOENT)
    return unavailable(format(
        "gdr_open failed: %s is missing: load GDRCopy's kernel module (modprobe gdrdrv, or install the gdrdrv-dkms "
        "package); in a container, pass the device in (--device %s)",
        kDevice, kDevice));
  if (code == EACCES || code == EPERM)
    return unavailable(format(
        "gdr_open failed: permission denied for %s: let this user read and write it (chmod 0666, or a udev rule); "
        "in a container, allow the device (--device %s)",
        kDevice, kDevice));
  if (code == EMFILE || code == ENFILE)
    return unavailable(
        format("gdr_open failed: %s: %s: raise the limit (ulimit -n) or close some", kDevice, std::strerror(code)));
  if (code != 0)
    return unavailable(format("gdr_open failed: %s: %s: the gdrdrv module does not work; dmesg may say why", kDevice,
                              std::strerror(code)));
  return unavailable(
      format("gdr_open of %s failed, although %s opens: library and gdrdrv module may be of different "
             "releases; install both from one",
             file.c_str(), kDevice));
}

Error load(const std::string& file, bool named, Gdr* g) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    if (named)
      return unavailable(
          format("TE_LIBGDRAPI is set to %s, which cannot be loaded: %s: correct or unset it", file.c_str(), reason));
    return unavailable(
        format("%s cannot be loaded: GDRCopy is not installed (package libgdrapi, or gdrcopy), or not on the loader's "
               "path: %s",
               file.c_str(), reason));
  }
  if (const char* missing = bind_all(handle, g); missing != nullptr) {
    dlclose(handle);
    return unavailable(
        format("%s has no %s: GDRCopy is too old; 2.0 or newer is needed: install it", file.c_str(), missing));
  }
  g->file = file;
  g->runtime_version(&g->major, &g->minor);
  if (g->major < kOldestMajor) {
    const Error old = unavailable(
        format("%s is GDRCopy %d.%d; 2.0 or newer is needed: install a newer one", file.c_str(), g->major, g->minor));
    dlclose(handle);
    return old;
  }
  GdrContext probe = nullptr;
  if (Error why = open_gdr(*g, &probe)) {
    dlclose(handle);
    return why;
  }
  static_cast<void>(g->close(probe));
  return {};
}

}  // namespace

Error open_gdr(const Gdr& gdr, GdrContext* out) {
  errno = 0;
  const GdrContext made = gdr.open();
  if (made == nullptr) return why_not_open(gdr.file, errno);
  *out = made;
  return {};
}

Error load_gdr(const Gdr** out) {
  static std::mutex mutex;
  static std::map<std::string, Gdr> loaded;
  [[maybe_unused]] static const bool held = (hold_across_forks(&mutex), true);
  const char* variable = std::getenv("TE_LIBGDRAPI");
  const bool named = variable != nullptr && *variable != '\0';
  const std::string file = named ? variable : "libgdrapi.so.2";
  const std::lock_guard lock(mutex);
  auto found = loaded.find(file);
  if (found == loaded.end()) {
    Gdr candidate;
    if (Error error = load(file, named, &candidate)) return error;
    found = loaded.emplace(file, candidate).first;
  }
  *out = &found->second;
  return {};
}

}  // namespace te::gpu
