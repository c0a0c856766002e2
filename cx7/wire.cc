#include "cx7/wire.h"

namespace te::cx7 {
namespace {

constexpr uint8_t kAddressVersion = 1;
constexpr uint32_t kAddressBytes = 1 + 1 + 2 + 4 + 4 + 8 + 16;

template <typename Out>
void put(Out* out, const NicAddress& address) {
  out->template put<uint8_t>(kAddressVersion);
  out->template put<uint8_t>(address.ethernet);
  out->put(address.lid);
  out->put(address.queue_pair);
  out->put(address.queue_key);
  out->put(address.cookie);
  for (const uint8_t byte : address.gid) out->put(byte);
}

bool take(Reader* in, NicAddress* address) {
  const auto version = in->get<uint8_t>();
  const auto link = in->get<uint8_t>();
  address->ethernet = link != 0;
  address->lid = in->get<uint16_t>();
  address->queue_pair = in->get<uint32_t>();
  address->queue_key = in->get<uint32_t>();
  address->cookie = in->get<uint64_t>();
  if (!in->get_bytes(address->gid, sizeof address->gid)) return false;
  // 24 bits of queue pair number; a queue key with bit 31 is for privileged senders only (InfiniBand 10.2.5).
  return version == kAddressVersion && link <= 1 && address->queue_pair != 0 && address->queue_pair < 1u << 24 &&
         address->queue_key >> 31 == 0;
}

bool plausible(const QueuePairs& pairs) {
  for (const uint32_t number : pairs.number)
    if (number == 0 || number >= 1u << 24) return false;
  for (const uint32_t sequence : pairs.sequence)
    if (sequence >= 1u << 24) return false;
  return pairs.mtu >= 1 && pairs.mtu <= 5;
}

}  // namespace

te_nic_address encode(const NicAddress& address) {
  te_nic_address out{};
  SpanWriter writer(out.bytes);
  put(&writer, address);
  out.length = static_cast<uint32_t>(writer.size());
  return out;
}

bool decode(const te_nic_address& bytes, NicAddress* address) {
  if (bytes.length != kAddressBytes) return false;
  Reader reader(std::span(bytes.bytes, bytes.length));
  NicAddress found;
  if (!take(&reader, &found)) return false;
  *address = found;
  return true;
}

HandshakeBytes encode(const HandshakeMessage& message) {
  HandshakeBytes out{};
  SpanWriter writer(out);
  writer.put(kHandshakeMagic);
  writer.put(kHandshakeVersion);
  writer.put(static_cast<uint8_t>(message.kind));
  writer.put(static_cast<uint8_t>(message.ready));
  writer.put(message.kind == HandshakeKind::kRefuse ? static_cast<uint8_t>(message.refusal) : uint8_t{0});
  put(&writer, message.sender);
  writer.put(message.target_cookie);
  for (const uint8_t byte : message.identity) writer.put(byte);
  writer.put(message.generation);
  writer.put(message.target_generation);
  writer.put(message.attempt);
  writer.put(message.echo);
  for (const uint32_t number : message.pairs.number) writer.put(number);
  for (const uint32_t sequence : message.pairs.sequence) writer.put(sequence);
  writer.put(message.pairs.mtu);
  writer.put(message.pairs.reads);
  // The rest stays zero up to the checksum.
  const uint32_t sum = crc32c(std::span(out).first(out.size() - 4));
  for (size_t i = 0; i < 4; ++i) out[out.size() - 4 + i] = static_cast<uint8_t>(sum >> (8 * i));
  return out;
}

Readable decode(std::span<const uint8_t> bytes, HandshakeMessage* message) {
  if (bytes.size() < kHandshakeBytes) return Readable::kNo;
  const auto body = bytes.first(kHandshakeBytes - 4);
  if (Reader(bytes.subspan(body.size(), 4)).get<uint32_t>() != crc32c(body)) return Readable::kNo;
  Reader reader(body);
  HandshakeMessage found;
  if (reader.get<uint32_t>() != kHandshakeMagic) return Readable::kNo;
  found.version = reader.get<uint8_t>();
  const auto kind = reader.get<uint8_t>();
  const auto ready = reader.get<uint8_t>();
  const auto refusal = reader.get<uint8_t>();
  if (!take(&reader, &found.sender)) return Readable::kNo;
  found.target_cookie = reader.get<uint64_t>();
  if (!reader.get_bytes(found.identity, sizeof found.identity)) return Readable::kNo;
  found.generation = reader.get<uint64_t>();
  found.target_generation = reader.get<uint64_t>();
  found.attempt = reader.get<uint64_t>();
  found.echo = reader.get<uint64_t>();
  found.kind = static_cast<HandshakeKind>(kind);
  found.refusal = static_cast<Refusal>(refusal);
  if (found.version != kHandshakeVersion) {
    // Only offers are worth an answer: were refusals refused, two versions would go on for ever.
    const bool refused = found.kind == HandshakeKind::kRefuse && found.refusal == Refusal::kVersion;
    if (!refused && found.kind != HandshakeKind::kOffer) return Readable::kNo;
    *message = found;
    return refused ? Readable::kYes : Readable::kOtherVersion;
  }
  if (kind < 1 || kind > 3 || ready > 1) return Readable::kNo;
  found.ready = ready != 0;
  for (uint32_t& number : found.pairs.number) number = reader.get<uint32_t>();
  for (uint32_t& sequence : found.pairs.sequence) sequence = reader.get<uint32_t>();
  found.pairs.mtu = reader.get<uint8_t>();
  found.pairs.reads = reader.get<uint8_t>();
  if (!reader.ok()) return Readable::kNo;
  if (found.kind == HandshakeKind::kOffer && (!plausible(found.pairs) || found.attempt == 0)) return Readable::kNo;
  if (found.kind == HandshakeKind::kRefuse && (refusal < 1 || refusal > 4)) return Readable::kNo;
  *message = found;
  return Readable::kYes;
}

}  // namespace te::cx7
