// The few ways in which sysfs is read: attributes are one line each, tables are directories of numbered files. What cannot be read
// is empty, never an error: drivers leave attributes out, and empty slots of a GID table answer EINVAL.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace te::cx7 {

std::string read_line(const std::string& path);                   // without the end of line and blanks around
std::vector<std::string> names_in(const std::string& directory);  // in natural order
std::string link_name(const std::string& path);                   // the last part of what a symbolic link points to

// Runs of digits compare as numbers: mlx5_2 before mlx5_10.
bool natural_less(std::string_view a, std::string_view b);

// Decimal, or hexadecimal behind 0x. Nothing for other text and for numbers above `highest`.
std::optional<uint32_t> parse_number(std::string_view text, uint32_t highest);

}  // namespace te::cx7
