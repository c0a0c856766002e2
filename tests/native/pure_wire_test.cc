// Bytes that travel, through the C ABI: what is encoded comes back, and nothing else is accepted.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "native/te.h"
#include "native/wire.h"
#include "tests/native/engine_support.h"

namespace te {
namespace {

using engine_test::Random;
using engine_test::scaled;
using Bytes = std::vector<uint8_t>;

te_address random_address(Random& random, uint32_t nics) {
  te_address a{};
  for (uint8_t& byte : a.identity) byte = static_cast<uint8_t>(random.next());
  a.generation = random.next();
  a.nic_count = nics;
  std::strcpy(a.transport, random.chance(0.5) ? "sim" : "fifteen-letters");
  for (uint32_t i = 0; i < nics; ++i) {
    a.nics[i].length = static_cast<uint32_t>(1 + random.below(TE_NIC_ADDRESS_BYTES));
    for (uint32_t k = 0; k < a.nics[i].length; ++k) a.nics[i].bytes[k] = static_cast<uint8_t>(random.next());
  }
  return a;
}

te_region_descriptor random_region(Random& random, uint32_t nics) {
  te_region_descriptor d{};
  d.address = random_address(random, nics);
  d.serial = random.next() | 1;
  d.length = random.next();
  d.device_kind = random.chance(0.5) ? TE_DEVICE_HOST : TE_DEVICE_CUDA;
  d.device_index = static_cast<int32_t>(random.next());
  for (uint32_t i = 0; i < nics; ++i) {
    d.base[i] = random.next();
    d.key[i] = random.next();
  }
  return d;
}

te_counter_descriptor random_counter(Random& random, uint32_t nics) {
  te_counter_descriptor d{};
  d.address = random_address(random, nics);
  d.serial = random.next() | 1;
  return d;
}

// One face for the three kinds.
struct AddressCodec {
  using Value = te_address;
  static Value random(Random& r, uint32_t nics) { return random_address(r, nics); }
  static int32_t encode(const Value& v, uint8_t* out, uint64_t capacity, uint64_t* length, te_error* e) {
    return te_address_encode(&v, out, capacity, length, e);
  }
  static int32_t decode(const Bytes& b, Value* v, te_error* e) { return te_address_decode(b.data(), b.size(), v, e); }
  static constexpr uint64_t kMost = TE_ADDRESS_BYTES;
};
struct RegionCodec {
  using Value = te_region_descriptor;
  static Value random(Random& r, uint32_t nics) { return random_region(r, nics); }
  static int32_t encode(const Value& v, uint8_t* out, uint64_t capacity, uint64_t* length, te_error* e) {
    return te_region_descriptor_encode(&v, out, capacity, length, e);
  }
  static int32_t decode(const Bytes& b, Value* v, te_error* e) {
    return te_region_descriptor_decode(b.data(), b.size(), v, e);
  }
  static constexpr uint64_t kMost = TE_DESCRIPTOR_BYTES;
};
struct CounterCodec {
  using Value = te_counter_descriptor;
  static Value random(Random& r, uint32_t nics) { return random_counter(r, nics); }
  static int32_t encode(const Value& v, uint8_t* out, uint64_t capacity, uint64_t* length, te_error* e) {
    return te_counter_descriptor_encode(&v, out, capacity, length, e);
  }
  static int32_t decode(const Bytes& b, Value* v, te_error* e) {
    return te_counter_descriptor_decode(b.data(), b.size(), v, e);
  }
  static constexpr uint64_t kMost = TE_DESCRIPTOR_BYTES;
};

template <typename Codec>
Bytes encoded(const typename Codec::Value& value) {
  Bytes bytes(Codec::kMost);
  uint64_t length = 0;
  te_error why{};
  REQUIRE(Codec::encode(value, bytes.data(), bytes.size(), &length, &why) == TE_OK);
  bytes.resize(length);
  bytes.shrink_to_fit();  // so that ASan sees a read past the end
  return bytes;
}

template <typename Codec>
bool refuses(const Bytes& bytes) {
  typename Codec::Value value, before;
  std::memset(&value, 0x77, sizeof value);
  before = value;
  te_error why{};
  const int32_t status = Codec::decode(bytes, &value, &why);
  // Outputs are set only on success.
  return status == TE_ERR_DESCRIPTOR && why.status == status && why.message[0] != '\0' &&
         std::memcmp(&value, &before, sizeof value) == 0;
}

// The bytes with the checksum that belongs to them.
Bytes signed_bytes(Bytes bytes) {
  const uint32_t sum = crc32c(std::span(bytes).first(bytes.size() - 4));
  for (int i = 0; i < 4; ++i) bytes[bytes.size() - 4 + static_cast<size_t>(i)] = static_cast<uint8_t>(sum >> (8 * i));
  return bytes;
}

bool sane(const te_address& a) {
  if (a.nic_count == 0 || a.nic_count > TE_MAX_NICS || std::strlen(a.transport) >= sizeof a.transport) return false;
  for (uint32_t i = 0; i < a.nic_count; ++i)
    if (a.nics[i].length == 0 || a.nics[i].length > TE_NIC_ADDRESS_BYTES) return false;
  return true;
}
bool sane(const te_region_descriptor& d) { return sane(d.address) && d.serial != 0; }
bool sane(const te_counter_descriptor& d) { return sane(d.address) && d.serial != 0; }

}  // namespace

TEST_CASE("pure: CRC-32C gives the check values of RFC 3720") {
  const std::string digits = "123456789";
  CHECK(crc32c({reinterpret_cast<const uint8_t*>(digits.data()), digits.size()}) == 0xE3069283u);
  CHECK(crc32c(Bytes(32, 0x00)) == 0x8A9136AAu);
  CHECK(crc32c(Bytes(32, 0xFF)) == 0x62A8AB43u);
  CHECK(crc32c({}) == 0u);
}

TEST_CASE_TEMPLATE("pure: wire: what is encoded comes back, for 1 to 16 NICs", Codec, AddressCodec, RegionCodec,
                   CounterCodec) {
  Random random(1);
  for (uint32_t nics = 1; nics <= TE_MAX_NICS; ++nics)
    for (int i = 0; i < 20; ++i) {
      const auto value = Codec::random(random, nics);
      const Bytes bytes = encoded<Codec>(value);
      typename Codec::Value back;
      te_error why{};
      REQUIRE_MESSAGE(Codec::decode(bytes, &back, &why) == TE_OK, why.message);
      CHECK(std::memcmp(&value, &back, sizeof value) == 0);
    }
}

TEST_CASE_TEMPLATE(
    "pure: wire: the longest value fits the announced bound, and a capacity one byte too small is refused", Codec,
    AddressCodec, RegionCodec, CounterCodec) {
  Random random(2);
  auto value = Codec::random(random, TE_MAX_NICS);
  te_address* address = reinterpret_cast<te_address*>(&value);  // the first member of all of them
  std::strcpy(address->transport, "fifteen-letters");
  for (te_nic_address& nic : address->nics) nic.length = TE_NIC_ADDRESS_BYTES;
  const Bytes bytes = encoded<Codec>(value);
  Bytes small(bytes.size() - 1);
  uint64_t length = 4711;
  te_error why{};
  CHECK(Codec::encode(value, small.data(), small.size(), &length, &why) == TE_ERR_ARGUMENT);
  CHECK(length == 4711);
  Bytes exact(bytes.size());
  CHECK(Codec::encode(value, exact.data(), exact.size(), &length, &why) == TE_OK);
  CHECK(exact == bytes);
}

TEST_CASE_TEMPLATE("pure: wire: every flipped bit and every truncation is refused", Codec, AddressCodec, RegionCodec,
                   CounterCodec) {
  Random random(3);
  for (const uint32_t nics : {1u, 2u, 16u}) {
    const Bytes good = encoded<Codec>(Codec::random(random, nics));
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
      Bytes bad = good;
      bad[bit / 8] = static_cast<uint8_t>(bad[bit / 8] ^ 1u << bit % 8);
      if (!refuses<Codec>(bad)) FAIL("bit ", bit, " of ", good.size() * 8);
    }
    for (size_t length = 0; length < good.size(); ++length)
      if (!refuses<Codec>(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length))))
        FAIL("length ", length);
    Bytes longer = good;
    longer.push_back(0);
    CHECK(refuses<Codec>(longer));
    CHECK(refuses<Codec>(signed_bytes(longer)));  // a byte too many under a right checksum
  }
}

