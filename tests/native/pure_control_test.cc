// What engines say to each other: round trips, and bytes from strangers.
#include <cstdint>
#include <cstring>
#include <vector>

#include "native/control.h"
#include "native/immediate.h"
#include "tests/native/engine_support.h"

namespace te {
namespace {

using engine_test::Random;
using engine_test::scaled;
using Bytes = std::vector<uint8_t>;

Bytes random_bytes_of(Random& random, size_t length) {
  Bytes bytes(length);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next());
  return bytes;
}

void mutate(Random& random, Bytes* bytes) {
  for (uint64_t k = 1 + random.below(4); k > 0 && !bytes->empty(); --k)
    (*bytes)[random.below(bytes->size())] = static_cast<uint8_t>(random.next());
  if (random.chance(0.3)) bytes->resize(random.below(bytes->size() + 1));
  if (random.chance(0.1)) bytes->resize(bytes->size() + random.below(20));
  bytes->shrink_to_fit();
}

Hello random_hello(Random& random) {
  Hello h;
  for (uint8_t& b : h.target_identity) b = static_cast<uint8_t>(random.next());
  h.target_generation = random.next();
  for (uint8_t& b : h.sender.identity) b = static_cast<uint8_t>(random.next());
  h.sender.generation = random.next();
  std::strcpy(h.sender.transport, "sim");
  h.sender.nic_count = static_cast<uint32_t>(1 + random.below(TE_MAX_NICS));
  for (uint32_t i = 0; i < h.sender.nic_count; ++i) {
    h.sender.nics[i].length = static_cast<uint32_t>(1 + random.below(TE_NIC_ADDRESS_BYTES));
    for (uint32_t k = 0; k < h.sender.nics[i].length; ++k)
      h.sender.nics[i].bytes[k] = static_cast<uint8_t>(random.next());
  }
  h.sender_index = static_cast<uint32_t>(random.next());
  h.sender_token = random.next();
  h.echo_token = random.next();
  h.session = static_cast<uint32_t>(random.next());
  h.immediate_window = static_cast<uint32_t>(random.next() | 1);
  h.message_window = static_cast<uint32_t>(random.next() | 1);
  h.fragment_bytes = static_cast<uint32_t>(random.next() | 0x100);
  h.message_queue_bytes = random.next();
  h.max_message_bytes = random.next();
  h.slots.resize(random.below(kMaxHelloSlots + 1));
  for (uint16_t& slot : h.slots) slot = static_cast<uint16_t>(random.next());
  return h;
}

bool same(const Hello& a, const Hello& b) {
  return std::memcmp(a.target_identity, b.target_identity, 16) == 0 && a.target_generation == b.target_generation &&
         std::memcmp(&a.sender, &b.sender, sizeof a.sender) == 0 && a.sender_index == b.sender_index &&
         a.sender_token == b.sender_token && a.echo_token == b.echo_token && a.session == b.session &&
         a.immediate_window == b.immediate_window && a.message_window == b.message_window &&
         a.fragment_bytes == b.fragment_bytes && a.message_queue_bytes == b.message_queue_bytes &&
         a.max_message_bytes == b.max_message_bytes && a.slots == b.slots;
}

constexpr auto kFirstRecord = static_cast<uint8_t>(RecordType::kAttachRegion);
constexpr auto kLastRecord = static_cast<uint8_t>(RecordType::kStagedDone);

// With the fields of its type and no others, so that it can be compared.
Record random_record(Random& random, uint8_t type) {
  Record r;
  r.type = static_cast<RecordType>(type);
  if (r.type < RecordType::kSlots || r.type == RecordType::kFence || r.type == RecordType::kFenced ||
      r.type == RecordType::kStaged)
    r.serial = random.next();
  const auto grant = [&] { return static_cast<Grant>(random.below(3)); };
  switch (r.type) {
    case RecordType::kRegionAttached:
      r.granted = grant();
      r.length = random.next();
      r.slot_bytes = static_cast<uint32_t>(random.next());
      r.nics = static_cast<uint8_t>(random.below(TE_MAX_NICS + 1));
      for (uint32_t i = 0; i < r.nics; ++i) {
        r.base[i] = random.next();
        r.key[i] = random.next();
      }
      break;
    case RecordType::kCounterAttached:
      r.granted = grant();
      r.id = static_cast<uint16_t>(random.next());
      r.index = static_cast<uint16_t>(random.next());
      break;
    case RecordType::kRevokeRegion:
      r.temporary = random.chance(0.5);
      break;
    case RecordType::kFenced:
      r.granted = grant();
      break;
    case RecordType::kStageRequest:
      r.index = static_cast<uint16_t>(random.next());
      break;
    case RecordType::kStaged:
      r.token = static_cast<uint32_t>(random.next());
      r.slot = static_cast<uint16_t>(random.next());
      r.offset = random.next();
      r.length = random.next();
      r.id = static_cast<uint16_t>(random.next());
      r.count = static_cast<uint32_t>(random.next());
      break;
    case RecordType::kStagedDone:
      r.token = static_cast<uint32_t>(random.next());
      r.granted = grant();
      break;
    case RecordType::kStageReturn:
      r.unknown = random.chance(0.5);
      [[fallthrough]];
    case RecordType::kStageSlots:
    case RecordType::kSlots:
      r.ids.resize(random.below(100));
      for (uint16_t& id : r.ids) id = static_cast<uint16_t>(random.next());
      break;
    case RecordType::kRetireSlot:
      r.id = static_cast<uint16_t>(random.next());
      r.delivered = static_cast<uint8_t>(random.next());
      r.unknown = random.chance(0.5);
      break;
    default:
      break;
  }
  return r;
}

bool same(const Record& a, const Record& b) {
  return a.type == b.type && a.granted == b.granted && a.temporary == b.temporary && a.for_good == b.for_good &&
         a.unknown == b.unknown && a.delivered == b.delivered && a.nics == b.nics && a.id == b.id &&
         a.index == b.index && a.serial == b.serial && a.length == b.length && a.base == b.base && a.key == b.key &&
         a.ids == b.ids && a.slot == b.slot && a.token == b.token && a.slot_bytes == b.slot_bytes &&
         a.count == b.count && a.offset == b.offset;
}

}  // namespace

