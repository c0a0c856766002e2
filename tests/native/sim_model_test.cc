// The simulated transport against a model: random operations, options and faults; every operation has a place of its own
// at its target, so that the model knows for each byte who may have written it.
#include <algorithm>
#include <array>

#include "native/sim/random.h"
#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim;
using namespace te::sim::test;

namespace {

constexpr size_t kPlayers = 3, kNics = 2, kOperations = 400, kSlot = 512;
constexpr size_t kSources = kOperations * kSlot;       // after the slots: what is sent and what is read
constexpr size_t kConstant = 2 * kOperations * kSlot;  // after the sources: never written
constexpr size_t kReceives = kConstant + kSlot;        // after it: receive buffers
constexpr size_t kReceiveCount = 2 * kOperations;
constexpr size_t kBytes = kReceives + kReceiveCount * kSlot;

struct Planned {
  WorkRequest request;
  size_t from = 0, to = 0;
  uint32_t nic = 0;
  bool posted = false, done = false;
  Completion completion;
  int arrivals = 0;  // immediates or messages
};

std::byte pattern(size_t operation, size_t at) { return static_cast<std::byte>(1 + (operation * 31 + at * 7) % 251); }

class Scenario {
 public:
  explicit Scenario(uint64_t seed) : random_(seed), sim_(choose_options(seed)) {
    for (size_t i = 0; i < kPlayers; ++i) {
      players_.push_back(std::make_unique<Player>(sim_, static_cast<uint8_t>(i + 1), kNics, kBytes));
      for (size_t at = 0; at < kSlot; ++at) players_[i]->memory[kConstant + at] = pattern(i, at);
    }
    for (size_t from = 0; from < kPlayers; ++from)
      for (uint32_t nic = 0; nic < kNics; ++nic)
        for (size_t to = 0; to < kPlayers; ++to)
          paths_[from][nic][to] = players_[from]->path_to(*players_[to], nic, nic);
  }

  void run() {
    CAPTURE(sim_);
    while (operations_.size() < kOperations) step();
    for (auto& player : players_) {
      for (const char* command : {"resume", "heal", "nic_up 0", "nic_up 1", "error_next 0"}) player->inject(command);
      for (uint32_t nic = 0; nic < kNics; ++nic)
        for (size_t i = 0; i < kOperations / 2; ++i) post_receive(*player, nic);
    }
    for (int i = 0; i < kManyPolls && finished_ < posted_; ++i) poll_all();
    for (int i = 0; i < 500; ++i) poll_all();
    REQUIRE(finished_ == posted_);
    for (size_t i = 0; i < operations_.size(); ++i) judge(i);
    for (auto& player : players_) {
      CHECK(player->stat("overruns") == 0);
      CHECK(player->stat("tampered") == 0);
      CHECK(player->stat("in_flight") == 0);
    }
  }

 private:
  static std::string choose_options(uint64_t seed) {
    Random random(seed);
    std::string text = "seed=" + std::to_string(seed);
    text += ",reorder=" + std::to_string(random.below(2));
    text += ",delay=" + std::to_string(random.below(12));
    text += ",mtu=" + std::to_string(32 + random.below(500));
    text += ",delivery_complete=" + std::to_string(random.below(4) > 0);
    text += ",depth=" + std::to_string(1 + random.below(40));
    text += ",completion_depth=" + std::to_string(4 * kOperations);
    if (random.below(2)) text += ",busy=0.2";
    if (random.below(2)) text += ",error=0.1";
    return text;
  }

  void step() {
    const uint64_t choice = random_.below(100);
    Player& player = *players_[random_.below(kPlayers)];
    const auto nic = static_cast<uint32_t>(random_.below(kNics));
    if (choice < 50) return post_one();
    if (choice < 60) return post_receive(player, nic);
    if (choice < 92) return poll_all();
    static const char* const kCommands[] = {"pause", "resume", "nic_down 1", "nic_up 1", "heal", "error_next 1"};
    if (choice < 96) return player.inject(kCommands[random_.below(std::size(kCommands))]);
    if (choice < 97)
      return player.inject("partition " + identity_hex(static_cast<uint8_t>(1 + random_.below(kPlayers))));
    const size_t from = random_.below(kPlayers), to = random_.below(kPlayers);
    PathId& path = paths_[from][nic][to];
    if (choice < 99) {
      CHECK(players_[from]->provider->reset_path(nic, path).ok());
      return;
    }
    players_[from]->provider->close_path(nic, path);
    path = players_[from]->path_to(*players_[to], nic, nic);
  }

  void post_one() {
    const size_t number = operations_.size();
    Planned planned;
    planned.from = random_.below(kPlayers);
    planned.to = random_.below(kPlayers);
    planned.nic = static_cast<uint32_t>(random_.below(kNics));
    Player& from = *players_[planned.from];
    Player& to = *players_[planned.to];
    WorkRequest& request = planned.request;
    request.opcode = static_cast<Opcode>(random_.below(4));
    request.path = paths_[planned.from][planned.nic][planned.to];
    request.immediate = static_cast<uint32_t>(number);
    request.length = 4 + random_.below(kSlot - 3);
    request.local = from.memory.data() + kSources + number * kSlot;
    request.local_key = from.keys[planned.nic].local_key;
    request.remote_key = to.keys[planned.nic].remote_key;
    request.remote_address = to.keys[planned.nic].base + (request.opcode == Opcode::kRead ? kConstant : number * kSlot);
    request.context = from.context(number);
    if (request.opcode != Opcode::kRead)
      for (size_t at = 0; at < request.length; ++at) from.memory[kSources + number * kSlot + at] = pattern(number, at);
    if (request.opcode == Opcode::kSend) {
      const auto name = static_cast<uint32_t>(number);
      std::memcpy(request.local, &name, sizeof name);
    }
    const PostResult result = from.post(request, planned.nic);
    CHECK(result.provider_status == 0);
    CHECK(result.busy == (result.posted == 0));
    planned.posted = result.posted == 1;
    posted_ += result.posted;
    operations_.push_back(planned);
    if (!planned.posted) poll_all();
  }

