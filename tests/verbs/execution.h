// What devices do with posted work: one step of one queue pair at a time.
#pragma once

#include <optional>

#include "tests/verbs/fabric.h"

namespace standin {

// Whether a step of it would do anything.
bool has_work(const Qp& pair);
void step(Fabric& f, Qp& pair);
void step_reliable(Fabric& f, Qp& pair);
void step_datagram(Fabric& f, Qp& pair);

// To the error state: what is posted will be flushed.
void break_pair(Fabric& f, Qp& pair);
// Makes ghosts of what it was just placing, if there shall be any.
void leave_ghosts(Fabric& f, Qp& pair);

// --- memory ---------------------------------------------------------------------------------------------------------
// The registration behind a key, if it covers these bytes with these rights; else null.
Mr* local_memory(Fabric& f, const ibv_pd* domain, const ibv_sge& part, unsigned access);
Mr* remote_memory(Fabric& f, const ibv_pd* domain, uint64_t address, uint64_t length, uint32_t key, unsigned access);
inline uint8_t* bytes_at(const Mr& mr, uint64_t address) { return mr.bytes + (address - mr.iova); }

// --- bytes that are late (late.cc) --------------------------------------------------------------------------------------
// Bytes for the memory of `target`: to be put there now (true), or kept for later.
bool punctual(Fabric& f, Qp& target, const Mr& mr);
void keep(Fabric& f, Late bytes);
void arrive(Fabric& f, const Qp& target);
void arrive(Fabric& f, const Mr& mr);
void arrive_due(Fabric& f);

// --- receives -------------------------------------------------------------------------------------------------------
std::optional<Receive> take_receive(Fabric& f, Qp& pair);
// Scatters; SUCCESS, LOC_PROT_ERR or LOC_LEN_ERR.
ibv_wc_status fill(Fabric& f, Qp& pair, const Receive& receive, const uint8_t* bytes, size_t length);

// --- the network ----------------------------------------------------------------------------------------------------
Device* device_with(Fabric& f, const ibv_gid& gid);
bool reachable(const Fabric& f, const Device& from, const Device& to);
void deliver_due(Fabric& f);
void haunt_due(Fabric& f);
uint32_t packets(uint32_t length, ibv_mtu mtu);
inline uint32_t mtu_bytes(ibv_mtu mtu) { return 128u << mtu; }

}  // namespace standin