TEST_CASE_TEMPLATE("pure: wire: random bytes are refused", Codec, AddressCodec, RegionCodec, CounterCodec) {
  Random random(4);
  for (int i = 0; i < scaled(5000); ++i) {
    Bytes bytes(random.below(300));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next());
    if (bytes.size() > 4 && random.chance(0.5)) {
      const Bytes head = encoded<Codec>(Codec::random(random, 1));
      std::copy_n(head.begin(), 4, bytes.begin());
    }
    if (!refuses<Codec>(bytes)) FAIL("round ", i);
  }
}

// What an attacker can do who knows how to compute a checksum.
TEST_CASE_TEMPLATE("pure: wire: mutated bytes under a right checksum give a sane value or a refusal", Codec,
                   AddressCodec, RegionCodec, CounterCodec) {
  Random random(5);
  for (int i = 0; i < scaled(5000); ++i) {
    Bytes bytes = encoded<Codec>(Codec::random(random, static_cast<uint32_t>(1 + random.below(16))));
    for (uint64_t k = random.below(4) + 1; k > 0; --k)
      bytes[4 + random.below(bytes.size() - 4)] = static_cast<uint8_t>(random.next());
    if (random.chance(0.3)) bytes.resize(8 + random.below(bytes.size()));
    bytes = signed_bytes(std::move(bytes));
    bytes.shrink_to_fit();
    typename Codec::Value value;
    te_error why{};
    const int32_t status = Codec::decode(bytes, &value, &why);
    if (status == TE_OK ? !sane(value) : status != TE_ERR_DESCRIPTOR)
      FAIL("round ", i, " gave ", te_status_name(status));
  }
}

