// What every C entry point does around its call: the handle, the null pointers, the Error. No exception leaves.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <new>

#include "proxy/engine.h"

namespace te::c_api {

inline Engine* engine_of(te_engine* handle) { return reinterpret_cast<Engine*>(handle); }

inline int32_t no_pointer(te_error* error) {
  return export_error(Error(Status::kArgument, "a pointer that the call needs is null"), error);
}

// Runs `body` on an open engine of this process. `needed` are the pointers that must not be null.
template <typename F>
int32_t with_engine(te_engine* handle, std::initializer_list<const void*> needed, te_error* error, F&& body) {
  try {
    if (handle == nullptr) return export_error(Error(Status::kArgument, "no engine"), error);
    if (std::find(needed.begin(), needed.end(), nullptr) != needed.end()) return no_pointer(error);
    if (Error e = engine_of(handle)->check()) return export_error(e, error);
    return export_error(body(*engine_of(handle)), error);
  } catch (const std::bad_alloc&) {
    return export_error(Error(Status::kExhausted, "out of memory"), error);
  } catch (const std::exception& failure) {
    return export_error(Error(Status::kTransport, failure.what()), error);
  }
}

}  // namespace te::c_api
