// Flags: epochs that never fall, raised by the host and with counters, and ended by what makes them useless.
#include "tests/native/coordination_support.h"

namespace te::engine_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kReduced = 20;
#else
constexpr int kReduced = 1;
#endif

Setup mortal(uint32_t nics = 1) {
  return {"sim", "", nics, [](te_settings& s) { s.peer_timeout_ns = kShortLife; }};
}

}  // namespace

TEST_CASE("engine: flag: rises by what is added, and wakes those whose epoch has come") {
  Player player({"sim", "", 1, {}});
  const te_handle flag = open_flag(player), other = open_flag(player);
  CHECK(flag_info(player, flag).kind == TE_WORD_HOST);
  CHECK(flag_info(player, flag).device == -1);
  CHECK(flag_info(player, flag).epoch_device == 0);
  CHECK(wait_flag(player, flag, 0, 0) == TE_OK);
  CHECK(wait_flag(player, flag, 1, 0) == TE_AGAIN);
  CHECK(wait_flag(player, flag, 1, kMs) == TE_AGAIN);
  std::thread raiser([&] {
    te_error error{};
    for (int i = 0; i < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(i % 10 == 0 ? 2000 : 20));
      CHECK(te_flag_raise(player.engine, flag, 1, &error) == TE_OK);
    }
  });
  for (uint64_t epoch = 1; epoch <= 100; ++epoch) {
    REQUIRE(wait_flag(player, flag, epoch) == TE_OK);
    CHECK(load(flag_info(player, flag).epoch_host) >= epoch);
  }
  raiser.join();
  CHECK(flag_info(player, flag).epoch == 100);
  CHECK(te_flag_raise(player.engine, flag, 11, &player.error) == TE_OK);
  CHECK(flagged(player, flag, 111));
  CHECK(flag_info(player, other).epoch == 0);
}

TEST_CASE("engine: flag: a counter that is bound raises it, from the counter's creation on") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    Player& owner = pair.owner;
    const te_handle each = open_flag(owner), thirds = open_flag(owner);
    bind(owner, pair.counter, each);
    for (uint64_t i = 1; i <= 10; ++i) {
      require_ok(pair.write(i * 64, i * 64, 64));
      CHECK(flagged(owner, each, i));
    }
    // Early arrivals are not lost, and neither is the remainder.
    const te_handle binding = bind(owner, pair.counter, thirds, 3);
    CHECK(flagged(owner, thirds, 3));
    for (uint64_t i = 11; i <= 14; ++i) require_ok(pair.write(i * 64, i * 64, 64));
    CHECK(owner.counted(pair.counter, 14));
    CHECK(flagged(owner, thirds, 4));
    CHECK(te_binding_close(owner.engine, binding, &owner.error) == TE_OK);
    CHECK(te_binding_close(owner.engine, binding, &owner.error) == TE_OK);
    for (uint64_t i = 15; i <= 20; ++i) require_ok(pair.write(i * 64, i * 64, 64));
    CHECK(flagged(owner, each, 20));
    CHECK(flag_info(owner, thirds).epoch == 4);
    // Pages come several at a time.
    bind(owner, pair.counter, thirds, 7);
    CHECK(flagged(owner, thirds, 4 + 20 / 7));
  }
}

TEST_CASE("engine: flag: the epochs of several counters add up") {
  Pair pair({"sim", "", 2, {}});
  Player& owner = pair.owner;
  const te_handle flag = open_flag(owner);
  std::vector<te_handle> counters, remotes;
  for (int i = 0; i < 5; ++i) {
    counters.push_back(owner.counter());
    remotes.push_back(pair.writer.remote_counter(owner, counters.back()));
    bind(owner, counters.back(), flag, static_cast<uint64_t>(i + 1));
  }
  for (int turn = 0; turn < 60; ++turn)
    for (const te_handle counter : remotes) require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, 8, counter));
  CHECK(flagged(owner, flag, 60 + 30 + 20 + 15 + 12));
  // A counter that is closed takes its bindings along; its number may serve another.
  CHECK(te_counter_close(owner.engine, counters[0], kPatience, &owner.error) == TE_OK);
  const te_handle next = owner.counter();
  require_ok(pair.writer.write(pair.source, 0, pair.remote, 0, 8, pair.writer.remote_counter(owner, next)));
  CHECK(owner.counted(next, 1));
  CHECK(flag_info(owner, flag).epoch == 137);
}

