// The C entry points of native/te.h: each checks its handle, calls the engine, and turns an Error into the C struct. No exception leaves.
#include "proxy/c_api.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <new>

#include "native/gpu/memory.h"
#include "native/wire.h"
#include "proxy/engine.h"
#include "proxy/providers.h"

using te::Engine;
using te::Error;
using te::Status;
using te::c_api::engine_of;
using te::c_api::no_pointer;
using te::c_api::with_engine;

namespace {

// The same for calls that give a transfer.
template <typename F>
te_transfer* transfer_from(te_engine* handle, std::initializer_list<const void*> needed, te_error* error, F&& body) {
  te_transfer* transfer = nullptr;
  const int32_t status = with_engine(handle, needed, error, [&](Engine& engine) {
    Error e;
    transfer = body(engine, &e);
    return e;
  });
  return status == TE_OK ? transfer : nullptr;
}

template <typename T>
int32_t encode_into(const T& value, uint8_t* bytes, uint64_t capacity, uint64_t* length, te_error* error) {
  if (bytes == nullptr || length == nullptr) return no_pointer(error);
  try {
    const std::vector<uint8_t> encoded = te::encode(value);
    if (encoded.size() > capacity)
      return te::export_error(Error(Status::kArgument, te::format("%zu bytes are needed, %llu given", encoded.size(),
                                                                  static_cast<unsigned long long>(capacity))),
                              error);
    std::memcpy(bytes, encoded.data(), encoded.size());
    *length = encoded.size();
    return TE_OK;
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory"), error);
  }
}

bool sane(const te_address& address) {
  if (address.nic_count == 0 || address.nic_count > TE_MAX_NICS ||
      strnlen(address.transport, sizeof address.transport) == sizeof address.transport || address.transport[0] == '\0')
    return false;
  for (uint32_t i = 0; i < address.nic_count; ++i)
    if (address.nics[i].length == 0 || address.nics[i].length > sizeof address.nics[i].bytes) return false;
  return true;
}

Error check_struct(const te_address& address) {
  return sane(address) ? Error()
                       : Error(Status::kArgument, "the address structure is malformed: use te_address_decode");
}

template <typename T>
int32_t decode_from(const uint8_t* bytes, uint64_t length, T* out, te_error* error) {
  if (out == nullptr || (bytes == nullptr && length > 0)) return no_pointer(error);
  return te::export_error(te::decode(std::span(bytes, length), out), error);
}

}  // namespace