  void post_receive(Player& player, uint32_t nic) {
    size_t& used = receives_used_[&player];
    if (used == kReceiveCount) return;
    const PostResult result =
        player.provider->post_receive(nic, player.memory.data() + kReceives + used * kSlot, kSlot,
                                      player.keys[nic].local_key, player.context(kOperations + used));
    used += result.posted;
  }

  void poll_all() {
    for (size_t i = 0; i < kPlayers; ++i)
      for (uint32_t nic = 0; nic < kNics; ++nic)
        for (const Completion& each : players_[i]->poll(nic)) take(i, nic, each);
  }

  void take(size_t player, uint32_t nic, const Completion& completion) {
    Player& here = *players_[player];
    if (completion.kind == CompletionKind::kSent) {
      const size_t number = here.number(completion.context);
      REQUIRE(number < operations_.size());
      Planned& planned = operations_[number];
      CHECK(planned.posted);
      CHECK_FALSE(planned.done);
      CHECK(planned.from == player);
      CHECK(planned.nic == nic);
      planned.done = true;
      planned.completion = completion;
      ++finished_;
      if (delivery_complete() && completion.status == Status::kOk)
        CHECK(landed_bytes(number) == expected_bytes(number));
      // The source is the engine's again: nothing may read it from here on.
      if (planned.request.opcode != Opcode::kRead) std::memset(planned.request.local, 0, planned.request.length);
    } else if (completion.kind == CompletionKind::kImmediate) {
      arrive(player, completion.immediate);
    } else {
      REQUIRE(completion.kind == CompletionKind::kReceived);
      REQUIRE(completion.status == Status::kOk);
      const std::byte* bytes = here.memory.data() + kReceives + (here.number(completion.context) - kOperations) * kSlot;
      uint32_t number = 0;
      std::memcpy(&number, bytes, sizeof number);
      arrive(player, number);
      CHECK(completion.length == operations_[number].request.length);
      for (size_t at = sizeof number; at < completion.length; ++at) CHECK(bytes[at] == pattern(number, at));
    }
  }

  void arrive(size_t player, uint32_t number) {
    REQUIRE(number < operations_.size());
    Planned& planned = operations_[number];
    CHECK(planned.to == player);
    ++planned.arrivals;
    if (!ordered()) return;
    int64_t& last = last_arrival_.try_emplace(planned.request.path * kPlayers + planned.from, -1).first->second;
    CHECK(last < number);
    last = number;
  }

  bool ordered() const { return players_[0]->provider->capabilities().ordered_writes; }
  bool delivery_complete() const { return players_[0]->provider->capabilities().delivery_complete; }

  const std::byte* place(size_t number) const {
    const Planned& planned = operations_[number];
    if (planned.request.opcode == Opcode::kRead) return static_cast<const std::byte*>(planned.request.local);
    return players_[planned.to]->memory.data() + number * kSlot;
  }
  size_t landed_bytes(size_t number) const {
    return kSlot - static_cast<size_t>(std::count(place(number), place(number) + kSlot, std::byte{0}));
  }
  size_t expected_bytes(size_t number) const {
    const WorkRequest& request = operations_[number].request;
    return request.opcode == Opcode::kSend ? 0 : request.length;
  }

  void judge(size_t number) {
    CAPTURE(number);
    const Planned& planned = operations_[number];
    const WorkRequest& request = planned.request;
    const bool read = request.opcode == Opcode::kRead;
    const size_t bytes = landed_bytes(number), all = expected_bytes(number);
    const size_t source = read ? planned.to : number;
    bool strange = false;
    for (size_t at = 0; at < kSlot; ++at) {
      const std::byte found = place(number)[at];
      strange = strange || (found != std::byte{0} && (at >= all || found != pattern(source, at)));
    }
    CHECK_FALSE(strange);
    CHECK(planned.done == planned.posted);
    const bool tells = request.opcode == Opcode::kWriteImmediate || request.opcode == Opcode::kSend;
    const Status status = planned.posted ? planned.completion.status : Status::kCancelled;
    if (status == Status::kOk && (delivery_complete() || read)) {
      CHECK(bytes == all);
      CHECK(planned.arrivals == tells);
    } else if (status == Status::kOk || planned.completion.landed_unknown) {
      CHECK(planned.arrivals <= tells);
      if (planned.arrivals > 0) CHECK(bytes == all);
    } else {
      CHECK(bytes == 0);
      CHECK(planned.arrivals == 0);
    }
  }

  Random random_;
  std::string sim_;
  std::vector<std::unique_ptr<Player>> players_;
  std::array<std::array<std::array<PathId, kPlayers>, kNics>, kPlayers> paths_{};
  std::vector<Planned> operations_;
  std::map<const Player*, size_t> receives_used_;
  std::map<uint64_t, int64_t> last_arrival_;
  size_t posted_ = 0, finished_ = 0;
};

}  // namespace

TEST_CASE("sim model: whatever the options and faults, every byte, immediate and completion is accounted for") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    Scenario(seed).run();
  }
}
