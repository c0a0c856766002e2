// Players for the tests of the simulated transport: an engine's provider with memory of its own, driven step by step.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "native/provider.h"
#include "native/sim/provider.h"

namespace te::sim::test {

inline constexpr int kManyPolls = 100'000;  // bound of every loop that waits

inline ProviderOptions settings(const std::string& sim, uint8_t identity = 0, uint32_t nics = 1) {
  ProviderOptions options;
  options.transport = "sim";
  options.sim = sim;
  options.nic_count = nics;
  options.identity[0] = identity;
  options.generation = 1;
  return options;
}

inline std::unique_ptr<Provider> open_ok(const ProviderOptions& options) {
  std::unique_ptr<Provider> provider;
  const Error error = open_provider(options, &provider);
  REQUIRE_MESSAGE(error.ok(), error.message());
  return provider;
}

// Within `timeout_ms`; 0: now.
inline bool wait_readable(int fd, int timeout_ms) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

inline std::string identity_hex(uint8_t identity) { return format("%02x", identity) + std::string(30, '0'); }

// One engine with one registered buffer on each NIC.
struct Player {
  explicit Player(const std::string& sim, uint8_t identity = 0, uint32_t nics = 1, size_t bytes = 1 << 16)
      : Player(settings(sim, identity, nics), bytes) {}

  explicit Player(const ProviderOptions& options, size_t bytes = 1 << 16)
      : memory(bytes), provider(open_ok(options)), contexts(4096), keys(provider->nic_count()) {
    for (uint32_t nic = 0; nic < keys.size(); ++nic) keys[nic] = register_span(memory.data(), bytes, nic);
  }

  MemoryKey register_span(void* address, uint64_t length, uint32_t nic = 0) {
    MemoryKey key;
    const Error error = provider->register_memory(nic, {address, length}, &key);
    REQUIRE_MESSAGE(error.ok(), error.message());
    return key;
  }

  PathId path_to(const Player& peer, uint32_t nic = 0, uint32_t peer_nic = 0) {
    PathId path = kNoPath;
    const Error error = provider->open_path(nic, peer.provider->nic(peer_nic).address, 1, &path);
    REQUIRE_MESSAGE(error.ok(), error.message());
    return path;
  }

  void inject(const std::string& command) {
    const Error error = provider->inject(command);
    REQUIRE_MESSAGE(error.ok(), error.message());
  }

  uint64_t stat(const std::string& name) {
    const std::string text = " " + provider->inject("stats").message();
    const size_t at = text.find(" " + name + "=");
    REQUIRE(at != std::string::npos);
    return std::stoull(text.substr(at + name.size() + 2));
  }

  WorkContext* context(size_t number) { return &contexts.at(number); }
  size_t number(const WorkContext* context) const { return static_cast<size_t>(context - contexts.data()); }

  // Context `number`; from memory + `source` to the peer's memory + `target`.
  WorkRequest write(PathId path, const Player& peer, size_t number, uint64_t source, uint64_t target, uint64_t length) {
    WorkRequest request;
    request.path = path;
    request.local = memory.data() + source;
    request.local_key = keys[0].local_key;
    request.length = length;
    request.remote_address = peer.keys[0].base + target;
    request.remote_key = peer.keys[0].remote_key;
    request.context = context(number);
    return request;
  }

  WorkRequest send(PathId path, size_t number, uint64_t source, uint64_t length) {
    WorkRequest request = write(path, *this, number, source, 0, length);
    request.opcode = Opcode::kSend;
    return request;
  }

  PostResult post(const WorkRequest& request, uint32_t nic = 0) { return provider->post(nic, {&request, 1}); }
  void post_ok(const WorkRequest& request, uint32_t nic = 0) { REQUIRE(post(request, nic).posted == 1); }
  void receive_ok(size_t number, uint64_t offset, uint64_t length) {
    REQUIRE(provider->post_receive(0, memory.data() + offset, length, keys[0].local_key, context(number)).posted == 1);
  }

  std::vector<Completion> poll(uint32_t nic = 0) {
    std::vector<Completion> out(256);
    out.resize(provider->poll(nic, out));
    return out;
  }

  // Polls until `count` completions have come; fewer mean that the bound was reached.
  std::vector<Completion> gather(size_t count, uint32_t nic = 0) {
    std::vector<Completion> all;
    for (int i = 0; i < kManyPolls && all.size() < count; ++i)
      for (const Completion& each : poll(nic)) all.push_back(each);
    return all;
  }

  Completion one(uint32_t nic = 0) {
    const std::vector<Completion> all = gather(1, nic);
    REQUIRE(all.size() == 1);
    return all[0];
  }

  // Polls so often that whatever can happen with a small delay has happened.
  std::vector<Completion> settle(uint32_t nic = 0, int polls = 200) {
    std::vector<Completion> all;
    for (int i = 0; i < polls; ++i)
      for (const Completion& each : poll(nic)) all.push_back(each);
    return all;
  }

  void fill(uint64_t offset, uint64_t length, uint8_t seed) {
    for (uint64_t i = 0; i < length; ++i) memory[offset + i] = static_cast<std::byte>(seed + i * 7 + (i >> 8));
  }

  std::vector<std::byte> memory;
  std::unique_ptr<Provider> provider;  // closed before its memory goes
  std::vector<WorkContext> contexts;
  std::vector<MemoryKey> keys;
};

inline bool same(const Player& a, uint64_t at, const Player& b, uint64_t bt, uint64_t length) {
  return std::memcmp(a.memory.data() + at, b.memory.data() + bt, length) == 0;
}

inline bool untouched(const Player& player, uint64_t offset, uint64_t length) {
  for (uint64_t i = 0; i < length; ++i)
    if (player.memory[offset + i] != std::byte{0}) return false;
  return true;
}

}  // namespace te::sim::test
