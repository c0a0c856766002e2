// Bytes that travel: addresses, region and counter descriptors. One codec for what applications exchange and for what engines say to
// each other. Little-endian, versioned, closed by a CRC-32C, so that truncated, damaged and foreign bytes are told apart from
// good ones before any field of them is used. Readers never trust a length that they did not check.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "native/status.h"
#include "native/te.h"

namespace te {

inline constexpr uint8_t kWireVersion = 1;

uint32_t crc32c(std::span<const uint8_t> bytes);

// Appends little-endian fields.
class Writer {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<uint8_t>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i)));
  }
  void put_bytes(const void* data, size_t length) {
    const auto* from = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < length; ++i) bytes_.push_back(from[i]);
  }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// The same into memory that the caller sized for the worst case: no allocation. What does not fit is dropped and ok() says so.
class SpanWriter {
 public:
  explicit SpanWriter(std::span<uint8_t> out) : out_(out) {}

  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    if (sizeof(T) > out_.size() - position_) {
      ok_ = false;
      return;
    }
    for (size_t i = 0; i < sizeof(T); ++i)
      out_[position_++] = static_cast<uint8_t>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i));
  }
  size_t size() const { return position_; }
  bool ok() const { return ok_; }

 private:
  std::span<uint8_t> out_;
  size_t position_ = 0;
  bool ok_ = true;
};

// Reads them back. After a read past the end, ok() is false and every further read gives zero.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    static_assert(std::is_integral_v<T>);
    uint64_t value = 0;
    if (!take(sizeof(T))) return 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{bytes_[position_ - sizeof(T) + i]} << (8 * i);
    return static_cast<T>(value);
  }
  // False (and nothing written) when fewer are left.
  bool get_bytes(void* out, size_t length) {
    if (!take(length)) return false;
    std::memcpy(out, bytes_.data() + position_ - length, length);
    return true;
  }
  std::span<const uint8_t> rest() const { return bytes_.subspan(position_); }
  std::span<const uint8_t> take_span(size_t length) {
    return take(length) ? bytes_.subspan(position_ - length, length) : std::span<const uint8_t>{};
  }
  size_t left() const { return bytes_.size() - position_; }
  bool ok() const { return ok_; }

 private:
  bool take(size_t length) {
    if (!ok_ || length > left()) return ok_ = false;
    position_ += length;
    return true;
  }

  std::span<const uint8_t> bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

// Bodies without envelope, for use inside other messages.
void write_address(Writer* out, const te_address& address);
bool read_address(Reader* in, te_address* address);

std::vector<uint8_t> encode(const te_address& address);
std::vector<uint8_t> encode(const te_region_descriptor& descriptor);
std::vector<uint8_t> encode(const te_counter_descriptor& descriptor);

Error decode(std::span<const uint8_t> bytes, te_address* address);
Error decode(std::span<const uint8_t> bytes, te_region_descriptor* descriptor);
Error decode(std::span<const uint8_t> bytes, te_counter_descriptor* descriptor);

}  // namespace te
