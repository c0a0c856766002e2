#include "proxy/settings.h"

#include <bit>
#include <initializer_list>

#include "native/control.h"
#include "native/immediate.h"
#include "proxy/tables.h"

namespace te {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

struct Bound {
  const char* name;
  uint64_t value, low, high;
};

Error check_bounds(std::initializer_list<Bound> bounds) {
  for (const Bound& b : bounds)
    if (b.value < b.low || b.value > b.high)
      return Error(
          Status::kConfig,
          format("setting %s is %llu; allowed are %llu to %llu", b.name, static_cast<unsigned long long>(b.value),
                 static_cast<unsigned long long>(b.low), static_cast<unsigned long long>(b.high)));
  return {};
}

}  // namespace

// Beside two of the longest messages: each message is charged some bytes more than it has, and room is given back in quarters.
constexpr uint64_t kLeastQueueBytes = 4096;

Error check_rdma(const te_rdma_settings& v) {
  // More than any port has: whether the port has so many is found out where its tables are read.
  constexpr int32_t kMostIndex = 65535;
  if (v.gid_index < -1 || v.gid_index > kMostIndex)
    return Error(Status::kConfig,
                 format("setting gid_index is %d; allowed are -1 (choose) to %d", v.gid_index, kMostIndex));
  if (v.path_mtu != 0 && (v.path_mtu < 256 || v.path_mtu > 4096 || !std::has_single_bit(v.path_mtu)))
    return Error(
        Status::kConfig,
        format("setting path_mtu is %u; allowed are 256, 512, 1024, 2048, 4096 and 0 (that of the port)", v.path_mtu));
  return check_bounds({
      {"pkey_index", v.pkey_index, 0, kMostIndex},
      {"service_level", v.service_level, 0, 15},
      {"traffic_class", v.traffic_class, 0, 255},
      {"ack_timeout", v.ack_timeout, 1, 31},  // 0 would be "never"
      {"retry_count", v.retry_count, 0, 7},
      {"rnr_retry", v.rnr_retry, 0, 7},
      {"rnr_timer", v.rnr_timer, 0, 31},
  });
}

Error Settings::check() const {
  const te_settings& v = values;
  const auto ns = [](int64_t value) { return value < 0 ? 0 : static_cast<uint64_t>(value); };
  const uint64_t ever = 1'000'000'000ull * kSecond;
  const Error out_of_bounds = check_bounds({
      {"nic_count", v.nic_count, 0, TE_MAX_NICS},
      {"default_timeout_ns", ns(v.default_timeout_ns), 1'000'000, ever},
      {"connect_timeout_ns", ns(v.connect_timeout_ns), 1'000'000, ever},
      {"peer_timeout_ns", ns(v.peer_timeout_ns), 50'000'000, ever},
      {"close_timeout_ns", ns(v.close_timeout_ns), 1'000'000, ever},
      {"polling", v.polling, TE_POLL_AUTO, TE_POLL_ADAPTIVE},
      {"operations", v.operations, 16, 1u << 20},
      {"operations_per_peer", v.operations_per_peer, 1, 1u << 20},
      {"nic_depth", v.nic_depth, 0, 1u << 20},
      {"peer_depth", v.peer_depth, 0, 1u << 20},
      {"immediate_window", v.immediate_window, 2, 1u << 20},
      {"assembly_slots", v.assembly_slots, 1, kMaxHelloSlots},
      {"message_window", v.message_window, 4, 1024},
      {"max_message_bytes", v.max_message_bytes, 1, 1u << 30},
      {"message_queue_bytes", v.message_queue_bytes, kLeastQueueBytes + uint64_t{2} * v.max_message_bytes,
       uint64_t{1} << 40},
      {"page_immediates", v.page_immediates, TE_PAGES_AUTO, TE_PAGES_LAST},
      {"gdr", v.gdr, TE_GDR_AUTO, TE_GDR_REQUIRE},
      {"max_peers", v.max_peers, 1, 65536},
      {"max_regions", v.max_regions, 1, Table<Region>::kMaxCapacity - 1},
      {"max_counters", v.max_counters, 1, Table<Counter>::kMaxCapacity},
      {"shard_bytes", v.shard_bytes, 1, uint64_t{1} << 40},
      {"bursts", v.bursts, 1, 4096},
      {"peer_window_bytes", v.peer_window_bytes, 4096, uint64_t{1} << 40},
      {"nic_window_bytes", v.nic_window_bytes, 4096, uint64_t{1} << 40},
      {"staging_slots", v.staging_slots, 2, 4096},
      {"staging_slot_bytes", v.staging_slot_bytes, 4096, 64u << 20},
      {"port_high", v.port_high, v.port_low, 65535},
  });
  if (out_of_bounds) return out_of_bounds;
  if (v.core < TE_CORE_NONE || v.core >= 4096)
    return Error(Status::kConfig,
                 format("setting core is %d; a CPU number, -1 (choose) or -2 (do not pin) is needed", v.core));
  if (v.spin_ns < 0) return Error(Status::kConfig, "setting spin_ns is negative");
  return check_rdma(v.rdma);
}

std::vector<std::string> Settings::nic_names() const {
  std::vector<std::string> names;
  size_t begin = 0;
  while (begin <= nics.size()) {
    const size_t end = std::min(nics.find(',', begin), nics.size());
    if (end > begin) names.push_back(nics.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

}  // namespace te
