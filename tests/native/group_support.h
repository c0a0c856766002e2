// A group for tests: one engine that scatters, and the members with their memory and counters.
#pragma once

#include "tests/native/engine_support.h"

namespace te::engine_test {

inline constexpr size_t kBytes = 1 << 15;

// One sender, several receivers, each with memory and a counter; members[i] is receiver i % receivers.
struct Group {
  Group(const Setup& setup, size_t receiver_count, size_t member_count) : sender(setup), source(sender.memory(kBytes)) {
    Random random(member_count);
    source.fill(random);
    for (size_t i = 0; i < receiver_count; ++i) receivers.push_back(std::make_unique<Player>(setup));
    for (size_t i = 0; i < member_count; ++i) {
      Player& owner = *receivers[i % receiver_count];
      memories.push_back(&owner.memory(kBytes));
      counters.push_back(owner.counter());
      members.push_back({-1, sender.remote(owner, *memories[i]), sender.remote_counter(owner, counters[i])});
    }
    counted.assign(member_count, 0);
    target = sender.target(members);
  }
  Player& owner(size_t member) { return *receivers[member % receivers.size()]; }

  struct Parts {
    std::vector<int64_t> from, lengths, to;
  };
  Parts random_parts(Random& random, uint64_t longest) const {
    Parts parts;
    for (size_t i = 0; i < members.size(); ++i) {
      const uint64_t length = random.below(4) == 0 ? 0 : random.below(longest + 1);
      parts.from.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
      parts.lengths.push_back(static_cast<int64_t>(length));
      parts.to.push_back(static_cast<int64_t>(random.below(kBytes - length + 1)));
    }
    return parts;
  }
  Transfer scatter(const Parts& parts, uint32_t flags = 0, uint32_t shard = TE_SHARD_AUTO, int64_t timeout_ns = -1) {
    return sender.scatter(
        {target, source.region, flags, shard, parts.from.data(), parts.lengths.data(), parts.to.data()}, timeout_ns);
  }
  Transfer barrier() { return sender.scatter({target, TE_NONE, 0, 0, nullptr, nullptr, nullptr}); }

  // Everything that `parts` says has landed, and nothing else; then poisons it.
  void check(const Parts& parts, size_t member) {
    const auto length = static_cast<uint64_t>(parts.lengths[member]), to = static_cast<uint64_t>(parts.to[member]);
    const uint8_t* from = source.data() + parts.from[member];
    if (!memories[member]->holds(to, from, length, kBytes)) FAIL("member ", member, " at ", to, " + ", length);
    memories[member]->poison(to, length);
  }
  void check_counted(size_t member) {
    if (!owner(member).counted(counters[member], ++counted[member]))
      FAIL("member ", member, ": the counter is at ", owner(member).value(counters[member]), ", not at ",
           counted[member]);
  }

  Player sender;
  Memory& source;
  std::vector<std::unique_ptr<Player>> receivers;
  std::vector<Memory*> memories;
  std::vector<te_handle> counters;
  std::vector<te_target_member> members;
  std::vector<uint64_t> counted;
  te_handle target = TE_NONE;
};

}  // namespace te::engine_test