extern "C" {

int32_t te_abi_version(void) { return TE_ABI_VERSION; }

uint64_t te_struct_bytes(const char* name) {
  struct Row {
    const char* name;
    uint64_t bytes;
  };
  static constexpr Row rows[] = {
      {"te_error", sizeof(te_error)},
      {"te_settings", sizeof(te_settings)},
      {"te_nic_address", sizeof(te_nic_address)},
      {"te_address", sizeof(te_address)},
      {"te_region_descriptor", sizeof(te_region_descriptor)},
      {"te_counter_descriptor", sizeof(te_counter_descriptor)},
      {"te_engine_info", sizeof(te_engine_info)},
      {"te_nic_info", sizeof(te_nic_info)},
      {"te_peer_info", sizeof(te_peer_info)},
      {"te_stats", sizeof(te_stats)},
      {"te_event", sizeof(te_event)},
      {"te_message", sizeof(te_message)},
      {"te_write_args", sizeof(te_write_args)},
      {"te_page_args", sizeof(te_page_args)},
      {"te_batch_entry", sizeof(te_batch_entry)},
      {"te_target_member", sizeof(te_target_member)},
      {"te_scatter_args", sizeof(te_scatter_args)},
      {"te_times", sizeof(te_times)},
      {"te_flag_info", sizeof(te_flag_info)},
      {"te_watcher_info", sizeof(te_watcher_info)},
      {"te_trigger_args", sizeof(te_trigger_args)},
      {"te_trigger_info", sizeof(te_trigger_info)},
      {"te_rdma_settings", sizeof(te_rdma_settings)},
      {"te_rdma_port", sizeof(te_rdma_port)},
      {"te_region_info", sizeof(te_region_info)},
      {"te_device_info", sizeof(te_device_info)},
  };
  for (const Row& row : rows)
    if (name != nullptr && std::strcmp(row.name, name) == 0) return row.bytes;
  return 0;
}

const char* te_status_name(int32_t status) { return te::status_name(static_cast<Status>(status)); }

void te_settings_defaults(te_settings* settings) {
  constexpr int64_t kSecond = 1'000'000'000;
  *settings = te_settings{};
  settings->struct_bytes = sizeof(te_settings);
  settings->default_timeout_ns = 30 * kSecond;
  settings->connect_timeout_ns = 10 * kSecond;
  settings->peer_timeout_ns = 3 * kSecond;
  settings->close_timeout_ns = 5 * kSecond;
  settings->spin_ns = 200'000;
  settings->polling = TE_POLL_AUTO;
  settings->core = TE_CORE_AUTO;
  settings->operations = 4096;
  settings->operations_per_peer = 4096;
  settings->immediate_window = 256;
  settings->assembly_slots = 32;
  settings->message_window = 32;
  settings->max_message_bytes = 1u << 20;
  settings->message_queue_bytes = 8u << 20;
  settings->shard_bytes = 64u << 10;
  settings->max_peers = 1024;
  settings->max_regions = 1u << 16;
  settings->max_counters = 1u << 16;
  settings->bursts = 64;
  // Several times what any NIC needs to be busy (50 GB/s for 100 us are 5 MB), and little enough that messages, which queue
  // behind it on a stream such as TCP's, are not late signs of life.
  settings->peer_window_bytes = 32u << 20;
  settings->nic_window_bytes = 256u << 20;
  settings->rdma.gid_index = -1;
  settings->rdma.ack_timeout = 15;  // 134 to 537 ms
  settings->rdma.retry_count = 7;
  settings->rdma.rnr_retry = 7;
  settings->rdma.rnr_timer = 12;
  settings->staging_slots = 64;
  settings->staging_slot_bytes = 256u << 10;
}

int32_t te_transport_probe(const char* transport, te_engine_info* info, te_error* error) {
  if (info == nullptr) return no_pointer(error);
  try {
    std::string provider, library;
    if (Error e = te::probe_transport(transport == nullptr ? "" : transport, &provider, &library))
      return te::export_error(e, error);
    *info = te_engine_info{};
    std::snprintf(info->transport, sizeof info->transport, "%s", transport);
    std::snprintf(info->provider, sizeof info->provider, "%s", provider.c_str());
    std::snprintf(info->library, sizeof info->library, "%s", library.c_str());
    return TE_OK;
  } catch (const std::exception& failure) {
    return te::export_error(Error(Status::kTransportUnavailable, failure.what()), error);
  }
}

int32_t te_rdma_ports(const char* root, const te_rdma_settings* rdma, te_rdma_port* ports, uint32_t capacity,
                      uint32_t* count, te_error* error) {
  if (count == nullptr || (ports == nullptr && capacity > 0)) return no_pointer(error);
  try {
    te_settings defaults;
    te_settings_defaults(&defaults);
    const te_rdma_settings& settings = rdma != nullptr ? *rdma : defaults.rdma;
    if (Error e = te::check_rdma(settings)) return te::export_error(e, error);
    const std::vector<te_rdma_port> found = te::list_rdma_ports(root == nullptr ? "" : root, settings);
    std::copy_n(found.begin(), std::min<size_t>(found.size(), capacity), ports);
    *count = static_cast<uint32_t>(found.size());
    return TE_OK;
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory"), error);
  } catch (const std::exception& failure) {
    return te::export_error(Error(Status::kTransport, failure.what()), error);
  }
}

int32_t te_address_encode(const te_address* address, uint8_t* bytes, uint64_t capacity, uint64_t* length,
                          te_error* error) {
  if (address == nullptr) return no_pointer(error);
  if (Error e = check_struct(*address)) return te::export_error(e, error);
  return encode_into(*address, bytes, capacity, length, error);
}
int32_t te_address_decode(const uint8_t* bytes, uint64_t length, te_address* address, te_error* error) {
  return decode_from(bytes, length, address, error);
}
int32_t te_region_descriptor_encode(const te_region_descriptor* d, uint8_t* bytes, uint64_t capacity, uint64_t* length,
                                    te_error* error) {
  if (d == nullptr) return no_pointer(error);
  if (Error e = check_struct(d->address)) return te::export_error(e, error);
  return encode_into(*d, bytes, capacity, length, error);
}
int32_t te_region_descriptor_decode(const uint8_t* bytes, uint64_t length, te_region_descriptor* d, te_error* error) {
  return decode_from(bytes, length, d, error);
}
int32_t te_counter_descriptor_encode(const te_counter_descriptor* d, uint8_t* bytes, uint64_t capacity,
                                     uint64_t* length, te_error* error) {
  if (d == nullptr) return no_pointer(error);
  if (Error e = check_struct(d->address)) return te::export_error(e, error);
  return encode_into(*d, bytes, capacity, length, error);
}
int32_t te_counter_descriptor_decode(const uint8_t* bytes, uint64_t length, te_counter_descriptor* d, te_error* error) {
  return decode_from(bytes, length, d, error);
}

// --- engine

int32_t te_engine_open(const te_settings* settings, te_engine** engine, te_error* error) {
  if (engine == nullptr) return no_pointer(error);
  try {
    if (settings == nullptr || settings->struct_bytes != sizeof(te_settings))
      return te::export_error(Error(Status::kArgument, "te_settings of another version: rebuild against this header"),
                              error);
    Engine* opened = nullptr;
    if (Error e = Engine::open(*settings, &opened)) return te::export_error(e, error);
    *engine = reinterpret_cast<te_engine*>(opened);
    return TE_OK;
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory while the engine was opened"), error);
  } catch (const std::exception& failure) {
    return te::export_error(Error(Status::kTransport, failure.what()), error);
  }
}

int32_t te_engine_close(te_engine* engine, int64_t timeout_ns, te_error* error) {
  if (engine == nullptr) return TE_OK;
  try {
    return te::export_error(engine_of(engine)->close(timeout_ns), error);
  } catch (const std::exception& failure) {
    return te::export_error(Error(Status::kTransport, failure.what()), error);
  }
}

int64_t te_engine_silence(te_engine* engine) {
  return engine == nullptr || engine_of(engine)->forked() ? 0 : engine_of(engine)->silence();
}

void te_engine_free(te_engine* engine) {
  if (engine == nullptr || engine_of(engine)->forked()) return;  // a child leaves its parent's objects alone
  static_cast<void>(engine_of(engine)->close(-1));
  if (engine_of(engine)->stuck()) return;
  delete engine_of(engine);
}

int32_t te_engine_describe(te_engine* engine, te_engine_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe(info); });
}
int32_t te_engine_address(te_engine* engine, te_address* address, te_error* error) {
  return with_engine(engine, {address}, error, [&](Engine& e) {
    *address = e.address();
    return Error();
  });
}
int32_t te_engine_stats(te_engine* engine, te_stats* stats, te_error* error) {
  return with_engine(engine, {stats}, error, [&](Engine& e) {
    e.statistics(stats);
    return Error();
  });
}
int32_t te_nic_describe(te_engine* engine, uint32_t nic, te_nic_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe_nic(nic, info); });
}
int32_t te_engine_inject(te_engine* engine, const char* command, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.inject(command == nullptr ? "" : command); });
}