TEST_CASE("pure: control: a header comes back") {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    MessageHeader h;
    h.type = static_cast<MessageType>(1 + random.below(8));
    h.first_fragment = random.chance(0.5);
    h.target_index = static_cast<uint32_t>(random.next());
    h.token = random.next();
    h.sequence = static_cast<uint32_t>(random.next());
    h.acknowledged = static_cast<uint32_t>(random.next());
    h.consumed_bytes = random.next();
    h.body_bytes = static_cast<uint32_t>(random.below(100));
    Bytes bytes(kHeaderBytes + h.body_bytes);
    write_header(h, bytes);
    MessageHeader back;
    REQUIRE(read_header(bytes, &back));
    CHECK((back.type == h.type && back.first_fragment == h.first_fragment && back.target_index == h.target_index &&
           back.token == h.token));
    CHECK((back.sequence == h.sequence && back.acknowledged == h.acknowledged &&
           back.consumed_bytes == h.consumed_bytes));
    CHECK(back.body_bytes == h.body_bytes);
  }
}

TEST_CASE("pure: control: a header whose length is not the message's is refused") {
  MessageHeader h;
  h.type = MessageType::kRecords;
  h.body_bytes = 10;
  Bytes bytes(kHeaderBytes + 10);
  write_header(h, bytes);
  MessageHeader back;
  CHECK(read_header(bytes, &back));
  for (size_t length = 0; length < bytes.size() + 20; ++length) {
    if (length == bytes.size()) continue;
    Bytes other = bytes;
    other.resize(length);
    other.shrink_to_fit();
    CHECK_FALSE(read_header(other, &back));
  }
}

TEST_CASE("pure: control: random and mutated headers never claim bytes that are not there") {
  Random random(2);
  for (int i = 0; i < scaled(20'000); ++i) {
    Bytes bytes(kHeaderBytes + random.below(20));
    MessageHeader h;
    h.type = static_cast<MessageType>(1 + random.below(8));
    h.body_bytes = static_cast<uint32_t>(bytes.size() - kHeaderBytes);
    write_header(h, bytes);
    if (random.chance(0.3)) bytes = random_bytes_of(random, random.below(80));
    mutate(random, &bytes);
    MessageHeader back;
    if (!read_header(bytes, &back)) continue;
    REQUIRE(bytes.size() == kHeaderBytes + back.body_bytes);
    REQUIRE(static_cast<uint8_t>(back.type) >= 1);
    REQUIRE(static_cast<uint8_t>(back.type) <= 8);
  }
}

TEST_CASE("pure: control: a hello comes back, and every flipped bit and truncation is refused") {
  Random random(3);
  for (int i = 0; i < 50; ++i) {
    const Hello hello = random_hello(random);
    Bytes bytes = encode(hello);
    Hello back;
    REQUIRE(decode(bytes, &back));
    CHECK(same(hello, back));
    if (i >= 4) continue;
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1u << bit % 8);
      if (decode(bytes, &back)) FAIL("bit ", bit);
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1u << bit % 8);
    }
    for (size_t length = 0; length < bytes.size(); ++length)
      if (decode(std::span(bytes).first(length), &back)) FAIL("length ", length);
  }
}

