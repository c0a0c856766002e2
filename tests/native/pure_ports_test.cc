// Which RDMA ports are opened, by name and by number, on trees that the test writes: every refusal names the value and a remedy. The
// rule for GIDs itself is tested from Python, on recorded machines.
#include <doctest/doctest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cx7/gids.h"
#include "cx7/ports.h"
#include "cx7/sysfs.h"

namespace te::cx7 {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLinkLocal = "fe80:0000:0000:0000:0000:0000:0000:0001";
constexpr const char* kIpv4 = "0000:0000:0000:0000:0000:ffff:0a01:0203";
constexpr const char* kVlan = "0000:0000:0000:0000:0000:ffff:0a63:0001";

class Tree {
 public:
  Tree() {
    std::string pattern = (fs::temp_directory_path() / "te_ports_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    root_ = pattern;
  }
  ~Tree() { fs::remove_all(root_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void put(const std::string& name, const std::string& text) {
    const fs::path path = fs::path(root_) / "sys/class/infiniband" / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  }
  void port(const std::string& device, int number = 1, const std::string& state = "4: ACTIVE",
            const std::string& layer = "Ethernet") {
    const std::string at = device + "/ports/" + std::to_string(number) + "/";
    put(at + "state", state);
    put(at + "link_layer", layer);
    put(at + "pkeys/0", "0xffff");
  }
  void gid(const std::string& device, int number, int index, const std::string& gid, const std::string& interface) {
    const std::string at = device + "/ports/" + std::to_string(number) + "/", slot = std::to_string(index);
    put(at + "gids/" + slot, gid);
    put(at + "gid_attrs/types/" + slot, "RoCE v2");
    put(at + "gid_attrs/ndevs/" + slot, interface);
  }
  // With an address of a network interface of its own.
  void usable(const std::string& device, int number = 1) {
    port(device, number);
    gid(device, number, 0, kLinkLocal, "eth_" + device);
    gid(device, number, 1, kIpv4, "eth_" + device);
  }

  Error choose(const std::vector<std::string>& names = {}, uint32_t count = 0) {
    return choose_ports(root_, settings, names, count, &chosen);
  }
  // As "device:port".
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const Port& port : chosen) found.push_back(port.device + ":" + std::to_string(port.number));
    return found;
  }
  const std::string& root() const { return root_; }

  te_rdma_settings settings = defaults();
  std::vector<Port> chosen;

 private:
  static te_rdma_settings defaults() {
    te_settings all;
    te_settings_defaults(&all);
    return all.rdma;
  }
  std::string root_;
};

using Names = std::vector<std::string>;

// The status, and every part in the message; nothing was put out.
void refused(Tree& tree, const Error& error, Status status, const Names& parts) {
  CHECK(error.status() == status);
  for (const std::string& part : parts)
    CHECK_MESSAGE(error.message().find(part) != std::string::npos, error.message(), " lacks ", part);
  CHECK(error.message().size() < TE_MESSAGE_BYTES);
  CHECK(tree.chosen.empty());
}

}  // namespace

TEST_CASE("pure: ports: all usable ones are opened when none is named, and no more than are wanted") {
  Tree tree;
  tree.usable("mlx5_10");
  tree.usable("mlx5_2");
  tree.usable("mlx5_2", 2);
  tree.port("mlx5_0", 1, "1: DOWN");
  tree.port("efa_0", 1, "4: ACTIVE", "Unspecified");
  REQUIRE(tree.choose().ok());
  CHECK(tree.names() == Names{"mlx5_2:1", "mlx5_2:2", "mlx5_10:1"});
  CHECK(tree.chosen[0].gid_index == 1);
  CHECK(tree.chosen[0].interface == "eth_mlx5_2");
  REQUIRE(tree.choose({}, 2).ok());
  CHECK(tree.names() == Names{"mlx5_2:1", "mlx5_2:2"});
  tree.chosen.clear();
  refused(tree, tree.choose({}, 4), Status::kConfig, {"4 NICs", "nic_count", "mlx5_2:1, mlx5_2:2, mlx5_10:1", "lower"});
}

TEST_CASE("pure: ports: no more are opened by themselves than an engine has NICs") {
  Tree tree;
  for (int i = 0; i < TE_MAX_NICS + 2; ++i) tree.usable("mlx5_" + std::to_string(i));
  REQUIRE(tree.choose().ok());
  CHECK(tree.chosen.size() == TE_MAX_NICS);
}

TEST_CASE("pure: ports: a device is its first active port, a device with a number exactly that one") {
  Tree tree;
  tree.port("mlx4_0", 1, "1: DOWN");
  tree.usable("mlx4_0", 2);
  tree.usable("mlx4_0", 3);
  tree.usable("mlx5_0");
  REQUIRE(tree.choose({"mlx5_0", "mlx4_0"}).ok());
  CHECK(tree.names() == Names{"mlx5_0:1", "mlx4_0:2"});
  REQUIRE(tree.choose({"mlx4_0:3", "mlx5_0", "mlx4_0"}, 2).ok());
  CHECK(tree.names() == Names{"mlx4_0:3", "mlx5_0:1"});
  tree.chosen.clear();
  refused(tree, tree.choose({"mlx4_0:1"}), Status::kConfig, {"NIC mlx4_0:1", "DOWN", "ip link set"});
  refused(tree, tree.choose({"mlx4_0:4"}), Status::kConfig, {"NIC mlx4_0:4", "mlx4_0:1, mlx4_0:2"});
  refused(tree, tree.choose({"mlx5"}), Status::kConfig, {"NIC mlx5:", "mlx5_0:1"});
  refused(tree, tree.choose({""}), Status::kConfig, {"no RDMA port has this name"});
  refused(tree, tree.choose({"mlx5_0", "mlx5_0:1"}), Status::kConfig, {"NIC mlx5_0:1", "twice"});
  refused(tree, tree.choose({"mlx5_0"}, 2), Status::kConfig, {"2 NICs", "nic_count", "mlx5_0:1"});
}

TEST_CASE("pure: ports: a network interface is the port with a GID of it, and that GID") {
  Tree tree;
  tree.port("mlx5_0", 1, "1: DOWN");
  tree.gid("mlx5_0", 1, 0, kVlan, "eth0.99");
  tree.usable("mlx5_1");
  tree.gid("mlx5_1", 1, 2, kVlan, "eth0.99");
  REQUIRE(tree.choose({"eth0.99"}).ok());
  CHECK(tree.names() == Names{"mlx5_1:1"});
  CHECK(tree.chosen[0].gid_index == 2);
  REQUIRE(tree.choose({"eth_mlx5_1"}).ok());
  CHECK(tree.chosen[0].gid_index == 1);
  tree.settings.gid_index = 0;
  REQUIRE(tree.choose({"eth0.99"}).ok());
  CHECK(tree.chosen[0].gid_index == 0);
  tree.chosen.clear();
  refused(tree, tree.choose({"eth1"}), Status::kConfig, {"NIC eth1", "mlx5_0:1, mlx5_1:1"});
}

TEST_CASE(
    "pure: ports: without a device, or one that can be used, the transport is unavailable, with reasons and remedies") {
  Tree tree;
  refused(tree, tree.choose(), Status::kTransportUnavailable, {"no RDMA device", "modprobe", "/dev/infiniband"});
  refused(tree, tree.choose({"mlx5_0"}), Status::kTransportUnavailable, {"no RDMA device"});
  tree.port("mlx5_0");
  tree.port("mlx5_1", 1, "1: DOWN");
  tree.port("mlx5_2", 1, "2: INIT", "InfiniBand");
  refused(tree, tree.choose(), Status::kTransportUnavailable,
          {"mlx5_0:1: the port has no GID; give its interface an address", "mlx5_1:1: the port is DOWN", "1 more"});
  refused(tree, tree.choose({"mlx5_2"}), Status::kConfig, {"NIC mlx5_2", "subnet manager", "opensm"});
}

TEST_CASE("pure: ports: an EFA device is left alone, and refused by name") {
  Tree tree;
  tree.port("efa_0", 1, "4: ACTIVE", "Unspecified");
  refused(tree, tree.choose(), Status::kTransportUnavailable, {"efa_0:1", "transport efa"});
  tree.usable("mlx5_0");
  refused(tree, tree.choose({"efa_0"}), Status::kConfig, {"NIC efa_0", "EFA", "transport efa"});
  REQUIRE(tree.choose().ok());
  CHECK(tree.names() == Names{"mlx5_0:1"});
}

TEST_CASE("pure: ports: an index that leads nowhere is a fault of the settings, also where a port is down") {
  Tree tree;
  tree.usable("mlx5_0");
  tree.port("mlx5_1", 1, "1: DOWN");
  tree.settings.gid_index = 7;
  refused(tree, tree.choose(), Status::kConfig, {"mlx5_0:1", "gid_index is 7", "has 2 slots", "0-1"});
  refused(tree, tree.choose({"mlx5_0"}), Status::kConfig, {"NIC mlx5_0", "gid_index is 7", "0-1"});
  tree.settings.gid_index = 1;
  tree.settings.pkey_index = 3;
  refused(tree, tree.choose(), Status::kConfig, {"pkey_index is 3", "has 1 slots", "filled: 0"});
  tree.settings.pkey_index = 0;
  REQUIRE(tree.choose().ok());
  CHECK(tree.chosen[0].why.find("as set") != std::string::npos);
}

TEST_CASE("pure: ports: a refusal fits into a message however many ports and slots there are") {
  Tree tree;
  for (int i = 0; i < 40; ++i) {
    const std::string device = "rocep" + std::to_string(100 + i) + "s0f0np0";
    tree.port(device);
    for (int slot = 0; slot < 60; slot += 2) tree.gid(device, 1, slot, kIpv4, "enp100s0f0np0");
  }
  tree.settings.gid_index = 1;
  refused(tree, tree.choose(), Status::kConfig, {"that slot", "is empty", "0, 2, 4", "..."});
  refused(tree, tree.choose({"x"}), Status::kConfig, {"NIC x", "more"});
  refused(tree, tree.choose({}, 41), Status::kConfig, {"gid_index"});
  tree.settings.gid_index = -1;
  refused(tree, tree.choose({}, 41), Status::kConfig, {"41 NICs", "32 more"});
}

TEST_CASE("pure: ports: GIDs are read as sysfs writes them, and nothing else is one") {
  CHECK(gid_text(*parse_gid(kIpv4)) == "10.1.2.3");
  CHECK(gid_text(*parse_gid(kLinkLocal)) == "fe80::1");
  CHECK(address_kind(*parse_gid(kIpv4)) == AddressKind::kIpv4);
  CHECK(address_kind(*parse_gid("febf:ffff:0000:0000:0000:0000:0000:0001")) == AddressKind::kLinkLocal);
  CHECK(address_kind(*parse_gid("fec0:0000:0000:0000:0000:0000:0000:0001")) == AddressKind::kIpv6);
  for (const char* text :
       {"", "::1", "fe80:0000:0000:0000:0000:0000:0000:000g", "fe80-0000-0000-0000-0000-0000-0000-0001",
        "fe80:0000:0000:0000:0000:0000:0000:0x01", "fe80:0000:0000:0000:0000:0000:0000:00010"})
    CHECK_FALSE(parse_gid(text).has_value());
}

TEST_CASE("pure: ports: names sort as people count") {
  Names names = {"mlx5_10", "b", "mlx5_2", "a1b10", "a1b9", "a01b9", "mlx5_", "a", "a10"};
  std::sort(names.begin(), names.end(), natural_less);
  CHECK(names == Names{"a", "a01b9", "a1b9", "a1b10", "a10", "b", "mlx5_", "mlx5_2", "mlx5_10"});
  for (const std::string& a : names)
    for (const std::string& b : names) CHECK(static_cast<int>(natural_less(a, b)) + natural_less(b, a) == (a != b));
  CHECK(parse_number("0xffff", 0xffff) == 0xffffu);
  CHECK(parse_number("12", 12) == 12u);
  for (const char* text : {"", "0x", "-1", "+1", "13", "1 ", "1x", "99999999999999999999"})
    CHECK_FALSE(parse_number(text, 12).has_value());
}

TEST_CASE("pure: ports: the C call needs no room to count, and checks what it is given") {
  Tree tree;
  tree.usable("mlx5_0");
  tree.usable("mlx5_1");
  te_error error{};
  uint32_t count = 99;
  CHECK(te_rdma_ports(tree.root().c_str(), nullptr, nullptr, 0, &count, &error) == TE_OK);
  CHECK(count == 2);
  te_rdma_port ports[2] = {};
  CHECK(te_rdma_ports(tree.root().c_str(), nullptr, ports, 1, &count, &error) == TE_OK);
  CHECK(count == 2);
  CHECK(std::string(ports[0].device) == "mlx5_0");
  CHECK(ports[0].gid_index == 1);
  CHECK(ports[1].device[0] == '\0');
  CHECK(te_rdma_ports("", nullptr, nullptr, 1, &count, &error) == TE_ERR_ARGUMENT);
  CHECK(te_rdma_ports("", nullptr, ports, 1, nullptr, &error) == TE_ERR_ARGUMENT);
  CHECK(te_struct_bytes("te_rdma_port") == sizeof(te_rdma_port));
  CHECK(te_struct_bytes("te_rdma_settings") == sizeof(te_rdma_settings));
}

}  // namespace te::cx7