// --- memory

int32_t te_region_register(te_engine* engine, void* address, uint64_t length, int32_t device_kind, int32_t device_index,
                           te_handle* region, te_error* error) {
  return with_engine(engine, {region}, error, [&](Engine& e) {
    return e.register_region({address, length, device_kind, device_index}, region);
  });
}
int32_t te_region_register_dmabuf(te_engine* engine, void* address, uint64_t length, int32_t device_kind,
                                  int32_t device_index, int32_t fd, uint64_t offset, te_handle* region,
                                  te_error* error) {
  return with_engine(engine, {region}, error, [&](Engine& e) {
    if (fd < 0) return Error(Status::kArgument, te::format("%d is no descriptor of a dma-buf", fd));
    if (length == 0) return Error(Status::kArgument, "a dma-buf of no bytes cannot be registered");
    return e.register_region({address, length, device_kind, device_index, fd, offset}, region);
  });
}
int32_t te_region_register_staged(te_engine* engine, void* address, uint64_t length, int32_t device_index,
                                  te_handle* region, te_error* error) {
  return with_engine(engine, {region}, error, [&](Engine& e) {
    return e.register_staged({address, length, TE_DEVICE_CUDA, device_index}, region);
  });
}
int32_t te_region_info_get(te_engine* engine, te_handle region, te_region_info* info, te_error* error) {
  return with_engine(engine, {info}, error, [&](Engine& e) { return e.describe_reach(region, info); });
}
int32_t te_device_describe(int32_t index, te_device_info* info, te_error* error) {
  if (info == nullptr) return no_pointer(error);
  try {
    return te::export_error(te::gpu::describe_device(index, info), error);
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory"), error);
  }
}
int32_t te_pointer_device(uint64_t address, int32_t* index, te_error* error) {
  if (index == nullptr) return no_pointer(error);
  try {
    return te::export_error(te::gpu::device_of(address, index), error);
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory"), error);
  }
}
int32_t te_mapped_allocate(int32_t device_index, uint64_t length, void** memory, te_error* error) {
  if (memory == nullptr) return no_pointer(error);
  try {
    return te::export_error(Engine::allocate_mapped(device_index, length, memory), error);
  } catch (const std::bad_alloc&) {
    return te::export_error(Error(Status::kExhausted, "out of memory"), error);
  }
}
void te_mapped_free(void* memory) { Engine::free_mapped(memory); }
int32_t te_region_describe(te_engine* engine, te_handle region, te_region_descriptor* descriptor, te_error* error) {
  return with_engine(engine, {descriptor}, error, [&](Engine& e) { return e.describe_region(region, descriptor); });
}
int32_t te_region_close(te_engine* engine, te_handle region, int64_t timeout_ns, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_region(region, timeout_ns); });
}
int32_t te_remote_region(te_engine* engine, const te_region_descriptor* descriptor, te_handle* remote,
                         te_error* error) {
  return with_engine(engine, {descriptor, remote}, error, [&](Engine& e) {
    if (Error bad = check_struct(descriptor->address)) return bad;
    return e.remote_region(*descriptor, remote);
  });
}

