#include "native/sim/commands.h"

#include <charconv>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "native/sim/nic.h"

namespace te::sim {
namespace {

using Words = std::vector<std::string_view>;

Words split(std::string_view text) {
  Words words;
  while (!text.empty()) {
    const size_t space = text.find(' ');
    if (space != 0) words.push_back(text.substr(0, space));
    text = space == std::string_view::npos ? std::string_view() : text.substr(space + 1);
  }
  return words;
}

std::optional<uint64_t> number(std::string_view text, int base = 10) {
  uint64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (code != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Identity> identity(std::string_view hex) {
  Identity bytes{};
  if (hex.size() != 2 * bytes.size()) return std::nullopt;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const std::optional<uint64_t> byte = number(hex.substr(2 * i, 2), 16);
    if (!byte) return std::nullopt;
    bytes[i] = static_cast<uint8_t>(*byte);
  }
  return bytes;
}

std::optional<Fate> fate(std::string_view name) {
  constexpr std::pair<std::string_view, Fate> kNames[] = {{"clean", Fate::kClean},
                                                          {"unknown", Fate::kUnknown},
                                                          {"partial", Fate::kPartial},
                                                          {"landed", Fate::kLanded},
                                                          {"late", Fate::kLate}};
  for (const auto& [known, value] : kNames)
    if (name == known) return value;
  return std::nullopt;
}

Error malformed(const std::string& usage) {
  return Error(Status::kArgument, "sim command: expected \"" + usage + "\"");
}

Error run_nic(Host& host, const Words& words) {
  const std::optional<uint64_t> index = words.size() == 2 ? number(words[1]) : std::nullopt;
  if (!index || *index >= host.nics.size())
    return malformed(std::string(words[0]) + format(" N\" with N below %zu", host.nics.size()));
  Nic& nic = *host.nics[*index];
  words[0] == "nic_down" ? nic.set_down() : nic.set_up();
  return {};
}

Error run_kill(Host& host, bool loud) {
  if (std::exchange(host.killed, true)) return {};
  for (const auto& nic : host.nics) {
    nic->detach(loud ? Fabric::End::kKilledLoudly : Fabric::End::kKilledSilently);
    nic->cancel_all();
  }
  return {};
}

Error run_partition(Fabric& fabric, Host& host, const Words& words) {
  const std::optional<Identity> other = words.size() == 2 ? identity(words[1]) : std::nullopt;
  if (words[0] == "heal" && words.size() == 1) {
    fabric.heal(host.identity);
    return {};
  }
  if (!other) return malformed(std::string(words[0]) + " IDENTITY (32 hex digits)");
  if (words[0] == "heal") fabric.heal(host.identity, *other);
  else fabric.partition(host.identity, *other);
  return {};
}

Error run_errors(Host& host, const Words& words) {
  const std::optional<uint64_t> count = words.size() >= 2 ? number(words[1]) : std::nullopt;
  const std::optional<Fate> named = words.size() == 3 ? fate(words[2]) : std::nullopt;
  if (!count || words.size() > 3 || (words.size() == 3 && !named))
    return malformed(std::string(words[0]) + " N [clean|unknown|partial|landed|late]");
  const bool later = words[0] == "fail_after";
  host.fail_after = later ? *count : 0;
  host.errors_due = later ? 1 : *count;
  host.errors_fate = named.value_or(Fate::kGood);
  return {};
}

Error run_count(const Words& words, uint64_t* target) {
  const std::optional<uint64_t> count = words.size() == 2 ? number(words[1]) : std::nullopt;
  if (!count) return malformed(std::string(words[0]) + " N");
  *target = *count;
  return {};
}

Error stats(const Host& host) {
  uint64_t in_flight = 0;
  for (const auto& nic : host.nics) in_flight += nic->in_flight();
  const Counts& counts = host.counts;
  const std::pair<const char*, uint64_t> values[] = {
      {"writes", counts.writes},         {"immediates", counts.immediates},
      {"reads", counts.reads},           {"sends", counts.sends},
      {"errors", counts.errors},         {"busy", counts.busy},
      {"not_ready", counts.not_ready},   {"flipped", counts.flipped},
      {"stale_live", counts.stale_live}, {"stale_shadow", counts.stale_shadow},
      {"stale_lost", counts.stale_lost}, {"overruns", counts.overruns},
      {"tampered", counts.tampered},     {"in_flight", in_flight}};
  std::string text;
  for (const auto& [name, value] : values)
    text.append(text.empty() ? "" : " ").append(name).append("=").append(std::to_string(value));
  return Error(Status::kOk, text);
}

}  // namespace

Error run_command(Fabric& fabric, Host& host, std::string_view command) {
  const Words words = split(command);
  const std::string_view verb = words.empty() ? std::string_view() : words[0];
  if (verb == "nic_down" || verb == "nic_up") return run_nic(host, words);
  if (verb == "kill" || verb == "kill_loud") return run_kill(host, verb == "kill_loud");
  if (verb == "partition" || verb == "heal") return run_partition(fabric, host, words);
  if (verb == "error_next" || verb == "fail_after") return run_errors(host, words);
  if (verb == "register_fail") return run_count(words, &host.registration_failures_due);
  if (verb == "stats") return stats(host);
  if (verb == "flip_next") {
    if (words.size() > 1) return run_count(words, &host.flips_due);
    host.flips_due = 1;
    return {};
  }
  if (verb == "pause" || verb == "resume") {
    host.paused = verb == "pause";
    for (const auto& nic : host.nics) nic->resume_all();
    return {};
  }
  return Error(Status::kArgument, "sim command \"" + std::string(command) + "\" is unknown; see native/sim/commands.h");
}

}  // namespace te::sim
