// Flags and watchers of devices over the stand-ins: of which kind they are, what the device sees, and what is left in the end.
#include <map>

#include "tests/native/coordination_support.h"
#include "tests/native/gdr_support.h"

namespace te::engine_test {
namespace {

using test::GpuStandins;
using test::ReadCosts;
using test::Variable;

constexpr uint32_t kFlagsOfBlock = 1024;

Setup with_gdr(uint32_t gdr, uint32_t nics = 1, int64_t peer_timeout_ns = kPatience) {
  return {"sim", "", nics, [=](te_settings& s) {
            s.gdr = gdr;
            s.peer_timeout_ns = peer_timeout_ns;
          }};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The device sees this epoch now, or soon: in GPU memory the number may be there for the host a moment earlier.
bool device_sees(const GpuStandins& gpus, uint64_t at, uint64_t value) {
  return eventually([&] { return gpus.seen(at) == value; });
}

int32_t try_flag(Player& player, int32_t device, te_handle* flag) {
  return te_flag_open(player.engine, device, flag, &player.error);
}

}  // namespace

TEST_CASE("engine: words: flags lie in GPU memory where the CPU can store there, and the device sees their epochs") {
  for (const char* place : {"", "offset=512"})
    for (const int32_t device : {0, 1})
      for (const uint32_t wish : {TE_GDR_AUTO, TE_GDR_OFF, TE_GDR_REQUIRE}) {
        CAPTURE(place);
        CAPTURE(device);
        CAPTURE(wish);
        GpuStandins gpus(place);
        Pair pair(with_gdr(wish));
        Player& owner = pair.owner;
        const te_handle flag = open_flag(owner, device), other = open_flag(owner, device);
        const te_flag_info info = flag_info(owner, flag);
        CHECK(info.kind == (wish == TE_GDR_OFF ? TE_WORD_MAPPED : TE_WORD_GDR));
        CHECK(info.device == device);
        CHECK(gpus.seen(info.epoch_device) == 0);
        CHECK(gpus.seen(info.control_device) == TE_ABORT_NONE);
        CHECK(gpus.seen(info.taken_device) == 0);
        CHECK(te_flag_raise(owner.engine, flag, 5, &owner.error) == TE_OK);
        CHECK(gpus.seen(info.epoch_device) == 5);
        bind(owner, pair.counter, flag);
        for (uint64_t i = 1; i <= 20; ++i) {
          require_ok(pair.write(0, 0, 64));
          CHECK(flagged(owner, flag, 5 + i));
          CHECK(device_sees(gpus, info.epoch_device, 5 + i));
          CHECK(load(info.epoch_host) == 5 + i);
        }
        CHECK(gpus.seen(flag_info(owner, other).epoch_device) == 0);
        CHECK(te_flag_close(owner.engine, flag, &owner.error) == TE_OK);
        CHECK(gpus.seen(info.control_device) == TE_ABORT_CLOSED);
      }
}

TEST_CASE("engine: words: without GDRCopy they are the host's, or refused with its reason where it is required") {
  const struct {
    const char *options, *says;
  } cases[] = {{"open=13", "permission denied for /dev/gdrdrv"},
               {"open=2", "/dev/gdrdrv is missing"},
               {"version=1.0", "is GDRCopy 1.0"},
               {"pin=12", "gdr_pin_buffer"},
               {"map=12", "gdr_map"}};
  for (const auto& each : cases) {
    CAPTURE(each.options);
    GpuStandins gpus("", each.options);
    {
      Player player(with_gdr(TE_GDR_AUTO));
      CHECK(flag_info(player, open_flag(player, 0)).kind == TE_WORD_MAPPED);
      CHECK(watcher_info(player, open_watcher(player, 1)).kind == TE_WORD_MAPPED);
    }
    Player player(with_gdr(TE_GDR_REQUIRE));
    te_handle handle = TE_NONE;
    for (int i = 0; i < 2; ++i) {
      CHECK(try_flag(player, i, &handle) == TE_ERR_TRANSPORT_UNAVAILABLE);
      CAPTURE(player.error.message);
      CHECK(contains(player.error.message, "setting gdr is \"require\""));
      CHECK(contains(player.error.message, each.says));
      CHECK(te_watcher_open(player.engine, i, &handle, &player.error) == TE_ERR_TRANSPORT_UNAVAILABLE);
      CHECK(contains(player.error.message, each.says));
    }
    CHECK(handle == TE_NONE);
    CHECK(flag_info(player, open_flag(player)).kind == TE_WORD_HOST);
    CHECK(gpus.standin.statistic("allocations") == 0);
    gpus.gdr.configure("");  // put right, it works
    CHECK(flag_info(player, open_flag(player, 0)).kind == TE_WORD_GDR);
  }
}

TEST_CASE("engine: words: a library that is missing is the reason, too, and so is a driver") {
  GpuStandins gpus;
  const Variable nowhere("TE_LIBGDRAPI", "/nowhere/libgdrapi.so.2");
  Player player(with_gdr(TE_GDR_REQUIRE)), content(with_gdr(TE_GDR_AUTO));
  te_handle handle = TE_NONE;
  CHECK(try_flag(player, 0, &handle) == TE_ERR_TRANSPORT_UNAVAILABLE);
  CHECK(contains(player.error.message, "TE_LIBGDRAPI is set to /nowhere/libgdrapi.so.2"));
  CHECK(flag_info(content, open_flag(content, 0)).kind == TE_WORD_MAPPED);
  CHECK(try_flag(content, 7, &handle) == TE_ERR_CONFIG);
  CHECK(contains(content.error.message, "there is no device cuda:7"));
  const Variable no_driver("TE_LIBCUDA", "/nowhere/libcuda.so.1");
  CHECK(try_flag(content, 1, &handle) == TE_ERR_TRANSPORT_UNAVAILABLE);
  CHECK(contains(content.error.message, "TE_LIBCUDA is set to /nowhere/libcuda.so.1"));
  CHECK(handle == TE_NONE);
}

TEST_CASE("engine: words: an allocation that fails refuses the flag alone, and takes nothing") {
  GpuStandins gpus;
  Player player(with_gdr(TE_GDR_AUTO));
  te_handle handle = TE_NONE;
  gpus.standin.configure("host_alloc_fail=1");
  CHECK(try_flag(player, 0, &handle) == TE_ERR_EXHAUSTED);
  CHECK(contains(player.error.message, "cuMemHostAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY"));
  CHECK(player.error.provider_status == gpu::result::kOutOfMemory);
  CHECK(gpus.standin.statistic("allocations") == 0);
  gpus.standin.configure("");
  std::vector<te_handle> flags;
  for (uint32_t i = 0; i < kFlagsOfBlock; ++i) flags.push_back(open_flag(player, 0));
  gpus.standin.configure("host_alloc_fail=1");  // the epoch's block can be made, that of the control words cannot
  for (int i = 0; i < 3; ++i) CHECK(try_flag(player, 0, &handle) == TE_ERR_EXHAUSTED);
  CHECK(handle == TE_NONE);
  CHECK(te_flag_close(player.engine, flags.back(), &player.error) == TE_OK);
  CHECK(flag_info(player, open_flag(player, 0)).kind == TE_WORD_GDR);
}

TEST_CASE("engine: words: when the GPU's window is full the next flags are the host's, unless that is ruled out") {
  for (const uint32_t wish : {TE_GDR_AUTO, TE_GDR_REQUIRE}) {
    CAPTURE(wish);
    GpuStandins gpus;
    Pair pair(with_gdr(wish));
    Player& owner = pair.owner;
    std::vector<te_handle> flags;
    for (uint32_t i = 0; i < kFlagsOfBlock; ++i) flags.push_back(open_flag(owner, 0));
    gpus.gdr.configure("pin=12");
    te_handle more = TE_NONE;
    if (wish == TE_GDR_REQUIRE) {
      CHECK(try_flag(owner, 0, &more) == TE_ERR_TRANSPORT_UNAVAILABLE);
      CHECK(contains(owner.error.message, "setting gdr is \"require\": gdr_pin_buffer"));
      more = open_flag(owner);
    } else {
      more = open_flag(owner, 0);
      CHECK(flag_info(owner, more).kind == TE_WORD_MAPPED);
    }
    bind(owner, pair.counter, more);
    bind(owner, pair.counter, flags.back());
    require_ok(pair.write(0, 0, 64));
    CHECK(flagged(owner, more, 1));
    CHECK(flagged(owner, flags.back(), 1));
    CHECK(device_sees(gpus, flag_info(owner, flags.back()).epoch_device, 1));
    // Both kinds come back to where they are from.
    for (int turn = 0; turn < 3; ++turn) {
      CHECK(te_flag_close(owner.engine, flags[5], &owner.error) == TE_OK);
      flags[5] = open_flag(owner, 0);
      CHECK(flag_info(owner, flags[5]).kind == TE_WORD_GDR);
      CHECK(te_flag_close(owner.engine, more, &owner.error) == TE_OK);
      more = open_flag(owner, wish == TE_GDR_REQUIRE ? -1 : 0);
      CHECK(flag_info(owner, more).kind == (wish == TE_GDR_REQUIRE ? TE_WORD_HOST : TE_WORD_MAPPED));
    }
    gpus.gdr.configure("");
    CHECK(flag_info(owner, open_flag(owner, 0)).kind == TE_WORD_GDR);
  }
}

TEST_CASE("engine: words: when the GPU's memory is full watchers are the host's, and flags are refused as exhausted") {
  GpuStandins gpus("memory=65536");
  Player player(with_gdr(TE_GDR_AUTO)), strict(with_gdr(TE_GDR_REQUIRE));
  CHECK(watcher_info(player, open_watcher(player, 0)).kind == TE_WORD_MAPPED);
  te_handle handle = TE_NONE;
  CHECK(te_watcher_open(strict.engine, 0, &handle, &strict.error) == TE_ERR_EXHAUSTED);
  CHECK(contains(strict.error.message, "setting gdr is \"require\": cuMemAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY"));
  gpus.standin.configure("memory=1000");  // not even for what waits on the device have consumed
  CHECK(try_flag(player, 0, &handle) == TE_ERR_EXHAUSTED);
  CHECK(handle == TE_NONE);
  gpus.standin.configure("");
  CHECK(flag_info(player, open_flag(player, 0)).kind == TE_WORD_MAPPED);  // what was found first stays
  CHECK(flag_info(strict, open_flag(strict, 0)).kind == TE_WORD_GDR);
}

// --- the end of waiting ----------------------------------------------------------------------------------------------------------

TEST_CASE("engine: words: the device finds the reason to abort in its control words") {
  for (const uint32_t wish : {TE_GDR_OFF, TE_GDR_REQUIRE}) {
    CAPTURE(wish);
    GpuStandins gpus;
    Pair pair(with_gdr(wish, 2, kShortLife));
    Player& owner = pair.owner;
    const te_handle bound = open_flag(owner, 0), closed = open_flag(owner, 1), open = open_flag(owner, 1);
    const int32_t peer = owner.peer(pair.writer);
    bind(owner, pair.counter, bound, 1, {peer});
    require_ok(pair.write(0, 0, 64));
    CHECK(flagged(owner, bound, 1));
    const te_flag_info of_bound = flag_info(owner, bound), of_closed = flag_info(owner, closed),
                       of_open = flag_info(owner, open);
    pair.writer.inject("kill");
    CHECK(wait_flag(owner, bound, 2) == TE_ERR_PEER_LOST);
    CHECK(gpus.seen(of_bound.control_device) == TE_ABORT_PEER_LOST);
    CHECK(te_flag_clear(owner.engine, bound, &owner.error) == TE_OK);
    CHECK(gpus.seen(of_bound.control_device) == TE_ABORT_NONE);
    CHECK(te_flag_close(owner.engine, closed, &owner.error) == TE_OK);
    CHECK(gpus.seen(of_closed.control_device) == TE_ABORT_CLOSED);
    CHECK(gpus.seen(of_open.control_device) == TE_ABORT_NONE);
    gpus.raise(of_open.control_device + 8);  // a wait on the device has left
    CHECK(flag_info(owner, open).early == 1);
    static_cast<void>(owner.close());
    CHECK(gpus.seen(of_open.control_device) == TE_ABORT_CLOSED);
    CHECK(gpus.seen(of_open.epoch_device) == 0);
    CHECK(gpus.seen(of_bound.epoch_device) == 1);
  }
}

TEST_CASE("engine: words: a wait of the host sees what the device says in the control words") {
  GpuStandins gpus;
  Player player(with_gdr(TE_GDR_AUTO));
  const te_handle flag = open_flag(player, 0);
  const uint64_t control = flag_info(player, flag).control_device;
  std::thread waiter([&] {
    te_error error{};
    CHECK(te_flag_wait(player.engine, flag, 1, kPatience, &error) == TE_ERR_TIMEOUT);
  });
  gpus.raise(control, TE_ABORT_DEADLINE);  // nobody wakes the waiter
  waiter.join();
}

TEST_CASE("engine: words: they last until the engine is freed, whatever was closed before") {
  GpuStandins gpus("offset=512");
  const auto held = [&] {
    return std::map<std::string, uint64_t>{{"allocations", gpus.standin.statistic("allocations")},
                                           {"host", gpus.standin.statistic("host_allocations")},
                                           {"pinned", gpus.gdr.statistic("pinned")},
                                           {"mapped", gpus.gdr.statistic("mapped")},
                                           {"opened", gpus.gdr.statistic("opened")}};
  };
  const ReadCosts costs(10, 10);
  const auto before = held();
  Player player(with_gdr(TE_GDR_AUTO));
  CHECK(held() == before);
  std::vector<te_handle> flags;
  for (uint32_t i = 0; i < 2 * kFlagsOfBlock + 1; ++i) flags.push_back(open_flag(player, i < 10 ? 1 : 0));
  const te_flag_info first = flag_info(player, flags[0]), last = flag_info(player, flags.back());
  const te_handle watcher = open_watcher(player, 1);
  const uint64_t word = watcher_info(player, watcher).device_pointer;
  CHECK(te_flag_raise(player.engine, flags.back(), 9, &player.error) == TE_OK);
  const auto there = held();
  for (const te_handle flag : flags) CHECK(te_flag_close(player.engine, flag, &player.error) == TE_OK);
  CHECK(te_watcher_close(player.engine, watcher, &player.error) == TE_OK);
  CHECK(held() == there);
  CHECK(player.close() == TE_OK);
  CHECK(held() == there);
  CHECK(gpus.seen(first.control_device) == TE_ABORT_CLOSED);
  CHECK(gpus.seen(last.epoch_device) == 9);
  gpus.raise(word);  // by a kernel that was left behind
  player.free();
  CHECK(held() == before);
}

// --- watchers --------------------------------------------------------------------------------------------------------------------

TEST_CASE("engine: words: watchers lie where the CPU reads at less cost, and fire when the device raises them") {
  const struct {
    uint32_t wish;
    double mapped, gdr;
    uint32_t kind;
  } cases[] = {{TE_GDR_AUTO, 5, 900, TE_WORD_MAPPED}, {TE_GDR_AUTO, 900, 5, TE_WORD_GDR},
               {TE_GDR_AUTO, 5, 5, TE_WORD_GDR},      {TE_GDR_REQUIRE, 5, 900, TE_WORD_MAPPED},
               {TE_GDR_REQUIRE, 900, 5, TE_WORD_GDR}, {TE_GDR_OFF, 900, 5, TE_WORD_MAPPED}};
  for (const auto& each : cases)
    for (const int32_t device : {0, 1}) {
      CAPTURE(each.kind);
      CAPTURE(each.wish);
      GpuStandins gpus("offset=512");
      const ReadCosts costs(each.mapped, each.gdr);
      Pair pair(with_gdr(each.wish));
      Player& writer = pair.writer;
      const te_handle watcher = open_watcher(writer, device), posted = open_flag(writer, device);
      const te_watcher_info info = watcher_info(writer, watcher);
      CHECK(info.kind == each.kind);
      CHECK(info.device == device);
      CHECK(gpus.seen(info.device_pointer) == 0);
      const te_handle trigger =
          open_trigger(writer, {watcher, prepare(pair, 100, 20000, 3000), posted, TE_NONE, 1, 1, -1});
      for (uint64_t round = 1; round <= 10; ++round) {
        pair.target.poison();
        gpus.raise(info.device_pointer);
        CHECK(pair.owner.counted(pair.counter, round));
        CHECK(pair.landed(100, 20000, 3000));
      }
      gpus.raise(info.device_pointer, 30);
      CHECK(pair.owner.counted(pair.counter, 40));
      CHECK(ended(writer, trigger, 40));
      CHECK(device_sees(gpus, flag_info(writer, posted).epoch_device, 40));
      const int32_t added = te_watcher_add(writer.engine, watcher, 1, &writer.error);
      CHECK(added == (each.kind == TE_WORD_GDR ? TE_ERR_ARGUMENT : TE_OK));
      if (added == TE_OK) CHECK(pair.owner.counted(pair.counter, 41));
      else CHECK(contains(writer.error.message, "a kernel can"));
    }
}

TEST_CASE("engine: words: watchers in GPU memory give way to the host's when the window is full") {
  GpuStandins gpus;
  const ReadCosts costs(900, 5);
  Player player(with_gdr(TE_GDR_AUTO)), strict(with_gdr(TE_GDR_REQUIRE));
  open_flag(player, 0);
  open_flag(strict, 0);
  gpus.gdr.configure("pin=12");
  CHECK(watcher_info(player, open_watcher(player, 0)).kind == TE_WORD_MAPPED);
  te_handle watcher = TE_NONE;
  CHECK(te_watcher_open(strict.engine, 0, &watcher, &strict.error) == TE_ERR_TRANSPORT_UNAVAILABLE);
  CHECK(contains(strict.error.message, "setting gdr is \"require\""));
  gpus.gdr.configure("");
  CHECK(watcher_info(player, open_watcher(player, 0)).kind == TE_WORD_GDR);
}

// --- threads ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("engine: words: an epoch in GPU memory never falls, whoever raises it, and stands for what came before") {
  GpuStandins gpus;
  Pair pair(with_gdr(TE_GDR_REQUIRE));
  Player& owner = pair.owner;
  const te_handle flag = open_flag(owner, 0);
  bind(owner, pair.counter, flag);
  const uint64_t at = flag_info(owner, flag).epoch_device;
  const auto writes = static_cast<uint64_t>(scaled(2000)), raises = static_cast<uint64_t>(scaled(20'000));
  constexpr uint64_t kRaisers = 3;
  const uint64_t last = writes + kRaisers * raises;
  std::atomic<uint64_t> published[kRaisers] = {}, wrong{0};
  std::atomic<bool> stop{false};
  std::thread device([&] {
    for (uint64_t seen = 0; seen < last && !stop.load();) {
      const uint64_t now = gpus.seen(at);
      if (now < seen) wrong.fetch_add(1);
      // So many are behind it, and each had said so before it raised.
      uint64_t said = writes;
      for (const auto& each : published) said += each.load(std::memory_order_relaxed);
      if (said < now) wrong.fetch_add(1);
      if (now == seen) std::this_thread::yield();
      seen = now;
    }
  });
  std::vector<std::thread> raisers;
  for (auto& mine : published)
    raisers.emplace_back([&] {
      te_error error{};
      for (uint64_t i = 1; i <= raises; ++i) {
        mine.store(i, std::memory_order_relaxed);
        if (te_flag_raise(owner.engine, flag, 1, &error) != TE_OK) wrong.fetch_add(1);
      }
    });
  for (uint64_t i = 0; i < writes; ++i) require_ok(pair.write(0, 0, 64));
  for (std::thread& raiser : raisers) raiser.join();
  CHECK(flagged(owner, flag, last));
  CHECK(device_sees(gpus, at, last));
  stop = true;
  device.join();
  CHECK(wrong == 0);
}

TEST_CASE("engine: words: once raises at the same time have returned, the device has them all") {
  GpuStandins gpus;
  Player player(with_gdr(TE_GDR_REQUIRE));
  const te_handle flag = open_flag(player, 0);
  const uint64_t at = flag_info(player, flag).epoch_device;
  constexpr uint64_t kRaisers = 2;
  const auto rounds = static_cast<uint64_t>(scaled(30'000));
  std::atomic<uint64_t> begun{0}, returned{0}, failed{0}, missing{0};
  const auto await = [](const std::atomic<uint64_t>& number, uint64_t at_least) {
    for (uint64_t i = 1; number.load() < at_least; ++i)
      if (i % 1000 == 0) std::this_thread::yield();
  };
  std::vector<std::thread> raisers;
  for (uint64_t k = 0; k < kRaisers; ++k)
    raisers.emplace_back([&, k] {
      te_error error{};
      for (uint64_t round = 1; round <= rounds; ++round) {
        if (k == 0) {
          await(returned, kRaisers * (round - 1));
          if (gpus.seen(at) != kRaisers * (round - 1)) missing.fetch_add(1);
          begun.store(round);
        }
        await(begun, round);
        if (te_flag_raise(player.engine, flag, 1, &error) != TE_OK) failed.fetch_add(1);
        returned.fetch_add(1);
      }
    });
  for (std::thread& raiser : raisers) raiser.join();
  CHECK(gpus.seen(at) == kRaisers * rounds);
  CHECK(missing == 0);
  CHECK(failed == 0);
}

TEST_CASE("engine: words: flags and watchers of both devices come and go in several threads of two engines") {
  GpuStandins gpus("offset=512");
  const ReadCosts costs(10, 10);
  {
    Pair pair(with_gdr(TE_GDR_AUTO, 2));
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> churners;
    for (int k = 0; k < 4; ++k)
      churners.emplace_back([&, k] {
        te_engine* engine = k % 2 == 0 ? pair.owner.engine : pair.writer.engine;
        const te_handle counter = k % 2 == 0 ? pair.counter : te_handle{TE_NONE};
        const auto fine = [&](int32_t status) {
          if (status != TE_OK) wrong.fetch_add(1);
        };
        te_error error{};
        while (!stop.load()) {
          std::vector<te_handle> flags(20), watchers(20);
          for (size_t i = 0; i < flags.size(); ++i) {
            const auto device = static_cast<int32_t>(i % 2);
            fine(te_flag_open(engine, device, &flags[i], &error));
            fine(te_watcher_open(engine, device, &watchers[i], &error));
            te_handle binding = TE_NONE;
            if (counter != TE_NONE) fine(te_counter_bind(engine, counter, flags[i], 1, nullptr, 0, &binding, &error));
            fine(te_flag_raise(engine, flags[i], 3, &error));
            te_flag_info info{};
            fine(te_flag_describe(engine, flags[i], &info, &error));
            if (info.epoch < 3 || info.kind != TE_WORD_GDR) wrong.fetch_add(1);
          }
          for (size_t i = 0; i < flags.size(); ++i) {
            fine(te_flag_close(engine, flags[i], &error));
            fine(te_watcher_close(engine, watchers[i], &error));
          }
        }
      });
    const te_handle steady[] = {open_flag(pair.owner, 0), open_flag(pair.owner, 1)};
    for (const te_handle flag : steady) bind(pair.owner, pair.counter, flag);
    const auto rounds = static_cast<uint64_t>(scaled(300));
    for (uint64_t i = 0; i < rounds; ++i) require_ok(pair.write(0, 0, 64));
    for (const te_handle flag : steady) {
      CHECK(flagged(pair.owner, flag, rounds));
      CHECK(device_sees(gpus, flag_info(pair.owner, flag).epoch_device, rounds));
    }
    stop = true;
    for (std::thread& churner : churners) churner.join();
    CHECK(wrong == 0);
  }
  CHECK(gpus.gdr.statistic("pinned") == 0);
}

}  // namespace te::engine_test