// --- counters

int32_t te_counter_open(te_engine* engine, te_handle* counter, te_error* error) {
  return with_engine(engine, {counter}, error, [&](Engine& e) { return e.open_counter(counter); });
}
int32_t te_counter_describe(te_engine* engine, te_handle counter, te_counter_descriptor* descriptor, te_error* error) {
  return with_engine(engine, {descriptor}, error, [&](Engine& e) { return e.describe_counter(counter, descriptor); });
}
int32_t te_counter_value(te_engine* engine, te_handle counter, uint64_t* value, te_error* error) {
  return with_engine(engine, {value}, error, [&](Engine& e) { return e.counter_value(counter, value); });
}
int32_t te_counter_wait(te_engine* engine, te_handle counter, uint64_t at_least, int64_t timeout_ns,
                        const int32_t* peers, uint32_t peer_count, te_error* error) {
  return with_engine(engine, {peer_count > 0 ? static_cast<const void*>(peers) : engine}, error, [&](Engine& e) {
    return e.wait_counter(counter, at_least, timeout_ns, std::span(peers, peer_count));
  });
}
te_transfer* te_counter_reached(te_engine* engine, te_handle counter, uint64_t at_least, int64_t timeout_ns,
                                const int32_t* peers, uint32_t peer_count, te_error* error) {
  return transfer_from(engine, {peer_count > 0 ? static_cast<const void*>(peers) : engine}, error,
                       [&](Engine& e, Error* why) {
                         return e.counter_reached(counter, at_least, timeout_ns, std::span(peers, peer_count), why);
                       });
}
int32_t te_counter_close(te_engine* engine, te_handle counter, int64_t timeout_ns, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_counter(counter, timeout_ns); });
}
int32_t te_remote_counter(te_engine* engine, const te_counter_descriptor* descriptor, te_handle* counter,
                          te_error* error) {
  return with_engine(engine, {descriptor, counter}, error, [&](Engine& e) {
    if (Error bad = check_struct(descriptor->address)) return bad;
    return e.remote_counter(*descriptor, counter);
  });
}

// --- peers

