#include "cx7/sysfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <memory>

namespace te::cx7 {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string_view digits_at(std::string_view text, size_t at) {
  size_t end = at;
  while (end < text.size() && is_digit(text[end])) ++end;
  return text.substr(at, end - at);
}

std::string_view without_zeros(std::string_view digits) {
  return digits.substr(std::min(digits.find_first_not_of('0'), digits.size()));
}

}  // namespace

std::string read_line(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return {};
  char text[256];  // an attribute that is read here has far less
  const ssize_t length = read(file, text, sizeof text);
  close(file);
  std::string_view line(text, length > 0 ? static_cast<size_t>(length) : 0);
  line = line.substr(0, line.find_first_of(std::string_view("\n\0", 2)));
  const auto blank = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!line.empty() && blank(line.front())) line.remove_prefix(1);
  while (!line.empty() && blank(line.back())) line.remove_suffix(1);
  return std::string(line);
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> open_directory(opendir(directory.c_str()), closedir);
  if (!open_directory) return names;
  while (const dirent* entry = readdir(open_directory.get()))
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  std::sort(names.begin(), names.end(), natural_less);
  return names;
}

std::string link_name(const std::string& path) {
  char target[4096];
  const ssize_t length = readlink(path.c_str(), target, sizeof target);
  const std::string_view text(target, length > 0 ? static_cast<size_t>(length) : 0);
  return std::string(text.substr(text.rfind('/') + 1));
}

bool natural_less(std::string_view a, std::string_view b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::string_view x = digits_at(a, i), y = digits_at(b, j);
      const std::string_view p = without_zeros(x), q = without_zeros(y);
      if (p.size() != q.size()) return p.size() < q.size();
      if (p != q) return p < q;
      i += x.size();
      j += y.size();
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i, ++j;
    }
  }
  if (a.size() - i != b.size() - j) return a.size() - i < b.size() - j;
  return a < b;  // they differ in leading zeros at most
}

std::optional<uint32_t> parse_number(std::string_view text, uint32_t highest) {
  const bool hexadecimal = text.starts_with("0x") || text.starts_with("0X");
  if (hexadecimal) text.remove_prefix(2);
  uint32_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value, hexadecimal ? 16 : 10);
  if (failure != std::errc() || end != text.data() + text.size() || value > highest) return std::nullopt;
  return value;
}

}  // namespace te::cx7
