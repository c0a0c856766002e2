// Exported: ibv_modify_qp, with the attributes that each transition must and may have.
#include <algorithm>
#include <cerrno>

#include "tests/verbs/completions.h"
#include "tests/verbs/execution.h"

using namespace standin;

namespace standin {
namespace {

struct Transition {
  ibv_qp_type type;
  ibv_qp_state from, to;
  int required, optional;
};

constexpr int kAlternative = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
constexpr Transition kTransitions[] = {
    {IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | kAlternative},
    {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | kAlternative},
    {IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPT_UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_QKEY},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_QKEY},
};

const Transition* find(const Qp& pair, ibv_qp_state to) {
  const auto found = std::find_if(std::begin(kTransitions), std::end(kTransitions), [&](const Transition& t) {
    return t.type == pair.qp_type && t.from == pair.now && t.to == to;
  });
  return found == std::end(kTransitions) ? nullptr : found;
}

// Null, or which value is out of range.
const char* wrong_value(const Fabric& f, const Qp& pair, const ibv_qp_attr& a, int mask) {
  const auto has = [&](int bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PKEY_INDEX) && a.pkey_index != 0) return "pkey_index: the table has one entry";
  if (has(IBV_QP_PORT) && a.port_num != 1) return "port_num: the device has port 1 only";
  if (has(IBV_QP_QKEY) && a.qkey >> 31 != 0) return "qkey: bit 31 is for the privileged";
  if (has(IBV_QP_AV))
    if (const char* wrong = wrong_address(*pair.device, a.ah_attr)) return wrong;
  if (has(IBV_QP_PATH_MTU) && (a.path_mtu < IBV_MTU_256 || mtu_bytes(a.path_mtu) > f.options.mtu))
    return "path_mtu is above the port's";
  if (has(IBV_QP_DEST_QPN) && a.dest_qp_num > 0xffffff) return "dest_qp_num has 24 bits";
  if (has(IBV_QP_RQ_PSN) && a.rq_psn > 0xffffff) return "rq_psn has 24 bits";
  if (has(IBV_QP_SQ_PSN) && a.sq_psn > 0xffffff) return "sq_psn has 24 bits";
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC) && a.max_dest_rd_atomic > f.options.max_rd_atom)
    return "max_dest_rd_atomic is above the device's";
  if (has(IBV_QP_MAX_QP_RD_ATOMIC) && a.max_rd_atomic > f.options.max_rd_atom)
    return "max_rd_atomic is above the device's";
  if (has(IBV_QP_MIN_RNR_TIMER) && a.min_rnr_timer > 31) return "min_rnr_timer has 5 bits";
  if (has(IBV_QP_TIMEOUT) && a.timeout > 31) return "timeout has 5 bits";
  if (has(IBV_QP_RETRY_CNT) && a.retry_cnt > 7) return "retry_cnt has 3 bits";
  if (has(IBV_QP_RNR_RETRY) && a.rnr_retry > 7) return "rnr_retry has 3 bits";
  return nullptr;
}

void take(Qp& pair, const ibv_qp_attr& a, int mask) {
  ibv_qp_attr& own = pair.attr;
  const auto has = [&](int bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PKEY_INDEX)) own.pkey_index = a.pkey_index;
  if (has(IBV_QP_PORT)) own.port_num = a.port_num;
  if (has(IBV_QP_ACCESS_FLAGS)) own.qp_access_flags = a.qp_access_flags;
  if (has(IBV_QP_QKEY)) own.qkey = a.qkey;
  if (has(IBV_QP_AV)) own.ah_attr = a.ah_attr;
  if (has(IBV_QP_PATH_MTU)) own.path_mtu = a.path_mtu;
  if (has(IBV_QP_DEST_QPN)) own.dest_qp_num = a.dest_qp_num;
  if (has(IBV_QP_RQ_PSN)) own.rq_psn = pair.expect_psn = a.rq_psn;
  if (has(IBV_QP_SQ_PSN)) own.sq_psn = pair.send_psn = a.sq_psn;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC)) own.max_dest_rd_atomic = a.max_dest_rd_atomic;
  if (has(IBV_QP_MAX_QP_RD_ATOMIC)) own.max_rd_atomic = a.max_rd_atomic;
  if (has(IBV_QP_MIN_RNR_TIMER)) own.min_rnr_timer = a.min_rnr_timer;
  if (has(IBV_QP_TIMEOUT)) own.timeout = a.timeout;
  if (has(IBV_QP_RETRY_CNT)) own.retry_cnt = a.retry_cnt;
  if (has(IBV_QP_RNR_RETRY)) own.rnr_retry = a.rnr_retry;
}

void reset(Fabric& f, Qp& pair) {
  leave_ghosts(f, pair);
  pair.now = IBV_QPS_RESET;
  pair.fast.usable = false;
  pair.placed = 0;
  pair.posted = pair.freed = 0;
  pair.retries = pair.rnr_retries = 0;
  pair.established = false;
  pair.attr = {};
  f.forget(pair);
  drop_completions(f, pair);
}

const char* name_of(ibv_qp_state state) {
  constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return static_cast<size_t>(state) < std::size(kNames) ? kNames[state] : "an unknown state";
}

int refused(const Qp& pair, ibv_qp_state to, const char* why, int bits) {
  violate("ibv_modify_qp: queue pair %u from %s to %s: %s (0x%x)", pair.qp_num, name_of(pair.now), name_of(to), why,
          static_cast<unsigned>(bits));
  return EINVAL;
}

}  // namespace
}  // namespace standin

extern "C" int ibv_modify_qp(ibv_qp* handle, ibv_qp_attr* attributes, int mask) {
  Locked f;
  Qp* pair = alive<Qp>(handle, "ibv_modify_qp");
  if (pair == nullptr) return EINVAL;
  if (pair->device->fatal) return EIO;
  const bool has_state = (mask & IBV_QP_STATE) != 0;
  const ibv_qp_state to = has_state ? attributes->qp_state : pair->now;
  const int rest = mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
  if ((mask & IBV_QP_CUR_STATE) != 0 && attributes->cur_qp_state != pair->now)
    return refused(*pair, to, "cur_qp_state is another", static_cast<int>(attributes->cur_qp_state));
  if (has_state && (to == IBV_QPS_ERR || to == IBV_QPS_RESET)) {
    if (rest != 0) return refused(*pair, to, "attributes that do not belong there", rest);
    if (to == IBV_QPS_RESET) reset(*f, *pair);
    else break_pair(*f, *pair);
    pair->state = to;
    return 0;
  }
  const Transition* transition = find(*pair, to);
  if (transition == nullptr) return refused(*pair, to, "there is no such transition", mask);
  if ((rest & transition->required) != transition->required)
    return refused(*pair, to, "attributes are missing", transition->required & ~rest);
  if ((rest & ~(transition->required | transition->optional)) != 0)
    return refused(*pair, to, "attributes that do not belong there",
                   rest & ~(transition->required | transition->optional));
  if (const char* wrong = wrong_value(*f, *pair, *attributes, mask)) return refused(*pair, to, wrong, mask);
  take(*pair, *attributes, mask);
  pair->now = pair->state = to;
  pair->fast.usable = pair->fast.on && to == IBV_QPS_RTS;
  f->schedule(*pair);
  return 0;
}
