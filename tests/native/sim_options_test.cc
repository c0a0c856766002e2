// Options of the simulated transport: what is accepted, what is refused with which words, and what becomes a capability.
#include "native/sim/options.h"
#include "tests/native/sim_support.h"

using namespace te;
using namespace te::sim;
using namespace te::sim::test;

TEST_CASE("sim options: every key is read") {
  Options o;
  REQUIRE(
      parse_options("seed=7,reorder=0,delay=3,mtu=512,delivery_complete=0,depth=5,receive_depth=6,completion_depth=9,"
                    "max_write=1000,max_send=100,busy=0.25,error=0.5,wait_fd=0,reads=0,virtual_addresses=0,"
                    "stale_keys_land=1,require_peer=1,reports_dead_peer=1,connected=1,address=a.b-c_9",
                    &o)
          .ok());
  CHECK(o.seed == 7);
  CHECK_FALSE(o.reorder);
  CHECK(o.delay == 3);
  CHECK(o.mtu == 512);
  CHECK_FALSE(o.delivery_complete);
  CHECK(o.depth == 5);
  CHECK(o.receive_depth == 6);
  CHECK(o.completion_depth == 9);
  CHECK(o.max_write == 1000);
  CHECK(o.max_send == 100);
  CHECK(o.busy == 0.25);
  CHECK(o.error == 0.5);
  CHECK_FALSE(o.wait_fd);
  CHECK_FALSE(o.reads);
  CHECK_FALSE(o.virtual_addresses);
  CHECK(o.stale_keys_land);
  CHECK_FALSE(o.keys_enforced);
  CHECK(o.require_peer);
  CHECK(o.reports_dead_peer);
  CHECK(o.connected);
  CHECK(o.address == "a.b-c_9");
}

TEST_CASE("sim options: nothing means the defaults, and empty pairs are skipped") {
  Options o;
  REQUIRE(parse_options("", &o).ok());
  CHECK(o.reorder);
  CHECK(o.max_write == 1 << 20);
  CHECK(o.max_send == 4096);
  CHECK(parse_options(",seed=1,,", &o).ok());
}

TEST_CASE("sim options: a wrong one is refused with key, value and what is allowed, and nothing is changed") {
  struct Case {
    const char* text;
    std::vector<const char*> words;
  };
  const Case cases[] = {
      {"nonsense=1", {"nonsense", "known are", "reorder"}},
      {"seed", {"seed", "=value"}},
      {"seed=", {"seed", "\"\"", "whole number"}},
      {"seed=-1", {"seed", "-1"}},
      {"seed=1x", {"1x"}},
      {"delay=1000001", {"delay", "1000001", "from 0 to 1000000"}},
      {"depth=0", {"depth", "\"0\"", "from 1"}},
      {"reorder=2", {"reorder", "\"2\"", "0 or 1"}},
      {"busy=1.5", {"busy", "1.5", "from 0 to 1"}},
      {"busy=nan", {"busy", "nan"}},
      {"error=-0.1", {"error", "-0.1"}},
      {"address=", {"address", "1 to 64"}},
      {"address=a/b", {"a/b", "letters"}},
      {"stale_keys_land=1,keys_enforced=1", {"stale_keys_land", "keys_enforced", "exclude"}},
      {"connected=1", {"connected", "reorder=0"}},
  };
  for (const Case& each : cases) {
    CAPTURE(each.text);
    Options o;
    o.seed = 99;
    const Error error = parse_options(each.text, &o);
    CHECK(error.status() == Status::kConfig);
    for (const char* word : each.words) CHECK_MESSAGE(error.message().find(word) != std::string::npos, error.message());
    CHECK(o.seed == 99);
    std::unique_ptr<Provider> provider;
    CHECK(open_provider(settings(each.text), &provider).status() == Status::kConfig);
    CHECK(provider == nullptr);
  }
}