int32_t te_peer(te_engine* engine, const te_address* address, int32_t* peer, te_error* error) {
  return with_engine(engine, {address, peer}, error, [&](Engine& e) {
    if (Error bad = check_struct(*address)) return bad;
    return e.peer(*address, peer);
  });
}
int32_t te_peer_describe(te_engine* engine, int32_t peer, te_peer_info* info, te_error* error) {
  if (engine == nullptr || engine_of(engine)->forked())
    return te::export_error(Error(Status::kForked, "the engine belongs to the parent process"), error);
  if (info == nullptr) return no_pointer(error);
  return te::export_error(engine_of(engine)->describe_peer(peer, info), error);
}
te_transfer* te_peer_connect(te_engine* engine, int32_t peer, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {}, error, [&](Engine& e, Error* why) {
    return e.peer_operation(te::OperationKind::kConnect, peer, timeout_ns, why);
  });
}
te_transfer* te_peer_disconnect(te_engine* engine, int32_t peer, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {}, error, [&](Engine& e, Error* why) {
    return e.peer_operation(te::OperationKind::kDisconnect, peer, timeout_ns, why);
  });
}
te_transfer* te_peer_fence(te_engine* engine, int32_t peer, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {}, error, [&](Engine& e, Error* why) {
    return e.peer_operation(te::OperationKind::kFence, peer, timeout_ns, why);
  });
}

// --- transfers

te_transfer* te_write(te_engine* engine, te_handle region, uint64_t source_offset, te_handle remote,
                      uint64_t target_offset, uint64_t length, te_handle counter, uint32_t flags, int64_t timeout_ns,
                      te_error* error) {
  return transfer_from(engine, {}, error, [&](Engine& e, Error* why) {
    return e.write({region, remote, counter, flags, source_offset, target_offset, length}, timeout_ns, why);
  });
}
te_transfer* te_write_pages(te_engine* engine, const te_page_args* pages, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {pages}, error,
                       [&](Engine& e, Error* why) { return e.write_pages(*pages, timeout_ns, why); });
}
te_transfer* te_write_batch(te_engine* engine, const te_batch_entry* entries, uint64_t count, int64_t timeout_ns,
                            te_error* error) {
  return transfer_from(
      engine, {count > 0 ? static_cast<const void*>(entries) : engine}, error,
      [&](Engine& e, Error* why) { return e.write_batch(std::span(entries, count), timeout_ns, why); });
}
te_transfer* te_send(te_engine* engine, int32_t peer, const void* data, uint64_t length, int64_t timeout_ns,
                     te_error* error) {
  return transfer_from(engine, {length > 0 ? data : engine}, error,
                       [&](Engine& e, Error* why) { return e.send(peer, data, length, timeout_ns, why); });
}

// --- peer groups and prepared transfers

int32_t te_target_open(te_engine* engine, const te_target_member* members, uint32_t count, int32_t place,
                       te_handle* target, te_error* error) {
  return with_engine(engine, {target, count > 0 ? static_cast<const void*>(members) : engine}, error,
                     [&](Engine& e) { return e.open_target(std::span(members, count), place, target); });
}
int32_t te_target_replace(te_engine* engine, te_handle target, uint32_t member, const te_target_member* value,
                          te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.replace_member(target, member, value); });
}
int32_t te_target_close(te_engine* engine, te_handle target, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_target(target); });
}
te_transfer* te_scatter(te_engine* engine, const te_scatter_args* scatter, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {scatter}, error,
                       [&](Engine& e, Error* why) { return e.scatter(*scatter, timeout_ns, why); });
}
int32_t te_transfer_failed_members(te_transfer* transfer, uint32_t* members, te_error* errors, uint32_t capacity,
                                   uint32_t* count) {
  if (!transfer->ended()) return TE_AGAIN;
  *count = 0;
  for (const auto* failed = transfer->first_failed; failed != nullptr; failed = failed->next, ++*count) {
    if (*count >= capacity) continue;
    members[*count] = failed->member;
    errors[*count] = failed->error;
  }
  return TE_OK;
}
int32_t te_transfer_times(te_transfer* transfer, te_times* times) {
  const bool ended = transfer->ended();  // what the worker writes is read only then
  *times = te_times{transfer->submitted_ns, 0, 0, 0, 0};
  if (!ended) return TE_AGAIN;
  *times = {transfer->submitted_ns, transfer->taken_ns, transfer->first_post_ns, transfer->posted_ns,
            transfer->finished_ns};
  return TE_OK;
}

