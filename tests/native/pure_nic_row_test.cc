// What a row of NICs can do, and how it is opened.
#include <doctest/doctest.h>

#include <cerrno>

#include "native/nic_row.h"

namespace te {
namespace {

struct FakeNic {
  Capabilities can;
  std::string name;
  uint64_t posted = 0;

  const Capabilities& capabilities() const { return can; }
  std::string provider_name() const { return "fake"; }
  NicInfo info() const {
    NicInfo info;
    info.name = name;
    return info;
  }
  Error register_memory(const MemorySpan&, MemoryKey*) { return {}; }
  Error deregister_memory(const MemoryKey&) { return {}; }
  Error open_path(const te_nic_address&, uint64_t, PathId*) { return {}; }
  void close_path(PathId) {}
  PostResult post(std::span<const WorkRequest> requests) {
    posted += requests.size();
    return {static_cast<uint32_t>(requests.size()), false, 0};
  }
  PostResult post_receive(void*, uint64_t, uint64_t, WorkContext*) { return {1, false, 0}; }
  uint32_t poll(std::span<Completion>) { return 0; }
  int wait_fd() const { return -1; }
  bool arm() { return true; }
};

struct FakeProvider final : NicRow<FakeNic> {
  using NicRow::NicRow;
  Error reset_path(uint32_t, PathId) override { return {}; }
  Death death_of(uint32_t, PathId) override { return Death::kNotProven; }
};

using Row = std::vector<std::unique_ptr<FakeNic>>;

Row row(std::initializer_list<Capabilities> list) {
  Row nics;
  for (const Capabilities& can : list)
    nics.push_back(std::make_unique<FakeNic>(FakeNic{can, "fake" + std::to_string(nics.size())}));
  return nics;
}

}  // namespace

TEST_CASE("pure: a row of NICs promises what each of them can do, whichever comes first") {
  Capabilities large, small;
  large.max_write_bytes = 1 << 30, small.max_write_bytes = 1 << 20;
  large.max_send_bytes = 4096, small.max_send_bytes = 8192;
  large.nic_depth = 512, small.nic_depth = 64;
  large.receive_depth = 1024, small.receive_depth = 128;
  large.completion_depth = 0, small.completion_depth = 256;
  large.device_memory = large.ordered_writes = large.delivery_complete = large.keys_enforced = true;
  small.ordered_writes = true;
  small.immediate_consumes_receive = true;
  for (const auto& list : {std::initializer_list<Capabilities>{large, small}, {small, large}}) {
    const FakeProvider provider("library 1", row(list));
    const Capabilities& all = provider.capabilities();
    CHECK(all.max_write_bytes == 1 << 20);
    CHECK(all.max_send_bytes == 4096);
    CHECK(all.nic_depth == 64);
    CHECK(all.receive_depth == 128);
    CHECK(all.completion_depth == 256);
    CHECK(all.ordered_writes);
    CHECK_FALSE(all.device_memory);
    CHECK_FALSE(all.delivery_complete);
    CHECK_FALSE(all.keys_enforced);
    CHECK(all.immediate_consumes_receive);
  }
}

TEST_CASE("pure: a row hands each call to the NIC that it names") {
  Row nics = row({{}, {}});
  FakeNic& second = *nics[1];
  FakeProvider provider("library 1", std::move(nics));
  CHECK(provider.nic_count() == 2);
  CHECK(provider.nic(1).name == "fake1");
  CHECK(provider.library_name() == "library 1");
  const WorkRequest requests[3];
  CHECK(provider.post(1, requests).posted == 3);
  CHECK(second.posted == 3);
}

TEST_CASE("pure: a NIC of a row that cannot be opened is named by its index, and none is kept") {
  const int choices[] = {7, 8, 9};
  Row nics;
  const auto open = [](int choice, std::unique_ptr<FakeNic>* out) {
    if (choice == 9) return Error(Status::kTransport, "no such NIC", ENODEV);
    *out = std::make_unique<FakeNic>();
    return Error();
  };
  const Error error = open_row<FakeNic>(choices, open, &nics);
  CHECK(error.status() == Status::kTransport);
  CHECK(error.nic() == 2);
  CHECK(error.provider_status() == ENODEV);
  CHECK(nics.empty());
  CHECK(open_row<FakeNic>(std::span(choices).first(2), open, &nics).ok());
  CHECK(nics.size() == 2);
}

}  // namespace te
