// Exported: the texts of codes, and rates.
#include "tests/verbs/objects.h"

namespace {

template <typename Code, size_t n>
const char* text(const char* const (&texts)[n], Code code) {
  const auto index = static_cast<size_t>(code);
  return index < n ? texts[index] : "unknown";
}

struct Rate {
  ibv_rate code;
  int multiple;  // of 2.5 Gbit/s
  int mbps;
};
constexpr Rate kRates[] = {
    {IBV_RATE_2_5_GBPS, 1, 2500},  {IBV_RATE_5_GBPS, 2, 5000},       {IBV_RATE_10_GBPS, 4, 10000},
    {IBV_RATE_20_GBPS, 8, 20000},  {IBV_RATE_40_GBPS, 16, 40000},    {IBV_RATE_56_GBPS, 22, 56250},
    {IBV_RATE_25_GBPS, 10, 25781}, {IBV_RATE_100_GBPS, 40, 103125},  {IBV_RATE_200_GBPS, 80, 206250},
    {IBV_RATE_50_GBPS, 20, 53125}, {IBV_RATE_400_GBPS, 160, 425000}, {IBV_RATE_800_GBPS, 320, 850000}};

}  // namespace

extern "C" {

const char* ibv_wc_status_str(ibv_wc_status status) {
  static const char* const kTexts[] = {"success",
                                       "local length error",
                                       "local QP operation error",
                                       "local EE context operation error",
                                       "local protection error",
                                       "Work Request Flushed Error",
                                       "memory management operation error",
                                       "bad response error",
                                       "local access error",
                                       "remote invalid request error",
                                       "remote access error",
                                       "remote operation error",
                                       "transport retry counter exceeded",
                                       "RNR retry counter exceeded",
                                       "local RDD violation error",
                                       "remote invalid RD request",
                                       "aborted error",
                                       "invalid EE context number",
                                       "invalid EE context state",
                                       "fatal error",
                                       "response timeout error",
                                       "general error"};
  return text(kTexts, status);
}

const char* ibv_event_type_str(ibv_event_type event) {
  static const char* const kTexts[] = {"CQ error",
                                       "local work queue catastrophic error",
                                       "invalid request local work queue error",
                                       "local access violation work queue error",
                                       "communication established",
                                       "send queue drained",
                                       "path migrated",
                                       "path migration request error",
                                       "local catastrophic error",
                                       "port active",
                                       "port error",
                                       "LID change",
                                       "P_Key change",
                                       "SM change",
                                       "SRQ catastrophic error",
                                       "SRQ limit reached",
                                       "last WQE reached",
                                       "client reregistration",
                                       "GID table change",
                                       "WQ fatal"};
  return text(kTexts, event);
}

const char* ibv_port_state_str(ibv_port_state state) {
  static const char* const kTexts[] = {"no state change (NOP)", "down", "init", "armed", "active", "active defer"};
  return text(kTexts, state);
}

const char* ibv_node_type_str(ibv_node_type type) {
  static const char* const kTexts[] = {"unknown",           "InfiniBand channel adapter",
                                       "InfiniBand switch", "InfiniBand router",
                                       "iWARP NIC",         "usNIC",
                                       "usNIC UDP",         "unspecified"};
  return text(kTexts, type);
}

int ibv_rate_to_mult(ibv_rate rate) {
  for (const Rate& each : kRates)
    if (each.code == rate) return each.multiple;
  return -1;
}

ibv_rate mult_to_ibv_rate(int multiple) {
  for (const Rate& each : kRates)
    if (each.multiple == multiple) return each.code;
  return IBV_RATE_MAX;
}

int ibv_rate_to_mbps(ibv_rate rate) {
  for (const Rate& each : kRates)
    if (each.code == rate) return each.mbps;
  return -1;
}

ibv_rate mbps_to_ibv_rate(int mbps) {
  for (const Rate& each : kRates)
    if (each.mbps == mbps) return each.code;
  return IBV_RATE_MAX;
}

}  // extern "C"
