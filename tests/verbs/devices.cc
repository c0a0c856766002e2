// Exported: devices, their ports and contexts.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tests/verbs/completions.h"
#include "tests/verbs/fabric.h"
#include "tests/verbs/operations.h"

using namespace standin;

namespace standin {
namespace {

ibv_mtu mtu_code(uint64_t bytes) {
  for (const ibv_mtu mtu : {IBV_MTU_4096, IBV_MTU_2048, IBV_MTU_1024, IBV_MTU_512})
    if (bytes >= (128u << mtu)) return mtu;
  return IBV_MTU_256;
}

int query_port(ibv_context* handle, uint8_t number, ibv_port_attr* out, size_t size) {
  Locked f;
  const Device& device = *context_of(handle)->owner;
  if (number != 1) return EINVAL;
  ibv_port_attr port{};
  port.state = device.up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port.max_mtu = IBV_MTU_4096;
  port.active_mtu = mtu_code(f->options.mtu);
  port.gid_tbl_len = kGids;
  port.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
  port.max_msg_sz = static_cast<uint32_t>(f->options.max_msg);
  port.pkey_tbl_len = 1;
  port.max_vl_num = 1;
  port.active_width = 2;
  port.active_speed = 32;
  port.phys_state = device.up ? 5 : 3;
  port.link_layer = IBV_LINK_LAYER_ETHERNET;
  std::memset(out, 0, size);
  std::memcpy(out, &port, std::min(size, sizeof port));
  return 0;
}

void describe(const Fabric& f, const Device& device, ibv_device_attr* out) {
  const Options& o = f.options;
  *out = {};
  std::strcpy(out->fw_ver, "0.0.0");
  out->node_guid = out->sys_image_guid = device.gids[0].global.interface_id;
  out->max_mr_size = ~uint64_t{0};
  out->page_size_cap = 0xfffff000;
  out->max_qp = static_cast<int>(o.max_qp);
  out->max_qp_wr = static_cast<int>(o.max_qp_wr);
  out->device_cap_flags = IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_RC_RNR_NAK_GEN;
  out->max_sge = out->max_sge_rd = static_cast<int>(std::min<uint64_t>(o.max_sge, kSges));
  out->max_cq = 65536;
  out->max_cqe = static_cast<int>(o.max_cqe);
  out->max_mr = static_cast<int>(o.max_mr);
  out->max_pd = 65536;
  out->max_qp_rd_atom = out->max_qp_init_rd_atom = static_cast<int>(o.max_rd_atom);
  out->max_res_rd_atom = static_cast<int>(o.max_rd_atom * o.max_qp);
  out->atomic_cap = IBV_ATOMIC_NONE;
  out->max_ah = 65536;
  out->max_srq = static_cast<int>(o.max_srq);
  out->max_srq_wr = static_cast<int>(o.max_srq_wr);
  out->max_srq_sge = out->max_sge;
  out->max_pkeys = 1;
  out->local_ca_ack_delay = 16;
  out->phys_port_cnt = 1;
}

int query_device_ex(ibv_context* handle, const ibv_query_device_ex_input*, ibv_device_attr_ex* out, size_t size) {
  Locked f;
  ibv_device_attr_ex all{};
  describe(*f, *context_of(handle)->owner, &all.orig_attr);
  all.phys_port_cnt_ex = 1;
  std::memset(out, 0, size);
  std::memcpy(out, &all, std::min(size, sizeof all));
  return 0;
}

// The slots of a port's table: RoCEv2 all.
bool fill_entry(const Device& device, uint32_t index, ibv_gid_entry* entry) {
  const ibv_gid& gid = device.gids[index];
  if (gid.global.subnet_prefix == 0 && gid.global.interface_id == 0) return false;
  *entry = {};
  entry->gid = gid;
  entry->gid_index = index;
  entry->port_num = 1;
  entry->gid_type = IBV_GID_TYPE_ROCE_V2;
  return true;
}

}  // namespace
}  // namespace standin

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  Locked f;
  auto** list = new ibv_device*[f->devices.size() + 1];
  size_t i = 0;
  for (const auto& device : f->devices) list[i++] = device.get();
  list[i] = nullptr;
  if (count != nullptr) *count = static_cast<int>(i);
  return list;
}

