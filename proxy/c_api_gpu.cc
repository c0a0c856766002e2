// The C entry points of GPU coordination: see native/te.h.
#include <span>

#include "proxy/c_api.h"

using te::Engine;
using te::c_api::with_engine;

extern "C" {

int32_t te_flag_open(te_engine* engine, int32_t device, te_handle* flag, te_error* error) {
  return with_engine(engine, {flag}, error, [&](Engine& e) { return e.open_flag(device, flag); });
}
int32_t te_flag_describe(te_engine* engine, te_handle flag, te_flag_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe_flag(flag, info); });
}
int32_t te_flag_raise(te_engine* engine, te_handle flag, uint64_t by, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.raise_flag(flag, by); });
}
int32_t te_flag_wait(te_engine* engine, te_handle flag, uint64_t at_least, int64_t timeout_ns, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.wait_flag(flag, at_least, timeout_ns); });
}
int32_t te_flag_clear(te_engine* engine, te_handle flag, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.clear_flag(flag); });
}
int32_t te_flag_close(te_engine* engine, te_handle flag, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_flag(flag); });
}
int32_t te_counter_bind(te_engine* engine, te_handle counter, te_handle flag, uint64_t every, const int32_t* peers,
                        uint32_t peer_count, te_handle* binding, te_error* error) {
  return with_engine(
      engine, {binding, peer_count > 0 ? static_cast<const void*>(peers) : engine}, error,
      [&](Engine& e) { return e.bind_counter(counter, flag, every, std::span(peers, peer_count), binding); });
}
int32_t te_binding_close(te_engine* engine, te_handle binding, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_binding(binding); });
}

int32_t te_watcher_open(te_engine* engine, int32_t device, te_handle* watcher, te_error* error) {
  return with_engine(engine, {watcher}, error, [&](Engine& e) { return e.open_watcher(device, watcher); });
}
int32_t te_watcher_describe(te_engine* engine, te_handle watcher, te_watcher_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe_watcher(watcher, info); });
}
int32_t te_watcher_add(te_engine* engine, te_handle watcher, uint64_t by, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.add_to_watcher(watcher, by); });
}
int32_t te_watcher_notify(te_engine* engine, te_handle watcher, uint32_t on, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.notify_watcher(watcher, on != 0); });
}
int32_t te_watcher_take(te_engine* engine, te_handle watcher, uint64_t* before, uint64_t* now, te_error* error) {
  return with_engine(engine, {before, now}, error, [&](Engine& e) { return e.take_watcher(watcher, before, now); });
}
int32_t te_watcher_close(te_engine* engine, te_handle watcher, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_watcher(watcher); });
}

int32_t te_trigger_open(te_engine* engine, const te_trigger_args* trigger, te_handle* handle, te_error* error) {
  return with_engine(engine, {trigger, handle}, error, [&](Engine& e) { return e.open_trigger(*trigger, handle); });
}
int32_t te_trigger_describe(te_engine* engine, te_handle trigger, te_trigger_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe_trigger(trigger, info); });
}
int32_t te_trigger_wait(te_engine* engine, te_handle trigger, uint64_t completed, int64_t timeout_ns, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.wait_trigger(trigger, completed, timeout_ns); });
}
int32_t te_trigger_cancel(te_engine* engine, te_handle trigger, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.cancel_trigger(trigger); });
}
int32_t te_trigger_close(te_engine* engine, te_handle trigger, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_trigger(trigger); });
}

}  // extern "C"
