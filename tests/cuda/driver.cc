// The driver as a whole: its start, its versions and errors, and how each call begins.
#include "tests/cuda/driver.h"

#include <pthread.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "tests/cuda/api.h"

namespace standin::cuda {
namespace {

struct Name {
  CuResult code;
  const char *name, *text;
};
constexpr Name kNames[] = {
    {result::kSuccess, "CUDA_SUCCESS", "no error"},
    {result::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {result::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {result::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {result::kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {result::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {result::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {result::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {result::kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {result::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {result::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {result::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {result::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

CuResult name_of(CuResult code, const char** out, const char* Name::* member) {
  if (out == nullptr) return result::kInvalidValue;
  for (const Name& each : kNames)
    if (each.code == code) return *out = each.*member, result::kSuccess;
  *out = nullptr;
  return result::kInvalidValue;
}

}  // namespace

Driver& Driver::get() {
  static Driver* const driver = [] {
    auto* made = new Driver;
    // The mutex is not held across forks: a caller's own would come after it there, and before it elsewhere. So a child that could find it
    // locked must not ask for it.
    pthread_atfork(nullptr, nullptr, [] { get().forked = get().initialised.load(); });
    return made;
  }();
  return *driver;
}

Driver::Driver() {
  const char* text = std::getenv("TE_STANDIN_CUDA");
  if (text != nullptr && !parse_options(text, &initial)) {
    std::fprintf(stderr, "standin_cuda: TE_STANDIN_CUDA=\"%s\" is not understood; see tests/cuda/standin.h\n", text);
    std::abort();
  }
  options = initial;
}

void Driver::violation(const char* format, ...) {
  ++violations;
  if (options.quiet != 0) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "standin_cuda: %s\n", text);
}

Context* Driver::find_context(CuContext handle) {
  const auto found = contexts.find(handle);
  return found == contexts.end() ? nullptr : &found->second;
}

Call::Call(Needs needs) {
  if (d.forked) {
    status = result::kNotInitialized;
    return;
  }
  lock.lock();
  if (needs == Needs::kNothing) return;
  if (!d.initialised) {
    status = result::kNotInitialized;
    return;
  }
  if (needs == Needs::kDriver) return;
  if (!current().empty()) context = d.find_context(current().back());
  status = context == nullptr ? result::kInvalidContext : context->error;
}

}  // namespace standin::cuda

using namespace standin::cuda;

extern "C" {

CuResult cuInit(unsigned flags) {
  Call call(Call::Needs::kNothing);
  if (call.failed()) return call.status;
  if (flags != 0) return result::kInvalidValue;
  if (call.d.options.init != 0) return static_cast<CuResult>(call.d.options.init);
  if (call.d.options.devices == 0) return result::kNoDevice;
  call.d.initialised = true;
  return result::kSuccess;
}

CuResult cuDriverGetVersion(int* version) {
  const Call call(Call::Needs::kNothing);
  if (call.failed()) return call.status;
  if (version == nullptr) return result::kInvalidValue;
  *version = static_cast<int>(call.d.options.version);
  return result::kSuccess;
}

CuResult cuGetErrorName(CuResult code, const char** out) { return name_of(code, out, &Name::name); }

CuResult cuGetErrorString(CuResult code, const char** out) { return name_of(code, out, &Name::text); }

}  // extern "C"