TEST_CASE("pure: control: a mutated hello under a right checksum is sane or refused") {
  Random random(4);
  for (int i = 0; i < scaled(10'000); ++i) {
    Bytes bytes = encode(random_hello(random));
    bytes.resize(bytes.size() - 4);
    mutate(random, &bytes);
    const uint32_t sum = crc32c(bytes);
    for (int k = 0; k < 4; ++k) bytes.push_back(static_cast<uint8_t>(sum >> (8 * k)));
    bytes.shrink_to_fit();
    Hello hello;
    if (!decode(bytes, &hello)) continue;
    REQUIRE(hello.sender.nic_count >= 1);
    REQUIRE(hello.sender.nic_count <= TE_MAX_NICS);
    REQUIRE(hello.slots.size() <= kMaxHelloSlots);
    REQUIRE(hello.message_window > 0);
    REQUIRE(hello.immediate_window > 0);
    REQUIRE(hello.fragment_bytes > kHeaderBytes + 8);
  }
}

TEST_CASE("pure: control: a hello that nobody could honour is refused") {
  Random random(5);
  Hello back;
  for (int kind = 0; kind < 3; ++kind) {
    Hello hello = random_hello(random);
    if (kind == 0) hello.immediate_window = 0;
    if (kind == 1) hello.message_window = 0;
    if (kind == 2) hello.fragment_bytes = kHeaderBytes + 8;
    CHECK_FALSE(decode(encode(hello), &back));
  }
}

TEST_CASE("pure: control: a rejection comes back, and bytes of another length or reason are refused") {
  Random random(6);
  for (int i = 0; i < 100; ++i) {
    Reject reject;
    reject.reason = random.chance(0.5) ? RejectReason::kFull : RejectReason::kRestarted;
    reject.echo_token = random.next();
    for (uint8_t& b : reject.identity) b = static_cast<uint8_t>(random.next());
    reject.generation = random.next();
    Bytes bytes = encode(reject);
    Reject back;
    REQUIRE(decode(bytes, &back));
    CHECK(
        (back.reason == reject.reason && back.echo_token == reject.echo_token && back.generation == reject.generation));
    CHECK(std::memcmp(back.identity, reject.identity, 16) == 0);
    for (size_t length = 0; length < bytes.size(); ++length) CHECK_FALSE(decode(std::span(bytes).first(length), &back));
    bytes[0] = 0;
    CHECK_FALSE(decode(bytes, &back));
    bytes[0] = 200;
    CHECK_FALSE(decode(bytes, &back));
    mutate(random, &bytes);
    static_cast<void>(decode(bytes, &back));
  }
}

TEST_CASE("pure: control: counts of immediates come back, and foreign bytes are refused") {
  Random random(7);
  for (uint32_t nics = 0; nics <= TE_MAX_NICS; ++nics) {
    ImmediateCounts counts{};
    for (uint32_t i = 0; i < nics; ++i) counts[i] = static_cast<uint32_t>(random.next());
    Bytes bytes(1 + 4 * TE_MAX_NICS);
    bytes.resize(write_counts(counts, nics, bytes));
    ImmediateCounts back{};
    uint32_t back_nics = 99;
    REQUIRE(read_counts(bytes, &back, &back_nics));
    CHECK(back_nics == nics);
    CHECK(back == counts);
    bytes.push_back(0);
    CHECK_FALSE(read_counts(bytes, &back, &back_nics));
    for (int i = 0; i < 200; ++i) {
      Bytes noise = random_bytes_of(random, random.below(80));
      noise.shrink_to_fit();
      static_cast<void>(read_counts(noise, &back, &back_nics));
    }
  }
}

TEST_CASE("pure: control: every record comes back, alone and in a row") {
  Random random(8);
  for (int round = 0; round < 200; ++round) {
    std::vector<Record> records;
    Bytes row;
    for (uint8_t type = kFirstRecord; type <= kLastRecord; ++type) {
      records.push_back(random_record(random, type));
      const Bytes bytes = encode(records.back());
      row.insert(row.end(), bytes.begin(), bytes.end());
      Reader alone(bytes);
      Record back;
      REQUIRE(decode(&alone, &back));
      CHECK(alone.left() == 0);
      CHECK(same(records.back(), back));
      for (size_t length = 0; length < bytes.size(); ++length) {
        Reader cut{std::span(bytes).first(length)};
        CHECK_FALSE(decode(&cut, &back));
      }
    }
    Reader in(row);
    for (const Record& record : records) {
      Record back;
      REQUIRE(decode(&in, &back));
      CHECK(same(record, back));
    }
    CHECK(in.left() == 0);
  }
}

TEST_CASE("pure: control: random and mutated records are refused or sane") {
  Random random(9);
  for (int i = 0; i < scaled(30'000); ++i) {
    Bytes bytes = random.chance(0.2)
                      ? random_bytes_of(random, random.below(400))
                      : encode(random_record(random, static_cast<uint8_t>(kFirstRecord + random.below(kLastRecord))));
    mutate(random, &bytes);
    Reader in(bytes);
    Record record;
    while (in.left() > 0 && decode(&in, &record)) {
      REQUIRE((record.nics <= TE_MAX_NICS ||
               record.type == RecordType::kWriteOff));  // there it names one: the worker checks it
      REQUIRE(record.granted <= Grant::kExhausted);
      REQUIRE(record.ids.size() < kIdCount);
    }
  }
}

TEST_CASE("pure: control: a writer into a span never passes its end") {
  Random random(10);
  for (size_t room = 0; room < 40; ++room) {
    Bytes out(room);
    out.shrink_to_fit();
    SpanWriter w(out);
    for (int i = 0; i < 10; ++i) {
      w.put(uint64_t{1});
      w.put(uint8_t{2});
    }
    CHECK(w.size() <= room);
    CHECK_FALSE(w.ok());
  }
}

}  // namespace te