TEST_CASE("engine: flag: a million epochs, and whoever sees one sees the bytes that it stands for") {
  constexpr uint64_t kSlots = 128, kBytes = 64;
  Pair pair({"sim", "reorder=0", 1, {}}, kSlots * kBytes);
  const auto rounds = static_cast<uint64_t>(scaled(1'000'000 / kReduced));
  const te_handle flag = open_flag(pair.owner);
  bind(pair.owner, pair.counter, flag);
  const uint64_t word = flag_info(pair.owner, flag).epoch_host;
  std::atomic<uint64_t> consumed{0}, wrong{0};
  const uint8_t* landed = pair.target.data();
  std::thread reader([&] {
    for (uint64_t round = 1; round <= rounds; ++round) {
      while (load(word) < round) std::this_thread::yield();
      uint64_t payload[kBytes / 8];
      std::memcpy(payload, landed + round % kSlots * kBytes, kBytes);
      for (const uint64_t part : payload)
        if (part != round) wrong.fetch_add(1, std::memory_order_relaxed);
      consumed.store(round, std::memory_order_release);
    }
  });
  std::vector<Transfer> transfers(kSlots);
  bool all_well = true;
  for (uint64_t round = 1; round <= rounds; ++round) {
    const uint64_t slot = round % kSlots;
    while (consumed.load(std::memory_order_acquire) + kSlots <= round) std::this_thread::yield();
    if (transfers[slot].get() != nullptr) {
      all_well &= transfers[slot].wait() == TE_OK;
      transfers[slot].release();
    }
    auto* bytes = reinterpret_cast<uint64_t*>(pair.source.data() + slot * kBytes);
    std::fill_n(bytes, kBytes / 8, round);
    transfers[slot] = pair.write(slot * kBytes, slot * kBytes, kBytes);
  }
  reader.join();
  CHECK(all_well);
  CHECK(wrong == 0);
  CHECK(flagged(pair.owner, flag, rounds));
}

TEST_CASE("engine: flag: with several NICs and no order, an epoch of n arrivals stands for all n") {
  constexpr uint64_t kBatch = 16, kBytes = 3000;
  Pair pair({"sim", "reorder=1,delay=3", 3, {}}, kBatch * kBytes);
  const te_handle flag = open_flag(pair.owner);
  bind(pair.owner, pair.counter, flag, kBatch);
  const uint64_t word = flag_info(pair.owner, flag).epoch_host;
  const auto rounds = static_cast<uint64_t>(scaled(3000 / std::min(kReduced, 5)));
  std::atomic<uint64_t> consumed{0}, wrong{0};
  std::thread reader([&] {
    for (uint64_t round = 1; round <= rounds; ++round) {
      while (load(word) < round) std::this_thread::yield();
      const uint8_t* bytes = pair.target.data();
      for (uint64_t i = 0; i < kBatch * kBytes; ++i)
        if (bytes[i] != static_cast<uint8_t>(round)) wrong.fetch_add(1, std::memory_order_relaxed);
      consumed.store(round, std::memory_order_release);
    }
  });
  for (uint64_t round = 1; round <= rounds; ++round) {
    std::fill_n(pair.source.data(), kBatch * kBytes, static_cast<uint8_t>(round));
    std::vector<Transfer> transfers;
    for (uint64_t i = 0; i < kBatch; ++i) transfers.push_back(pair.write(i * kBytes, i * kBytes, kBytes));
    for (Transfer& transfer : transfers) require_ok(std::move(transfer));
    REQUIRE(eventually([&] { return consumed.load(std::memory_order_acquire) == round; }));
  }
  reader.join();
  CHECK(wrong == 0);
  CHECK(flagged(pair.owner, flag, rounds));
}

// --- the end of waiting ----------------------------------------------------------------------------------------------------------

TEST_CASE("engine: flag: the loss of a peer that a binding names ends waits, by name") {
  Pair pair(mortal(2));
  Player& owner = pair.owner;
  const te_handle flag = open_flag(owner), unconcerned = open_flag(owner);
  const int32_t peer = owner.peer(pair.writer);
  bind(owner, pair.counter, flag, 1, {peer});
  bind(owner, pair.counter, unconcerned);
  require_ok(pair.write(0, 0, 100));
  CHECK(flagged(owner, flag, 1));
  const uint64_t control = flag_info(owner, flag).control_host;
  CHECK(load(control) == TE_ABORT_NONE);
  pair.writer.inject("kill");
  const int64_t begin = monotonic_ns();
  CHECK(wait_flag(owner, flag, 2) == TE_ERR_PEER_LOST);
  CHECK(owner.error.peer == peer);
  CHECK(monotonic_ns() - begin < 3 * kShortLife);
  CHECK(load(control) == TE_ABORT_PEER_LOST);
  CHECK(flag_info(owner, flag).abort_peer == peer);
  CHECK(wait_flag(owner, flag, 1) == TE_OK);  // it had come
  CHECK(load(flag_info(owner, unconcerned).control_host) == TE_ABORT_NONE);
  CHECK(wait_flag(owner, unconcerned, 2, kMs) == TE_AGAIN);
  // What is bound to the lost is aborted from the start.
  const te_handle late = open_flag(owner);
  bind(owner, owner.counter(), late, 1, {peer});
  CHECK(wait_flag(owner, late, 1) == TE_ERR_PEER_LOST);
  CHECK(te_flag_clear(owner.engine, flag, &owner.error) == TE_OK);
  CHECK(flag_info(owner, flag).abort == TE_ABORT_NONE);
  CHECK(flag_info(owner, flag).abort_peer == -1);
  CHECK(wait_flag(owner, flag, 2, kMs) == TE_AGAIN);
}

