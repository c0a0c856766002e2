#include "native/wire.h"

#include <algorithm>
#include <array>

namespace te {
namespace {

// An envelope is: magic "te" + kind + version (4 bytes), body, CRC-32C of all before it (4 bytes).
enum class Kind : uint8_t { kAddress = 'a', kRegion = 'r', kCounter = 'c' };
constexpr size_t kEnvelopeBytes = 8;

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kAddress:
      return "address";
    case Kind::kRegion:
      return "region descriptor";
    case Kind::kCounter:
      return "counter descriptor";
  }
  return "?";
}

// CRC-32C (Castagnoli), reflected polynomial 0x82F63B78, as in RFC 3720 appendix B.4.
constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F63B78u : 0);
    table[i] = value;
  }
  return table;
}

Writer open_envelope(Kind kind) {
  Writer out;
  out.put_bytes("te", 2);
  out.put(static_cast<uint8_t>(kind));
  out.put(kWireVersion);
  return out;
}

std::vector<uint8_t> close_envelope(Writer* out) {
  out->put(crc32c(out->bytes()));
  return std::move(out->bytes());
}

Error open_body(std::span<const uint8_t> bytes, Kind kind, std::span<const uint8_t>* body) {
  const char* what = kind_name(kind);
  if (bytes.size() < kEnvelopeBytes)
    return Error(Status::kDescriptor,
                 format("no %s: %zu bytes, at least %zu are needed", what, bytes.size(), kEnvelopeBytes));
  if (bytes[0] != 't' || bytes[1] != 'e')
    return Error(Status::kDescriptor, format("no %s: it begins with 0x%02x%02x", what, bytes[0], bytes[1]));
  if (bytes[2] != static_cast<uint8_t>(kind))
    return Error(Status::kDescriptor, format("no %s: kind 0x%02x", what, bytes[2]));
  if (bytes[3] != kWireVersion)
    return Error(Status::kDescriptor,
                 format("%s of version %u, this build reads version %u: use the same release on both sides", what,
                        bytes[3], kWireVersion));
  Reader tail(bytes.last(4));
  if (tail.get<uint32_t>() != crc32c(bytes.first(bytes.size() - 4)))
    return Error(Status::kDescriptor,
                 format("damaged or truncated %s of %zu bytes: its checksum does not match", what, bytes.size()));
  *body = bytes.subspan(4, bytes.size() - kEnvelopeBytes);
  return {};
}

Error malformed(Kind kind) {
  return Error(Status::kDescriptor, format("malformed %s: a field is out of its range", kind_name(kind)));
}

}  // namespace

uint32_t crc32c(std::span<const uint8_t> bytes) {
  static constexpr std::array<uint32_t, 256> table = make_table();
  uint32_t value = 0xFFFFFFFFu;
  for (const uint8_t byte : bytes) value = (value >> 8) ^ table[(value ^ byte) & 0xFF];
  return ~value;
}

void write_address(Writer* out, const te_address& address) {
  out->put_bytes(address.identity, sizeof address.identity);
  out->put(address.generation);
  const auto name_length = static_cast<uint8_t>(strnlen(address.transport, sizeof address.transport));
  out->put(name_length);
  out->put_bytes(address.transport, name_length);
  out->put(static_cast<uint8_t>(address.nic_count));
  for (uint32_t i = 0; i < address.nic_count; ++i) {
    out->put(static_cast<uint8_t>(address.nics[i].length));
    out->put_bytes(address.nics[i].bytes, address.nics[i].length);
  }
}

bool read_address(Reader* in, te_address* address) {
  *address = te_address{};
  in->get_bytes(address->identity, sizeof address->identity);
  address->generation = in->get<uint64_t>();
  const auto name_length = in->get<uint8_t>();
  if (name_length == 0 || name_length >= sizeof address->transport) return false;
  in->get_bytes(address->transport, name_length);
  address->nic_count = in->get<uint8_t>();
  if (address->nic_count == 0 || address->nic_count > TE_MAX_NICS) return false;
  for (uint32_t i = 0; i < address->nic_count; ++i) {
    te_nic_address& nic = address->nics[i];
    nic.length = in->get<uint8_t>();
    if (nic.length == 0 || nic.length > sizeof nic.bytes) return false;
    in->get_bytes(nic.bytes, nic.length);
  }
  return in->ok();
}

std::vector<uint8_t> encode(const te_address& address) {
  Writer out = open_envelope(Kind::kAddress);
  write_address(&out, address);
  return close_envelope(&out);
}

std::vector<uint8_t> encode(const te_region_descriptor& d) {
  Writer out = open_envelope(Kind::kRegion);
  write_address(&out, d.address);
  out.put(d.serial);
  out.put(d.length);
  out.put(d.device_kind);
  out.put(d.device_index);
  for (uint32_t i = 0; i < d.address.nic_count; ++i) {
    out.put(d.base[i]);
    out.put(d.key[i]);
  }
  return close_envelope(&out);
}

std::vector<uint8_t> encode(const te_counter_descriptor& d) {
  Writer out = open_envelope(Kind::kCounter);
  write_address(&out, d.address);
  out.put(d.serial);
  return close_envelope(&out);
}

Error decode(std::span<const uint8_t> bytes, te_address* address) {
  std::span<const uint8_t> body;
  if (Error e = open_body(bytes, Kind::kAddress, &body)) return e;
  Reader in(body);
  te_address out;
  if (!read_address(&in, &out) || in.left() != 0) return malformed(Kind::kAddress);
  *address = out;
  return {};
}

Error decode(std::span<const uint8_t> bytes, te_region_descriptor* descriptor) {
  std::span<const uint8_t> body;
  if (Error e = open_body(bytes, Kind::kRegion, &body)) return e;
  Reader in(body);
  te_region_descriptor out{};
  if (!read_address(&in, &out.address)) return malformed(Kind::kRegion);
  out.serial = in.get<uint64_t>();
  out.length = in.get<uint64_t>();
  out.device_kind = in.get<int32_t>();
  out.device_index = in.get<int32_t>();
  for (uint32_t i = 0; i < out.address.nic_count; ++i) {
    out.base[i] = in.get<uint64_t>();
    out.key[i] = in.get<uint64_t>();
  }
  const bool device_known = out.device_kind == TE_DEVICE_HOST || out.device_kind == TE_DEVICE_CUDA;
  if (!in.ok() || in.left() != 0 || out.serial == 0 || !device_known) return malformed(Kind::kRegion);
  *descriptor = out;
  return {};
}

Error decode(std::span<const uint8_t> bytes, te_counter_descriptor* descriptor) {
  std::span<const uint8_t> body;
  if (Error e = open_body(bytes, Kind::kCounter, &body)) return e;
  Reader in(body);
  te_counter_descriptor out{};
  if (!read_address(&in, &out.address)) return malformed(Kind::kCounter);
  out.serial = in.get<uint64_t>();
  if (!in.ok() || in.left() != 0 || out.serial == 0) return malformed(Kind::kCounter);
  *descriptor = out;
  return {};
}

}  // namespace te
