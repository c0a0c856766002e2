// The simulated transport under threads: each engine's worker drives its own provider while others run, registers, die.
#include <atomic>
#include <thread>

#include "native/sim/random.h"
#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim;
using namespace te::sim::test;

namespace {

constexpr int kRounds = 3'000;
constexpr size_t kWorkers = 4;
constexpr size_t kStride = 4096;  // each pair of workers has a strip of its own at the target

// Posts, polls, sleeps-to-be, registers and resets, for a bounded number of rounds.
void work(Player& self, const std::vector<PathId>& paths, const std::vector<Player*>& peers, size_t index) {
  Random random(index + 1);
  std::vector<Completion> out(64);
  std::vector<size_t> idle;
  for (size_t i = 0; i < 1024; ++i) idle.push_back(i);
  for (int round = 0; round < kRounds; ++round) {
    const size_t to = random.below(paths.size());
    if (!idle.empty()) {
      WorkRequest request = self.write(paths[to], *peers[to], idle.back(), 32768, index * kStride, 64);
      if (round % 3 == 0) request.opcode = Opcode::kSend;
      if (round % 3 == 1) request.opcode = Opcode::kWriteImmediate;
      if (self.post(request).posted == 1) idle.pop_back();
    }
    if (round % 2 == 0) {
      const size_t slot = random.below(64);
      static_cast<void>(self.provider->post_receive(0, self.memory.data() + 40000 + slot * 64, 64,
                                                    self.keys[0].local_key, self.context(2048 + slot)));
    }
    if (round % 97 == 0) static_cast<void>(self.provider->reset_path(0, paths[to]));
    if (round % 31 == 0) static_cast<void>(self.provider->arm(0));
    const uint32_t count = self.provider->poll(0, out);
    for (uint32_t i = 0; i < count; ++i)
      if (out[i].kind == CompletionKind::kSent) idle.push_back(self.number(out[i].context));
  }
}

void register_and_forget(Provider& provider) {
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> scratch(256);
    MemoryKey key;
    if (provider.register_memory(0, {scratch.data(), scratch.size()}, &key).ok())
      static_cast<void>(provider.deregister_memory(0, key));
  }
}

void trouble(Provider& provider, uint8_t peer) {
  const std::string partition = "partition " + identity_hex(peer);
  for (int i = 0; i < 100; ++i)
    for (const char* command : {"pause", "resume", "nic_down 0", "nic_up 0", "stats", partition.c_str(), "heal"}) {
      static_cast<void>(provider.inject(command));
      static_cast<void>(provider.nic(0));
    }
}

}  // namespace

TEST_CASE("sim threads: workers, registrations, injections and deaths run side by side") {
  for (const char* sim : {"delay=3,mtu=16,completion_depth=0", "reorder=0,delay=3,mtu=16,completion_depth=0,error=0.05",
                          "delivery_complete=0,delay=3,stale_keys_land=1,completion_depth=0"}) {
    std::vector<std::unique_ptr<Player>> players;
    for (uint8_t i = 0; i < kWorkers; ++i) players.push_back(std::make_unique<Player>(sim, 1 + i));
    std::vector<Player*> peers;
    for (auto& player : players) peers.push_back(player.get());
    std::vector<std::vector<PathId>> paths(kWorkers);
    for (size_t i = 0; i < kWorkers; ++i)
      for (Player* peer : peers) paths[i].push_back(peers[i]->path_to(*peer));
    {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < kWorkers; ++i) threads.emplace_back([&, i] { work(*peers[i], paths[i], peers, i); });
      threads.emplace_back([&] { register_and_forget(*peers[0]->provider); });
      threads.emplace_back([&] { trouble(*peers[1]->provider, 3); });
      threads.emplace_back([&] { static_cast<void>(peers[3]->provider->inject("kill")); });
    }
    CHECK(peers[0]->stat("tampered") == 0);
    CHECK(peers[0]->stat("writes") > 0);
  }
}

TEST_CASE("sim threads: a provider may be destroyed while others write to it") {
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<Player>> players;
    for (uint8_t i = 0; i < kWorkers; ++i)
      players.push_back(std::make_unique<Player>("delay=2,completion_depth=0", 1 + i));
    std::vector<MemoryKey> keys;
    std::vector<te_nic_address> addresses;
    for (auto& player : players) {
      keys.push_back(player->keys[0]);
      addresses.push_back(player->provider->nic(0).address);
    }
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < kWorkers; ++i) {
      threads.emplace_back([&, i, self = std::move(players[i])]() mutable {
        std::vector<PathId> paths(kWorkers);
        for (size_t to = 0; to < kWorkers; ++to)
          if (!self->provider->open_path(0, addresses[to], 1, &paths[to]).ok()) return;
        std::vector<Completion> out(64);
        for (size_t step = 0; step < 500 * (i + 1); ++step) {  // fewer than there are contexts
          const size_t to = step % kWorkers;
          WorkRequest request = self->write(paths[to], *self, step, 32768, 0, 64);
          request.remote_key = keys[to].remote_key;
          request.remote_address = keys[to].base + i * kStride;
          static_cast<void>(self->post(request));
          self->provider->poll(0, out);
        }
        self.reset();
      });
    }
  }
}

TEST_CASE("sim threads: a sleeping worker is woken by every send") {
  constexpr uint32_t kMessages = 500;
  Player a("", 1), b("", 2);
  const PathId path = a.path_to(b);
  std::atomic<uint32_t> received{0};
  std::atomic<bool> overslept{false};
  std::jthread receiver([&] {
    std::vector<Completion> out(16);
    uint32_t posted = 0;
    for (int i = 0; i < kManyPolls && received < kMessages; ++i) {
      received += b.provider->poll(0, out);
      // Two at most: the sender runs out of receives often, and waits. One at least, or both would wait for each other.
      for (; posted - received < 2; ++posted) b.receive_ok(posted % 2, 64 * (posted % 2), 64);
      if (received == kMessages || !b.provider->arm(0)) continue;
      overslept = overslept || !wait_readable(b.provider->wait_fd(0), 20'000);
    }
  });
  std::vector<Completion> out(16);
  uint32_t sent = 0, done = 0;
  for (uint64_t i = 0; i < 100'000'000 && received < kMessages; ++i) {
    if (sent < kMessages && sent - done < 8) sent += a.post(a.send(path, sent % 1024, 0, 64)).posted;
    const uint32_t count = a.provider->poll(0, out);
    done += count;
    if (count == 0) std::this_thread::yield();
  }
  receiver.join();
  CHECK(received == kMessages);
  CHECK_FALSE(overslept);
}
