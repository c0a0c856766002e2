#include "tests/verbs/sysfs.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/verbs/standin.h"

namespace standin {
namespace {

namespace fs = std::filesystem;

fs::path directory_of(const std::string& root, const Device& device) {
  return fs::path(root) / "sys/class/infiniband" / device.name;
}

std::string interface_of(const Device& device) { return "net-" + std::string(device.name); }

void line(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream file(path);
  file << text << '\n';
  file.close();
  if (!file) throw fs::filesystem_error("not written", path, std::make_error_code(std::errc::io_error));
}

std::string gid_text(const ibv_gid& gid) {
  std::string text;
  char group[8];
  for (int i = 0; i < 16; i += 2) {
    std::snprintf(group, sizeof group, "%s%02x%02x", i == 0 ? "" : ":", gid.raw[i], gid.raw[i + 1]);
    text += group;
  }
  return text;
}

void write_gids(const std::string& root, const Device& device) {
  const fs::path port = directory_of(root, device) / "ports/1";
  for (int i = 0; i < kGids; ++i) {
    const std::string name = std::to_string(i);
    const ibv_gid& gid = device.gids[i];
    line(port / "gids" / name, gid_text(gid));
    // A kernel answers EINVAL for empty slots; here their files are not there.
    if (gid.global.subnet_prefix == 0 && gid.global.interface_id == 0) continue;
    line(port / "gid_attrs/types" / name, "RoCE v2");
    line(port / "gid_attrs/ndevs" / name, interface_of(device));
  }
}

void write_device(const std::string& root, const Device& device) {
  const fs::path base = directory_of(root, device), port = base / "ports/1";
  line(base / "node_type", "1: CA");
  line(base / "node_desc", "stand-in");
  line(base / "fw_ver", "0.0.0");
  line(port / "link_layer", "Ethernet");
  line(port / "lid", "0x0");
  line(port / "sm_lid", "0x0");
  line(port / "rate", "100 Gb/sec (4X EDR)");
  line(port / "pkeys/0", "0xffff");
  write_gids(root, device);
  fs::create_directories(fs::path(root) / "sys/class/net" / interface_of(device));
}

void write_state_below(const std::string& root, const Device& device) {
  const fs::path port = directory_of(root, device) / "ports/1";
  line(port / "state", device.up ? "4: ACTIVE" : "1: DOWN");
  line(port / "phys_state", device.up ? "5: LinkUp" : "3: Disabled");
}

}  // namespace

int write_tree(Fabric& f, const char* root) {
  try {
    for (const auto& device : f.devices) {
      write_device(root, *device);
      write_state_below(root, *device);
    }
    fs::create_directories(fs::path(root) / "sys/class/infiniband");
  } catch (const fs::filesystem_error& failure) {
    return failure.code().value() != 0 ? failure.code().value() : EIO;
  }
  f.sysfs_root = root;
  return 0;
}

void write_tree_if_absent(Fabric& f, const char* root) {
  std::error_code ignored;
  const fs::path directory = fs::path(root) / "sys/class/infiniband";
  const auto has = [&](size_t device) { return fs::exists(directory / ("standin" + std::to_string(device)), ignored); };
  const size_t count = f.devices.size();
  if (fs::exists(directory, ignored) && (count == 0 || has(count - 1)) && !has(count)) return;
  fs::remove_all(directory, ignored);  // it was made for another number of devices
  if (const int code = write_tree(f, root); code != 0)
    std::fprintf(stderr, "standin: the tree below %s is not written: errno %d\n", root, code);
}

template <typename Write>
void rewrite(Fabric& f, const Write& write) {
  if (f.sysfs_root.empty()) return;
  try {
    write();
  } catch (const fs::filesystem_error&) {
    f.sysfs_root.clear();  // the test has taken its tree away
  }
}

void write_state(Fabric& f, const Device& device) {
  rewrite(f, [&] { write_state_below(f.sysfs_root, device); });
}

void write_addresses(Fabric& f, const Device& device) {
  rewrite(f, [&] { write_gids(f.sysfs_root, device); });
}

}  // namespace standin

extern "C" int standin_write_sysfs(const char* root) {
  standin::Locked f;
  return standin::write_tree(*f, root);
}