int32_t te_prepare_write(te_engine* engine, const te_write_args* write, te_handle* prepared, te_error* error) {
  return with_engine(engine, {write, prepared}, error, [&](Engine& e) { return e.prepare_write(*write, prepared); });
}
int32_t te_prepare_pages(te_engine* engine, const te_page_args* pages, te_handle* prepared, te_error* error) {
  return with_engine(engine, {pages, prepared}, error, [&](Engine& e) { return e.prepare_pages(*pages, prepared); });
}
int32_t te_prepare_scatter(te_engine* engine, const te_scatter_args* scatter, te_handle* prepared, te_error* error) {
  return with_engine(engine, {scatter, prepared}, error,
                     [&](Engine& e) { return e.prepare_scatter(*scatter, prepared); });
}
te_transfer* te_post(te_engine* engine, te_handle prepared, int64_t timeout_ns, te_error* error) {
  return transfer_from(engine, {}, error, [&](Engine& e, Error* why) { return e.post(prepared, timeout_ns, why); });
}
int32_t te_prepared_close(te_engine* engine, te_handle prepared, te_error* error) {
  return with_engine(engine, {}, error, [&](Engine& e) { return e.close_prepared(prepared); });
}

int32_t te_transfer_wait(te_transfer* transfer, int64_t timeout_ns) {
  return te::wait_for_bits(transfer, te_transfer::kDone, timeout_ns) ? TE_OK : TE_AGAIN;
}
int32_t te_transfer_result(te_transfer* transfer, te_error* error) {
  if (!transfer->ended()) return TE_AGAIN;
  if (transfer->status != Status::kOk) te::export_result(*transfer, error);
  return static_cast<int32_t>(transfer->status);
}
int32_t te_transfer_quiesced(te_transfer* transfer) {
  return (transfer->state.load(std::memory_order_acquire) & te_transfer::kQuiesced) != 0 ? 1 : 0;
}
int32_t te_transfer_wait_quiesced(te_transfer* transfer, int64_t timeout_ns) {
  return te::wait_for_bits(transfer, te_transfer::kQuiesced, timeout_ns) ? TE_OK : TE_AGAIN;
}
int32_t te_transfer_notify(te_transfer* transfer, uint64_t user) {
  transfer->user = user;
  const uint32_t old = transfer->state.fetch_or(te_transfer::kNotify, std::memory_order_acq_rel);
  return (old & te_transfer::kDone) != 0 ? 1 : 0;
}
int32_t te_transfer_cancel(te_transfer* transfer) {
  if (transfer->ended()) return TE_OK;
  transfer->cancel_requested.store(true, std::memory_order_release);
  if (!transfer->ended()) transfer->engine->request_cancel();
  return TE_OK;
}
void te_transfer_release(te_transfer* transfer) {
  if (transfer != nullptr) te::release_transfer(transfer);
}

// --- messages and events

int32_t te_message_receive(te_engine* engine, int64_t timeout_ns, te_message* message, te_error* error) {
  return with_engine(engine, {message}, error, [&](Engine& e) { return e.receive(timeout_ns, message); });
}
void te_message_release(te_engine* engine, te_message* message) { engine_of(engine)->release_message(message); }

// Also after close: what is left is still fetched.
int32_t te_events_fetch(te_engine* engine, int64_t timeout_ns, te_event* events, uint32_t capacity, uint32_t* count,
                        te_error* error) {
  if (engine == nullptr || events == nullptr || count == nullptr) return no_pointer(error);
  if (engine_of(engine)->forked())
    return te::export_error(Error(Status::kForked, "the engine belongs to the parent process"), error);
  return engine_of(engine)->events().fetch(engine_of(engine)->timeout_or_default(timeout_ns), events, capacity, count);
}
int32_t te_events_wake(te_engine* engine) {
  if (engine == nullptr || engine_of(engine)->forked()) return TE_ERR_ARGUMENT;
  engine_of(engine)->events().wake();
  return TE_OK;
}

}  // extern "C"
