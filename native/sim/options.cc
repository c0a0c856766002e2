#include "native/sim/options.h"

#include <algorithm>
#include <charconv>
#include <variant>

namespace te::sim {
namespace {

struct Whole {
  uint64_t Options::* member;
  uint64_t low, high;
};
struct OptionalWhole {
  std::optional<uint64_t> Options::* member;
  uint64_t low, high;
};
struct Flag {
  bool Options::* member;
};
struct Chance {
  double Options::* member;
};
struct Name {
  std::string Options::* member;
};

struct Field {
  std::string_view key;
  std::variant<Whole, OptionalWhole, Flag, Chance, Name> kind;
};

constexpr uint64_t kMany = 1 << 24;
constexpr size_t kMaxName = 64;

const Field kFields[] = {
    {"seed", Whole{&Options::seed, 0, ~uint64_t{0}}},
    {"reorder", Flag{&Options::reorder}},
    {"delay", Whole{&Options::delay, 0, 1'000'000}},
    {"mtu", Whole{&Options::mtu, 1, uint64_t{1} << 40}},
    {"delivery_complete", Flag{&Options::delivery_complete}},
    {"depth", Whole{&Options::depth, 1, kMany}},
    {"receive_depth", Whole{&Options::receive_depth, 1, kMany}},
    {"completion_depth", OptionalWhole{&Options::completion_depth, 0, kMany}},
    {"max_write", Whole{&Options::max_write, 1, uint64_t{1} << 40}},
    {"max_send", Whole{&Options::max_send, 1, uint64_t{1} << 30}},
    {"busy", Chance{&Options::busy}},
    {"error", Chance{&Options::error}},
    {"wait_fd", Flag{&Options::wait_fd}},
    {"reads", Flag{&Options::reads}},
    {"virtual_addresses", Flag{&Options::virtual_addresses}},
    {"keys_enforced", Flag{&Options::keys_enforced}},
    {"stale_keys_land", Flag{&Options::stale_keys_land}},
    {"require_peer", Flag{&Options::require_peer}},
    {"reports_dead_peer", Flag{&Options::reports_dead_peer}},
    {"connected", Flag{&Options::connected}},
    {"address", Name{&Options::address}},
};

template <typename T>
bool parse_number(std::string_view text, T* out) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return code == std::errc() && end == text.data() + text.size();
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

// Each `assign` stores the value and returns an empty string, or returns what would have been allowed.
std::string assign(const Whole& kind, std::string_view text, Options* out) {
  uint64_t value = 0;
  if (!parse_number(text, &value) || value < kind.low || value > kind.high)
    return format("a whole number from %llu to %llu", static_cast<unsigned long long>(kind.low),
                  static_cast<unsigned long long>(kind.high));
  out->*kind.member = value;
  return {};
}

std::string assign(const OptionalWhole& kind, std::string_view text, Options* out) {
  uint64_t value = 0;
  if (!parse_number(text, &value) || value < kind.low || value > kind.high)
    return format("a whole number from %llu to %llu", static_cast<unsigned long long>(kind.low),
                  static_cast<unsigned long long>(kind.high));
  out->*kind.member = value;
  return {};
}

std::string assign(const Flag& kind, std::string_view text, Options* out) {
  if (text != "0" && text != "1") return "0 or 1";
  out->*kind.member = text == "1";
  return {};
}

std::string assign(const Chance& kind, std::string_view text, Options* out) {
  double value = 0;
  if (!parse_number(text, &value) || !(value >= 0 && value <= 1)) return "a number from 0 to 1";
  out->*kind.member = value;
  return {};
}

std::string assign(const Name& kind, std::string_view text, Options* out) {
  if (!is_name(text)) return format("1 to %zu letters, digits, '.', '_' or '-'", kMaxName);
  out->*kind.member = std::string(text);
  return {};
}

Error parse_pair(std::string_view pair, Options* out) {
  const size_t equals = pair.find('=');
  const std::string key(pair.substr(0, equals));
  const auto* field =
      std::find_if(std::begin(kFields), std::end(kFields), [&](const Field& f) { return f.key == key; });
  if (field == std::end(kFields)) {
    std::string known;
    for (const Field& each : kFields) known.append(known.empty() ? "" : ", ").append(each.key);
    return Error(Status::kConfig, "sim option \"" + key + "\" is unknown; known are " + known);
  }
  if (equals == std::string_view::npos) return Error(Status::kConfig, "sim option \"" + key + "\" lacks \"=value\"");
  const std::string_view value = pair.substr(equals + 1);
  const std::string allowed = std::visit([&](const auto& kind) { return assign(kind, value, out); }, field->kind);
  if (allowed.empty()) return {};
  return Error(Status::kConfig,
               "sim option " + key + "=\"" + std::string(value) + "\" is not allowed; it takes " + allowed);
}

}  // namespace

Error parse_options(std::string_view text, Options* out) {
  Options options;
  bool enforcement_named = false;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view pair = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    if (pair.empty()) continue;
    if (Error error = parse_pair(pair, &options)) return error;
    enforcement_named = enforcement_named || pair.starts_with("keys_enforced=");
  }
  if (options.stale_keys_land) {
    if (enforcement_named && options.keys_enforced)
      return Error(Status::kConfig, "sim options stale_keys_land=1 and keys_enforced=1 exclude each other");
    options.keys_enforced = false;
  }
  if (options.connected && options.reorder)
    return Error(Status::kConfig, "sim option connected=1 needs reorder=0: connected paths keep order");
  *out = std::move(options);
  return {};
}

}  // namespace te::sim
