#include "native/control.h"

#include <algorithm>

#include "native/immediate.h"

namespace te {
namespace {

bool has_serial(RecordType type) {
  return type != RecordType::kSlots && type != RecordType::kRetireSlot && type != RecordType::kWriteOff &&
         type != RecordType::kBye && type != RecordType::kByeDone && type != RecordType::kStageRequest &&
         type != RecordType::kStageSlots && type != RecordType::kStageReturn && type != RecordType::kStagedDone;
}

void write_keys(Writer* out, const Record& r) {
  out->put(r.length);
  out->put(r.slot_bytes);
  out->put(r.nics);
  for (uint32_t i = 0; i < r.nics; ++i) {
    out->put(r.base[i]);
    out->put(r.key[i]);
  }
}

bool read_keys(Reader* in, Record* r) {
  r->length = in->get<uint64_t>();
  r->slot_bytes = in->get<uint32_t>();
  r->nics = in->get<uint8_t>();
  if (r->nics > TE_MAX_NICS) return false;
  for (uint32_t i = 0; i < r->nics; ++i) {
    r->base[i] = in->get<uint64_t>();
    r->key[i] = in->get<uint64_t>();
  }
  return true;
}

bool read_ids(Reader* in, std::vector<uint16_t>* ids, uint32_t most) {
  const uint32_t count = in->get<uint16_t>();
  if (count > most || count * sizeof(uint16_t) > in->left()) return false;
  ids->resize(count);
  for (uint16_t& id : *ids) id = in->get<uint16_t>();
  return true;
}

void write_ids(Writer* out, const std::vector<uint16_t>& ids) {
  out->put(static_cast<uint16_t>(ids.size()));
  for (const uint16_t id : ids) out->put(id);
}

bool read_flag(Reader* in, bool* flag) {
  const auto value = in->get<uint8_t>();
  *flag = value == 1;
  return value <= 1;
}

}  // namespace

void write_header(const MessageHeader& h, std::span<uint8_t> out) {
  SpanWriter w(out);
  w.put(kMessageMagic);
  w.put(kMessageVersion);
  w.put(static_cast<uint8_t>(h.type));
  w.put(h.target_index);
  w.put(h.token);
  w.put(h.sequence);
  w.put(h.acknowledged);
  w.put(h.consumed_bytes);
  w.put(h.body_bytes);
  w.put(static_cast<uint32_t>(h.first_fragment ? 1 : 0));
}

bool read_header(std::span<const uint8_t> bytes, MessageHeader* h) {
  Reader in(bytes);
  if (in.get<uint16_t>() != kMessageMagic || in.get<uint8_t>() != kMessageVersion) return false;
  const auto type = in.get<uint8_t>();
  if (type < static_cast<uint8_t>(MessageType::kHello) || type > static_cast<uint8_t>(MessageType::kPong)) return false;
  h->type = static_cast<MessageType>(type);
  h->target_index = in.get<uint32_t>();
  h->token = in.get<uint64_t>();
  h->sequence = in.get<uint32_t>();
  h->acknowledged = in.get<uint32_t>();
  h->consumed_bytes = in.get<uint64_t>();
  h->body_bytes = in.get<uint32_t>();
  const auto flags = in.get<uint32_t>();
  h->first_fragment = flags == 1;
  return in.ok() && flags <= 1 && h->body_bytes == bytes.size() - kHeaderBytes;
}

std::vector<uint8_t> encode(const Hello& h) {
  Writer out;
  out.put_bytes(h.target_identity, sizeof h.target_identity);
  out.put(h.target_generation);
  write_address(&out, h.sender);
  out.put(h.sender_index);
  out.put(h.sender_token);
  out.put(h.echo_token);
  out.put(h.session);
  out.put(h.immediate_window);
  out.put(h.message_window);
  out.put(h.fragment_bytes);
  out.put(h.message_queue_bytes);
  out.put(h.max_message_bytes);
  write_ids(&out, h.slots);
  out.put(crc32c(out.bytes()));
  return std::move(out.bytes());
}

bool decode(std::span<const uint8_t> body, Hello* h) {
  if (body.size() < sizeof(uint32_t)) return false;
  Reader tail(body.last(4));
  if (tail.get<uint32_t>() != crc32c(body.first(body.size() - 4))) return false;
  Reader in(body.first(body.size() - 4));
  in.get_bytes(h->target_identity, sizeof h->target_identity);
  h->target_generation = in.get<uint64_t>();
  if (!read_address(&in, &h->sender)) return false;
  h->sender_index = in.get<uint32_t>();
  h->sender_token = in.get<uint64_t>();
  h->echo_token = in.get<uint64_t>();
  h->session = in.get<uint32_t>();
  h->immediate_window = in.get<uint32_t>();
  h->message_window = in.get<uint32_t>();
  h->fragment_bytes = in.get<uint32_t>();
  h->message_queue_bytes = in.get<uint64_t>();
  h->max_message_bytes = in.get<uint64_t>();
  if (!read_ids(&in, &h->slots, kMaxHelloSlots)) return false;
  return in.ok() && in.left() == 0 && h->immediate_window > 0 && h->message_window > 0 &&
         h->fragment_bytes > kHeaderBytes + sizeof(uint64_t);
}

std::vector<uint8_t> encode(const Reject& r) {
  Writer out;
  out.put(static_cast<uint8_t>(r.reason));
  out.put(r.echo_token);
  out.put_bytes(r.identity, sizeof r.identity);
  out.put(r.generation);
  return std::move(out.bytes());
}

bool decode(std::span<const uint8_t> body, Reject* r) {
  Reader in(body);
  const auto reason = in.get<uint8_t>();
  r->reason = static_cast<RejectReason>(reason);
  r->echo_token = in.get<uint64_t>();
  in.get_bytes(r->identity, sizeof r->identity);
  r->generation = in.get<uint64_t>();
  return in.ok() && in.left() == 0 && reason >= 1 && reason <= 3;
}

uint32_t write_counts(const ImmediateCounts& counts, uint32_t nics, std::span<uint8_t> out) {
  SpanWriter w(out);
  w.put(static_cast<uint8_t>(nics));
  for (uint32_t i = 0; i < nics; ++i) w.put(counts[i]);
  return static_cast<uint32_t>(w.size());
}

bool read_counts(std::span<const uint8_t> body, ImmediateCounts* counts, uint32_t* nics) {
  Reader in(body);
  *nics = in.get<uint8_t>();
  if (*nics > TE_MAX_NICS) return false;
  for (uint32_t i = 0; i < *nics; ++i) (*counts)[i] = in.get<uint32_t>();
  return in.ok() && in.left() == 0;
}

std::vector<uint8_t> encode(const Record& r) {
  Writer out;
  out.put(static_cast<uint8_t>(r.type));
  if (has_serial(r.type)) out.put(r.serial);
  switch (r.type) {
    case RecordType::kRegionAttached:
      out.put(static_cast<uint8_t>(r.granted));
      write_keys(&out, r);
      break;
    case RecordType::kCounterAttached:
      out.put(static_cast<uint8_t>(r.granted));
      out.put(r.id);
      out.put(r.index);
      break;
    case RecordType::kRevokeRegion:
      out.put(static_cast<uint8_t>(r.temporary));
      break;
    case RecordType::kFenced:
      out.put(static_cast<uint8_t>(r.granted));
      break;
    case RecordType::kWriteOff:
      out.put(r.nics);
      out.put(r.index);
      break;
    case RecordType::kBye:
      out.put(static_cast<uint8_t>(r.for_good));
      break;
    case RecordType::kStageReturn:
      out.put(static_cast<uint8_t>(r.unknown));
      [[fallthrough]];
    case RecordType::kSlots:
    case RecordType::kStageSlots:
      write_ids(&out, r.ids);
      break;
    case RecordType::kStageRequest:
      out.put(r.index);
      break;
    case RecordType::kStaged:
      out.put(r.token);
      out.put(r.slot);
      out.put(r.offset);
      out.put(r.length);
      out.put(r.id);
      out.put(r.count);
      break;
    case RecordType::kStagedDone:
      out.put(r.token);
      out.put(static_cast<uint8_t>(r.granted));
      break;
    case RecordType::kRetireSlot:
      out.put(r.id);
      out.put(r.delivered);
      out.put(static_cast<uint8_t>(r.unknown));
      break;
    default:
      break;
  }
  return std::move(out.bytes());
}

bool decode(Reader* in, Record* r) {
  const auto type = in->get<uint8_t>();
  if (type < static_cast<uint8_t>(RecordType::kAttachRegion) || type > static_cast<uint8_t>(RecordType::kStagedDone))
    return false;
  *r = Record{};
  r->type = static_cast<RecordType>(type);
  if (has_serial(r->type)) r->serial = in->get<uint64_t>();
  uint8_t granted = 0;
  switch (r->type) {
    case RecordType::kRegionAttached:
      granted = in->get<uint8_t>();
      if (!read_keys(in, r)) return false;
      break;
    case RecordType::kCounterAttached:
      granted = in->get<uint8_t>();
      r->id = in->get<uint16_t>();
      r->index = in->get<uint16_t>();
      break;
    case RecordType::kRevokeRegion:
      if (!read_flag(in, &r->temporary)) return false;
      break;
    case RecordType::kFenced:
      granted = in->get<uint8_t>();
      break;
    case RecordType::kWriteOff:
      r->nics = in->get<uint8_t>();
      r->index = in->get<uint16_t>();
      break;
    case RecordType::kBye:
      if (!read_flag(in, &r->for_good)) return false;
      break;
    case RecordType::kStageReturn:
      if (!read_flag(in, &r->unknown)) return false;
      [[fallthrough]];
    case RecordType::kSlots:
    case RecordType::kStageSlots:
      if (!read_ids(in, &r->ids, kIdCount - 1)) return false;
      break;
    case RecordType::kStageRequest:
      r->index = in->get<uint16_t>();
      break;
    case RecordType::kStaged:
      r->token = in->get<uint32_t>();
      r->slot = in->get<uint16_t>();
      r->offset = in->get<uint64_t>();
      r->length = in->get<uint64_t>();
      r->id = in->get<uint16_t>();
      r->count = in->get<uint32_t>();
      break;
    case RecordType::kStagedDone:
      r->token = in->get<uint32_t>();
      granted = in->get<uint8_t>();
      break;
    case RecordType::kRetireSlot:
      r->id = in->get<uint16_t>();
      r->delivered = in->get<uint8_t>();
      if (!read_flag(in, &r->unknown)) return false;
      break;
    default:
      break;
  }
  if (granted > static_cast<uint8_t>(Grant::kExhausted)) return false;
  r->granted = static_cast<Grant>(granted);
  return in->ok();
}

}  // namespace te