void ibv_free_device_list(ibv_device** list) { delete[] list; }

const char* ibv_get_device_name(ibv_device* device) { return device->name; }
int ibv_get_device_index(ibv_device* device) { return static_cast<int>(static_cast<Device*>(device)->index) + 1; }
__be64 ibv_get_device_guid(ibv_device* device) { return static_cast<Device*>(device)->gids[0].global.interface_id; }

ibv_context* ibv_open_device(ibv_device* handle) {
  Locked f;
  auto& device = *static_cast<Device*>(handle);
  if (device.fatal) {
    errno = EIO;
    return nullptr;
  }
  auto* made = new Context;
  ibv_context& context = made->context;
  made->owner = &device;
  made->serial = f->contexts_opened++;
  made->sz = sizeof(verbs_context);
  made->query_port = query_port;
  made->query_device_ex = query_device_ex;
  context.device = &device;
  context.ops = operations();
  context.cmd_fd = -1;
  context.async_fd = make_descriptor();
  context.num_comp_vectors = 2;
  context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  ++f->objects;
  f->contexts.push_back(made);
  device.contexts.push_back(made);
  return &context;
}

int ibv_close_device(ibv_context* handle) {
  Locked f;
  auto* context = alive<Context>(static_cast<verbs_context*>(context_of(handle)), "ibv_close_device");
  if (context == nullptr) return EINVAL;
  if (context->uses > 0) {
    violate("ibv_close_device: %u objects of the context are left", context->uses);
    return EBUSY;
  }
  std::erase(f->contexts, context);
  std::erase(context->owner->contexts, context);
  close(context->context.async_fd);
  context->context.async_fd = -1;
  context->context.ops = tombstone()->ops;
  context->query_port = nullptr;
  context->query_device_ex = nullptr;
  bury(context);
  return 0;
}

int ibv_query_device(ibv_context* handle, ibv_device_attr* out) {
  Locked f;
  describe(*f, *context_of(handle)->owner, out);
  return 0;
}

// Called by programs without the extended table; the older structure is the beginning of today's.
int ibv_query_port(ibv_context* handle, uint8_t number, _compat_ibv_port_attr* out) {
  return query_port(handle, number, reinterpret_cast<ibv_port_attr*>(out), offsetof(ibv_port_attr, port_cap_flags2));
}

int ibv_query_gid(ibv_context* handle, uint8_t number, int index, ibv_gid* out) {
  Locked f;
  if (number != 1 || index < 0 || index >= kGids) {
    errno = EINVAL;
    return -1;
  }
  *out = context_of(handle)->owner->gids[index];
  return 0;
}

int _ibv_query_gid_ex(ibv_context* handle, uint32_t number, uint32_t index, ibv_gid_entry* out, uint32_t flags,
                      size_t size) {
  Locked f;
  ibv_gid_entry entry;
  if (number != 1 || index >= kGids || flags != 0) return EINVAL;
  if (!fill_entry(*context_of(handle)->owner, index, &entry)) return ENODATA;
  std::memcpy(out, &entry, std::min(size, sizeof entry));
  return 0;
}

ssize_t _ibv_query_gid_table(ibv_context* handle, ibv_gid_entry* out, size_t most, uint32_t flags, size_t size) {
  Locked f;
  if (flags != 0) return -EINVAL;
  size_t count = 0;
  for (uint32_t i = 0; i < kGids && count < most; ++i) {
    ibv_gid_entry entry;
    if (!fill_entry(*context_of(handle)->owner, i, &entry)) continue;
    std::memcpy(reinterpret_cast<char*>(out) + count++ * size, &entry, std::min(size, sizeof entry));
  }
  return static_cast<ssize_t>(count);
}

int ibv_query_pkey(ibv_context*, uint8_t number, int index, __be16* out) {
  if (number != 1 || index != 0) {
    errno = EINVAL;
    return -1;
  }
  *out = 0xffff;
  return 0;
}

int ibv_get_pkey_index(ibv_context*, uint8_t number, __be16 key) { return number == 1 && key == 0xffff ? 0 : -1; }

int ibv_fork_init() { return 0; }
ibv_fork_status ibv_is_fork_initialized() { return IBV_FORK_UNNEEDED; }

}  // extern "C"