TEST_CASE("pure: wire: one kind of bytes is not taken for another") {
  Random random(6);
  const Bytes address = encoded<AddressCodec>(random_address(random, 2));
  const Bytes region = encoded<RegionCodec>(random_region(random, 2));
  const Bytes counter = encoded<CounterCodec>(random_counter(random, 2));
  CHECK(refuses<RegionCodec>(address));
  CHECK(refuses<CounterCodec>(address));
  CHECK(refuses<AddressCodec>(region));
  CHECK(refuses<CounterCodec>(region));
  CHECK(refuses<AddressCodec>(counter));
  CHECK(refuses<RegionCodec>(counter));
}

TEST_CASE("pure: wire: a malformed structure is not encoded") {
  Random random(8);
  const te_address good = random_address(random, 2);
  uint8_t bytes[TE_ADDRESS_BYTES];
  const auto status = [&](const te_address& a) {
    uint64_t length = 0;
    te_error why{};
    return te_address_encode(&a, bytes, sizeof bytes, &length, &why);
  };
  te_address bad = good;
  CHECK(status(bad) == TE_OK);
  bad.nic_count = 0;
  CHECK(status(bad) == TE_ERR_ARGUMENT);
  bad.nic_count = TE_MAX_NICS + 1;
  CHECK(status(bad) == TE_ERR_ARGUMENT);
  bad = good;
  bad.nics[1].length = TE_NIC_ADDRESS_BYTES + 1;
  CHECK(status(bad) == TE_ERR_ARGUMENT);
  bad.nics[1].length = 0;
  CHECK(status(bad) == TE_ERR_ARGUMENT);
  bad = good;
  std::memset(bad.transport, 'x', sizeof bad.transport);
  CHECK(status(bad) == TE_ERR_ARGUMENT);
}

// A round trip through bytes must not change what they mean: what decodes can be encoded again.
TEST_CASE("pure: wire: an address without a transport name is refused on both ways") {
  Random random(9);
  te_address nameless = random_address(random, 1);
  std::memset(nameless.transport, 0, sizeof nameless.transport);
  uint8_t bytes[TE_ADDRESS_BYTES];
  uint64_t length = 0;
  te_error why{};
  CHECK(te_address_encode(&nameless, bytes, sizeof bytes, &length, &why) == TE_ERR_ARGUMENT);
}

}  // namespace te
