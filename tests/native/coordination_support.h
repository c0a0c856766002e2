// Shared by the tests of flags and watchers: an engine's handles of them.
#pragma once

#include <atomic>

#include "tests/native/engine_support.h"

namespace te::engine_test {

inline te_handle open_flag(Player& player, int32_t device = -1) {
  te_handle flag = TE_NONE;
  REQUIRE_MESSAGE(te_flag_open(player.engine, device, &flag, &player.error) == TE_OK, player.error.message);
  return flag;
}
inline te_flag_info flag_info(Player& player, te_handle flag) {
  te_flag_info info{};
  REQUIRE_MESSAGE(te_flag_describe(player.engine, flag, &info, &player.error) == TE_OK, player.error.message);
  return info;
}
inline int32_t wait_flag(Player& player, te_handle flag, uint64_t at_least, int64_t timeout_ns = kPatience) {
  return te_flag_wait(player.engine, flag, at_least, timeout_ns, &player.error);
}
// Reached, and not passed.
inline bool flagged(Player& player, te_handle flag, uint64_t exactly) {
  return wait_flag(player, flag, exactly) == TE_OK && flag_info(player, flag).epoch == exactly;
}
inline te_handle bind(Player& player, te_handle counter, te_handle flag, uint64_t every = 1,
                      std::vector<int32_t> peers = {}) {
  te_handle binding = TE_NONE;
  const int32_t status = te_counter_bind(player.engine, counter, flag, every, peers.empty() ? nullptr : peers.data(),
                                         static_cast<uint32_t>(peers.size()), &binding, &player.error);
  REQUIRE_MESSAGE(status == TE_OK, player.error.message);
  return binding;
}

inline te_handle open_watcher(Player& player, int32_t device = -1) {
  te_handle watcher = TE_NONE;
  REQUIRE_MESSAGE(te_watcher_open(player.engine, device, &watcher, &player.error) == TE_OK, player.error.message);
  return watcher;
}
inline te_watcher_info watcher_info(Player& player, te_handle watcher) {
  te_watcher_info info{};
  REQUIRE_MESSAGE(te_watcher_describe(player.engine, watcher, &info, &player.error) == TE_OK, player.error.message);
  return info;
}
inline void add(Player& player, te_handle watcher, uint64_t by = 1) {
  te_error error{};  // of the calling thread
  REQUIRE_MESSAGE(te_watcher_add(player.engine, watcher, by, &error) == TE_OK, error.message);
}
inline te_handle open_trigger(Player& player, const te_trigger_args& args) {
  te_handle trigger = TE_NONE;
  REQUIRE_MESSAGE(te_trigger_open(player.engine, &args, &trigger, &player.error) == TE_OK, player.error.message);
  return trigger;
}
inline te_handle open_trigger(Player& player, te_handle watcher, te_handle prepared, uint64_t every = 1,
                              uint64_t first = 1) {
  return open_trigger(player, {watcher, prepared, TE_NONE, TE_NONE, every, first, -1});
}
inline te_trigger_info trigger_info(Player& player, te_handle trigger) {
  te_trigger_info info{};
  REQUIRE_MESSAGE(te_trigger_describe(player.engine, trigger, &info, &player.error) == TE_OK, player.error.message);
  return info;
}
// So many have fired, and all of these have ended.
inline bool ended(Player& player, te_handle trigger, uint64_t fired) {
  return eventually([&] {
    const te_trigger_info info = trigger_info(player, trigger);
    return info.fired == fired && info.completed + info.failed == fired;
  });
}
inline te_handle prepare(Pair& pair, uint64_t from, uint64_t to, uint64_t length, bool counted = true) {
  te_handle prepared = TE_NONE;
  const te_write_args w{
      pair.source.region, pair.remote, counted ? pair.remote_counter : te_handle{TE_NONE}, 0, from, to, length};
  REQUIRE_MESSAGE(te_prepare_write(pair.writer.engine, &w, &prepared, &pair.writer.error) == TE_OK,
                  pair.writer.error.message);
  return prepared;
}

// The word at an address that the engine gave.
inline uint64_t load(uint64_t address) {
  return reinterpret_cast<const std::atomic<uint64_t>*>(address)->load(std::memory_order_acquire);
}

}  // namespace te::engine_test