TEST_CASE("engine: flag: what a device says in the control words is told") {
  Player player({"sim", "", 1, {}});
  const te_handle flag = open_flag(player);
  auto* control = reinterpret_cast<std::atomic<uint64_t>*>(flag_info(player, flag).control_host);
  control[1].store(3);
  control[0].store(TE_ABORT_DEADLINE);
  CHECK(wait_flag(player, flag, 1) == TE_ERR_TIMEOUT);
  CHECK(flag_info(player, flag).early == 3);
  CHECK(te_flag_clear(player.engine, flag, &player.error) == TE_OK);
  CHECK(flag_info(player, flag).early == 0);
}

TEST_CASE("engine: flag: closing it or the engine ends waits, and its words stay") {
  Player player({"sim", "", 1, {}});
  const te_handle closed = open_flag(player), open = open_flag(player);
  const te_flag_info left = flag_info(player, open);
  const uint64_t control = flag_info(player, closed).control_host;
  const auto in_wait = [&](te_handle flag, auto&& action) {
    int32_t status = TE_OK;
    std::thread waiter([&] {
      te_error error{};
      status = te_flag_wait(player.engine, flag, 1, kPatience, &error);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    action();
    waiter.join();
    return status;
  };
  CHECK(in_wait(closed, [&] { CHECK(te_flag_close(player.engine, closed, &player.error) == TE_OK); }) == TE_ERR_CLOSED);
  CHECK(load(control) == TE_ABORT_CLOSED);
  CHECK(te_flag_close(player.engine, closed, &player.error) == TE_OK);
  CHECK(te_flag_raise(player.engine, closed, 1, &player.error) == TE_ERR_CLOSED);
  te_flag_info info{};
  CHECK(te_flag_describe(player.engine, closed, &info, &player.error) == TE_ERR_CLOSED);
  CHECK(in_wait(open, [&] { CHECK(player.close() == TE_OK); }) == TE_ERR_CLOSED);
  CHECK(load(left.control_host) == TE_ABORT_CLOSED);  // as a kernel would see it
  CHECK(load(left.epoch_host) == 0);
}

TEST_CASE("engine: flag: words are zero for the next, however often they serve") {
  Player player({"sim", "", 1, {}});
  for (int i = 0; i < scaled(3000); ++i) {
    const te_handle flag = open_flag(player);
    CHECK(flag_info(player, flag).epoch == 0);
    CHECK(flag_info(player, flag).abort == TE_ABORT_NONE);
    CHECK(te_flag_raise(player.engine, flag, 5, &player.error) == TE_OK);
    CHECK(te_flag_close(player.engine, flag, &player.error) == TE_OK);
  }
}

TEST_CASE("engine: flag: what cannot work is refused") {
  Player player({"sim", "", 1, {}});
  const te_handle flag = open_flag(player), counter = player.counter();
  te_handle binding = TE_NONE;
  const int32_t nobody = 12345;
  CHECK(te_counter_bind(player.engine, counter, flag, 0, nullptr, 0, &binding, &player.error) == TE_ERR_ARGUMENT);
  CHECK(te_counter_bind(player.engine, counter, flag, 1, &nobody, 1, &binding, &player.error) == TE_ERR_ARGUMENT);
  CHECK(te_counter_bind(player.engine, counter, 999, 1, nullptr, 0, &binding, &player.error) == TE_ERR_CLOSED);
  CHECK(te_counter_bind(player.engine, 999, flag, 1, nullptr, 0, &binding, &player.error) == TE_ERR_CLOSED);
  CHECK(binding == TE_NONE);
  CHECK(te_flag_wait(player.engine, 999, 1, 0, &player.error) == TE_ERR_CLOSED);
  CHECK(te_flag_open(player.engine, -1, nullptr, &player.error) == TE_ERR_ARGUMENT);
}

TEST_CASE("engine: flag: bindings come and go under load") {
  Pair pair({"sim", "", 2, {}});
  std::atomic<bool> stop{false};
  std::vector<std::thread> churners;
  for (int k = 0; k < 3; ++k)
    churners.emplace_back([&] {
      te_error error{};
      while (!stop.load()) {
        te_handle flag = TE_NONE, binding = TE_NONE;
        CHECK(te_flag_open(pair.owner.engine, -1, &flag, &error) == TE_OK);
        CHECK(te_counter_bind(pair.owner.engine, pair.counter, flag, 2, nullptr, 0, &binding, &error) == TE_OK);
        CHECK(te_flag_raise(pair.owner.engine, flag, 1, &error) == TE_OK);
        CHECK(te_flag_close(pair.owner.engine, flag, &error) == TE_OK);  // before its binding
        CHECK(te_binding_close(pair.owner.engine, binding, &error) == TE_OK);
      }
    });
  const te_handle steady = open_flag(pair.owner);
  bind(pair.owner, pair.counter, steady);
  const int rounds = scaled(3000);
  for (int i = 0; i < rounds; ++i) require_ok(pair.write(0, 0, 64));
  stop = true;
  for (std::thread& churner : churners) churner.join();
  CHECK(flagged(pair.owner, steady, static_cast<uint64_t>(rounds)));
}

}  // namespace te::engine_test
