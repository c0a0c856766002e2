// What the stand-ins read: options, "key=value,key=value", and commands, words and numbers.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace standin {

template <typename Options, typename Value>
struct Key {
  std::string_view name;
  Value Options::* member;
};

template <typename Value>
bool parse_value(std::string_view text, Value* value) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return code == std::errc() && end == text.data() + text.size();
}

// Hands every key and its value to set(key, value), up to the first that it does not take: then the answer is false.
template <typename Set>
bool each_pair(std::string_view text, const Set& set) {
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view pair = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const size_t equals = pair.find('=');
    if (equals == std::string_view::npos || !set(pair.substr(0, equals), pair.substr(equals + 1))) return false;
  }
  return true;
}

// false: an unknown key or a malformed value; what stands before it is set.
template <typename Options, size_t numbers, size_t probabilities>
bool parse_pairs(std::string_view text, Options* options, const Key<Options, uint64_t> (&number_keys)[numbers],
                 const Key<Options, double> (&probability_keys)[probabilities]) {
  return each_pair(text, [&](std::string_view key, std::string_view value) {
    for (const auto& each : number_keys)
      if (each.name == key) return parse_value(value, &(options->*each.member));
    for (const auto& each : probability_keys)
      if (each.name == key) return parse_value(value, &(options->*each.member));
    return false;
  });
}

using Words = std::vector<std::string_view>;
using Numbers = std::vector<uint64_t>;

inline Words split(std::string_view text) {
  Words words;
  while (!text.empty()) {
    const size_t space = text.find(' ');
    if (space != 0) words.push_back(text.substr(0, space));
    text = space == std::string_view::npos ? std::string_view() : text.substr(space + 1);
  }
  return words;
}

// A leading minus wraps round: "-1" is the largest number.
inline std::optional<uint64_t> number(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  uint64_t value = 0;
  if (!parse_value(text, &value)) return std::nullopt;
  return negative ? 0 - value : value;
}

// As much of `from` as fits, terminated; returns the length of all of it.
inline size_t copy_out(std::string_view from, char* text, size_t capacity) {
  if (capacity > 0) {
    const size_t copied = std::min(capacity - 1, from.size());
    std::copy_n(from.data(), copied, text);
    text[copied] = '\0';
  }
  return from.size();
}

}  // namespace standin