TEST_CASE("sim options: capabilities tell the truth") {
  const auto capabilities = [](const std::string& sim) { return open_ok(settings(sim))->capabilities(); };
  CHECK_FALSE(capabilities("").ordered_writes);
  CHECK_FALSE(capabilities("").ordered_sends);
  CHECK(capabilities("reorder=0").ordered_writes);
  CHECK(capabilities("reorder=0").ordered_sends);
  CHECK(capabilities("").delivery_complete);
  CHECK_FALSE(capabilities("delivery_complete=0").delivery_complete);
  CHECK(capabilities("").keys_enforced);
  CHECK_FALSE(capabilities("keys_enforced=0").keys_enforced);
  CHECK_FALSE(capabilities("stale_keys_land=1").keys_enforced);
  CHECK(capabilities("").reads);
  CHECK_FALSE(capabilities("reads=0").reads);
  CHECK(capabilities("depth=17").nic_depth == 17);
  CHECK(capabilities("receive_depth=18").receive_depth == 18);
  CHECK(capabilities("completion_depth=19").completion_depth == 19);
  CHECK(capabilities("completion_depth=0").completion_depth == 0);
  CHECK(capabilities("max_write=20").max_write_bytes == 20);
  CHECK(capabilities("max_send=21").max_send_bytes == 21);
  CHECK(capabilities("reports_dead_peer=1").reports_dead_peer);
  CHECK(capabilities("reorder=0,connected=1").connected_paths);
  CHECK(capabilities("").same_process_only);
}

TEST_CASE("sim options: the engine's settings lower the device's limits and name its NICs") {
  ProviderOptions options = settings("depth=100,max_write=5000");
  options.nic_depth = 40;
  options.chunk_bytes = 3000;
  options.completion_depth = 70;
  options.nic_count = 0;
  options.nics = {"left", "right"};
  const auto provider = open_ok(options);
  CHECK(provider->capabilities().nic_depth == 40);
  CHECK(provider->capabilities().max_write_bytes == 3000);
  CHECK(provider->capabilities().completion_depth == 70);
  REQUIRE(provider->nic_count() == 2);
  CHECK(provider->nic(1).name == "right");
  CHECK(provider->nic(0).up);

  options.nic_depth = 1000;
  options.chunk_bytes = 1 << 20;
  CHECK(open_ok(options)->capabilities().nic_depth == 100);
  CHECK(open_ok(options)->capabilities().max_write_bytes == 5000);

  std::unique_ptr<Provider> none;
  options.nic_count = 3;  // more than named: they are shared
  CHECK(open_ok(options)->nic(2).name == "left");
  CHECK(open_provider(settings("", 0, TE_MAX_NICS + 1), &none).status() == Status::kConfig);
}

TEST_CASE("sim address: a live one cannot be taken, a closed or killed one can") {
  auto first = open_ok(settings("address=same"));
  std::unique_ptr<Provider> second;
  const Error error = open_provider(settings("address=same"), &second);
  CHECK(error.status() == Status::kConfig);
  CHECK(error.message().find("in use") != std::string::npos);
  REQUIRE(first->inject("kill").ok());
  REQUIRE(open_provider(settings("address=same"), &second).ok());
  first.reset();  // must not take the new engine off the fabric
  Player sender("");
  PathId path = kNoPath;
  REQUIRE(sender.provider->open_path(0, second->nic(0).address, 1, &path).ok());
  WorkRequest request;
  request.opcode = Opcode::kWriteImmediate;
  request.path = path;
  request.context = sender.context(0);
  sender.post_ok(request);
  CHECK(sender.one().status == Status::kOk);
  second.reset();
  CHECK(open_ok(settings("address=same")) != nullptr);
}

TEST_CASE("sim address: identity, generation and NIC make it unique, and no identity gets a serial") {
  const auto a = open_ok(settings("", 5, 2));
  const auto text = [](const NicInfo& info) {
    return std::string(reinterpret_cast<const char*>(info.address.bytes), info.address.length);
  };
  CHECK(text(a->nic(0)) != text(a->nic(1)));
  std::unique_ptr<Provider> same;
  CHECK(open_provider(settings("", 5), &same).status() == Status::kConfig);
  ProviderOptions restarted = settings("", 5);
  restarted.generation = 2;
  CHECK(text(open_ok(restarted)->nic(0)) != text(a->nic(0)));
  const auto b = open_ok(settings(""));
  const auto c = open_ok(settings(""));
  CHECK(text(b->nic(0)) != text(c->nic(0)));
}
