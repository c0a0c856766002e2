// The functions of libgdrapi.
#include <dlfcn.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "tests/gdr/library.h"

using standin::gdr::Library;
using standin::gdr::Pin;
using te::gpu::GdrContext;
using te::gpu::GdrHandle;
using te::gpu::GdrInfo;
using te::gpu::kGpuPageBytes;

namespace {

// Of the driver's stand-in; null: it is not loaded.
using View = void*(uint64_t);
View* find_view() {
  const char* name = std::getenv("TE_LIBCUDA");
  void* driver = name != nullptr ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  if (driver == nullptr) return nullptr;
  auto* view = reinterpret_cast<View*>(dlsym(driver, "standin_cuda_view"));
  dlclose(driver);  // whoever loaded it still holds it
  return view;
}

// Null: not all of it is device memory of one allocation.
uint8_t* view_range(View* view, uint64_t address, uint64_t bytes) {
  auto* first = static_cast<uint8_t*>(view(address));
  const auto* last = static_cast<uint8_t*>(view(address + bytes - 1));
  return first != nullptr && last == first + (bytes - 1) ? first : nullptr;
}

Pin* find(Library& library, GdrContext owner, GdrHandle handle, const char* caller) {
  const auto found = library.pinned.find(handle.h);
  if (found != library.pinned.end() && found->second.owner == owner) return &found->second;
  library.violation("%s: %lu is no handle of this gdr_t, or was unpinned", caller, handle.h);
  return nullptr;
}

}  // namespace

extern "C" {

GdrContext gdr_open() {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  if (library.options.open != 0) {
    errno = static_cast<int>(library.options.open);
    return nullptr;
  }
  const auto made = reinterpret_cast<GdrContext>(0x6D40'0000'0000u + 16 * ++library.last_handle);
  library.opened.insert(made);
  return made;
}

int gdr_close(GdrContext gdr) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  if (library.opened.erase(gdr) == 0) {
    library.violation("gdr_close: no gdr_t, or one that was closed");
    return EINVAL;
  }
  const size_t left = std::erase_if(library.pinned, [&](const auto& each) { return each.second.owner == gdr; });
  if (left > 0) library.violation("gdr_close: %zu buffers are still pinned", left);
  return 0;
}

int gdr_pin_buffer(GdrContext gdr, unsigned long address, size_t bytes, uint64_t, uint32_t, GdrHandle* handle) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  if (library.opened.count(gdr) == 0 || handle == nullptr) return EINVAL;
  if (library.options.pin != 0) return static_cast<int>(library.options.pin);
  if (address % kGpuPageBytes != 0 || bytes % kGpuPageBytes != 0 || bytes == 0) return EINVAL;
  View* view = find_view();
  uint8_t* seen = view != nullptr ? view_range(view, address, bytes) : nullptr;
  if (seen == nullptr) return EINVAL;
  handle->h = ++library.last_handle;
  library.pinned[handle->h] = {.owner = gdr, .address = address, .bytes = bytes, .view = seen};
  ++library.pins;
  return 0;
}

int gdr_unpin_buffer(GdrContext gdr, GdrHandle handle) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  const Pin* pin = find(library, gdr, handle, "gdr_unpin_buffer");
  if (pin == nullptr) return EINVAL;
  if (pin->mapped_bytes != 0) library.violation("gdr_unpin_buffer: the buffer is still mapped");
  library.pinned.erase(handle.h);
  return 0;
}

int gdr_get_info_v2(GdrContext gdr, GdrHandle handle, GdrInfo* info) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  const Pin* pin = find(library, gdr, handle, "gdr_get_info");
  if (pin == nullptr || info == nullptr) return EINVAL;
  GdrInfo told;
  told.va = pin->address;
  told.mapped_size = pin->bytes;
  told.page_size = kGpuPageBytes;
  told.mapped = told.wc_mapping = pin->mapped_bytes != 0;
  constexpr int kWriteCombining = 1;  // GDR_MAPPING_TYPE_WC
  told.mapping_type = pin->mapped_bytes != 0 ? kWriteCombining : 0;
  const bool typed = library.options.major > 2 || (library.options.major == 2 && library.options.minor >= 5);
  std::memcpy(static_cast<void*>(info), &told, typed ? sizeof told : offsetof(GdrInfo, mapping_type));
  return 0;
}

int gdr_map(GdrContext gdr, GdrHandle handle, void** at, size_t bytes) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  Pin* pin = find(library, gdr, handle, "gdr_map");
  if (pin == nullptr || at == nullptr || bytes == 0 || bytes > pin->bytes) return EINVAL;
  if (library.options.map != 0) return static_cast<int>(library.options.map);
  if (pin->mapped_bytes != 0) {
    library.violation("gdr_map: the buffer is mapped already");
    return EAGAIN;
  }
  pin->mapped_bytes = bytes;
  ++library.maps;
  *at = pin->view;
  return 0;
}

int gdr_unmap(GdrContext gdr, GdrHandle handle, void* at, size_t bytes) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  Pin* pin = find(library, gdr, handle, "gdr_unmap");
  if (pin == nullptr) return EINVAL;
  if (pin->mapped_bytes == 0 || at != pin->view || bytes != pin->mapped_bytes) {
    library.violation("gdr_unmap: %zu bytes at %p are not what is mapped", bytes, at);
    return EINVAL;
  }
  pin->mapped_bytes = 0;
  return 0;
}

void gdr_runtime_get_version(int* major, int* minor) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  *major = library.options.major;
  *minor = library.options.minor;
}

// The types are those that the product's loader has.
static_assert(std::is_same_v<decltype(&gdr_open), decltype(te::gpu::Gdr::open)>);
static_assert(std::is_same_v<decltype(&gdr_close), decltype(te::gpu::Gdr::close)>);
static_assert(std::is_same_v<decltype(&gdr_pin_buffer), decltype(te::gpu::Gdr::pin)>);
static_assert(std::is_same_v<decltype(&gdr_unpin_buffer), decltype(te::gpu::Gdr::unpin)>);
static_assert(std::is_same_v<decltype(&gdr_get_info_v2), decltype(te::gpu::Gdr::info)>);
static_assert(std::is_same_v<decltype(&gdr_map), decltype(te::gpu::Gdr::map)>);
static_assert(std::is_same_v<decltype(&gdr_unmap), decltype(te::gpu::Gdr::unmap)>);
static_assert(std::is_same_v<decltype(&gdr_runtime_get_version), decltype(te::gpu::Gdr::runtime_version)>);

}  // extern "C"
