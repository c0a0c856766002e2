// Messages: whole, in order per sender, held back when nobody receives, and never lost while both live.
#include <atomic>
#include <map>

#include "tests/native/engine_support.h"

namespace te::engine_test {
namespace {

std::vector<uint8_t> pattern(uint64_t seed, size_t length) {
  Random random(seed);
  std::vector<uint8_t> bytes(length);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next() >> 24);
  return bytes;
}

struct Received {
  int32_t status = TE_AGAIN;
  int32_t peer = -1;
  std::vector<uint8_t> bytes;
};

Received receive(Player& player, int64_t timeout_ns = kPatience) {
  Received r;
  te_message message{};
  r.status = te_message_receive(player.engine, timeout_ns, &message, &player.error);
  if (r.status != TE_OK) return r;
  r.peer = message.peer;
  r.bytes.assign(message.data, message.data + message.length);
  te_message_release(player.engine, &message);
  return r;
}

}  // namespace

TEST_CASE("engine: messages of every length arrive whole and in order") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Player a(setup), b(setup);
    std::vector<size_t> lengths = {0,    1,    2,    7,    40,     1000,   4055,    4056,          4057,    4096, 8143,
                                   8144, 8145, 8192, 8193, 16'384, 65'537, 300'000, (1 << 20) - 1, 1 << 20, 0,    5};
    std::vector<Transfer> transfers;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const std::vector<uint8_t> bytes = pattern(i, lengths[i]);
      transfers.push_back(a.send(a.peer(b), bytes.data(), bytes.size()));
    }
    for (size_t i = 0; i < lengths.size(); ++i) {
      const Received r = receive(b);
      REQUIRE(r.status == TE_OK);
      CHECK(r.peer == b.peer(a));
      REQUIRE(r.bytes.size() == lengths[i]);
      REQUIRE(r.bytes == pattern(i, lengths[i]));
    }
    for (Transfer& t : transfers) {
      const int32_t status = t.wait();
      CHECK_MESSAGE(status == TE_OK, name_of(status), ": ", t.message());
    }
    CHECK(receive(b, 0).status == TE_AGAIN);
    CHECK(a.idle());
  }
}

TEST_CASE("engine: the bytes of a message may be reused as soon as the call has returned") {
  Player a({"sim", "delay=5", 1, {}}), b({"sim", "delay=5", 1, {}});
  std::vector<uint8_t> bytes = pattern(1, 50'000);
  Transfer t = a.send(a.peer(b), bytes.data(), bytes.size());
  std::fill(bytes.begin(), bytes.end(), 0);
  CHECK(receive(b).bytes == pattern(1, 50'000));
  CHECK(t.wait() == TE_OK);
}

TEST_CASE("engine: thousands of small messages in both directions keep their order on a fabric that reorders") {
  for (const char* sim : {"reorder=1,delay=6,busy=0.2", "reorder=0,busy=0.1,depth=8"})
    for (const uint32_t window : {4u, 32u}) {
      CAPTURE(std::string(sim));
      CAPTURE(window);
      Setup setup{"sim", sim, 2, [window](te_settings& s) { s.message_window = window; }};
      Player a(setup), b(setup);
      const int count = scaled(2000);
      const auto talk = [count](Player& from, int32_t to, std::atomic<int>* bad) {
        for (int i = 0; i < count; ++i) {
          if (from.send(to, &i, i % 3 == 0 ? 0 : sizeof i).refused()) ++*bad;
        }
      };
      const auto listen = [count](Player& at, std::atomic<int>* bad) {
        for (int i = 0; i < count; ++i) {
          te_message message{};
          te_error why{};
          if (te_message_receive(at.engine, kPatience, &message, &why) != TE_OK) {
            ++*bad;
            return;
          }
          int number = -1;
          if (message.length == sizeof number) std::memcpy(&number, message.data, sizeof number);
          if (message.length != (i % 3 == 0 ? 0 : sizeof number) || (message.length > 0 && number != i)) ++*bad;
          te_message_release(at.engine, &message);
        }
      };
      std::atomic<int> bad{0};
      const int32_t b_of_a = a.peer(b), a_of_b = b.peer(a);
      std::thread threads[] = {std::thread(talk, std::ref(a), b_of_a, &bad),
                               std::thread(talk, std::ref(b), a_of_b, &bad), std::thread(listen, std::ref(a), &bad),
                               std::thread(listen, std::ref(b), &bad)};
      for (std::thread& t : threads) t.join();
      CHECK(bad == 0);
      CHECK(a.stats().stray_messages + b.stats().stray_messages == 0);
    }
}

TEST_CASE("engine: a receiver that does not receive holds its sender back; nothing is lost, and all goes on") {
  constexpr uint64_t kQueue = 1 << 20, kMessage = 60'000;
  for (const char* sim : {"reorder=0", "reorder=1,delay=3"}) {
    CAPTURE(std::string(sim));
    Setup setup{"sim", sim, 1, [](te_settings& s) {
                  s.max_message_bytes = 100'000;
                  s.message_queue_bytes = kQueue;
                }};
    Player a(setup), b(setup);
    constexpr int kCount = 60;
    std::vector<Transfer> transfers;
    for (int i = 0; i < kCount; ++i) {
      const std::vector<uint8_t> bytes = pattern(static_cast<uint64_t>(i), kMessage);
      transfers.push_back(a.send(a.peer(b), bytes.data(), bytes.size()));
    }
    // As many as the queue takes go through, and no more.
    const auto done = [&] {
      return std::count_if(transfers.begin(), transfers.end(), [](Transfer& t) { return t.ended(); });
    };
    CHECK(eventually([&] { return done() >= static_cast<int64_t>(kQueue / kMessage) - 2; }));
    Transfer late = a.send(a.peer(b), "late", 4, 50 * kMs);
    CHECK(late.wait() == TE_ERR_TIMEOUT);
    CHECK(done() <= static_cast<int64_t>(kQueue / kMessage) + 1);
    // Writes are not held back by messages.
    Memory& source = a.memory(4096);
    Memory& target = b.memory(4096);
    require_ok(a.write(source, 0, a.remote(b, target), 0, 4096));
    for (int i = 0; i < kCount; ++i) {
      const Received r = receive(b);
      REQUIRE(r.status == TE_OK);
      REQUIRE(r.bytes == pattern(static_cast<uint64_t>(i), kMessage));
    }
    for (Transfer& t : transfers) CHECK(t.wait() == TE_OK);
    CHECK(receive(b, 20 * kMs).status == TE_AGAIN);  // the late one never left
  }
}

TEST_CASE("engine: empty messages are held back too, so that they cannot fill the receiver's memory") {
  Setup setup{"sim", "reorder=0", 1, [](te_settings& s) {
                s.max_message_bytes = 1000;
                s.message_queue_bytes = 6400;
                s.operations = 1024;
              }};
  Player a(setup), b(setup);
  std::vector<Transfer> transfers;
  for (int i = 0; i < 300; ++i) transfers.push_back(a.send(a.peer(b), nullptr, 0));
  Transfer late = a.send(a.peer(b), nullptr, 0, 50 * kMs);
  CHECK(late.wait() == TE_ERR_TIMEOUT);
  CHECK(std::count_if(transfers.begin(), transfers.end(), [](Transfer& t) { return t.ended(); }) <= 200);
  for (int i = 0; i < 300; ++i) REQUIRE(receive(b).status == TE_OK);
  for (Transfer& t : transfers) CHECK(t.wait() == TE_OK);
}

TEST_CASE("engine: a message given up half-way is never received, and later ones are whole") {
  for (int seed = 1; seed <= scaled(10); ++seed) {
    CAPTURE(seed);
    Setup setup{"sim", "delay=3,max_send=600,seed=" + std::to_string(seed) + (seed % 2 == 0 ? ",reorder=0" : ""), 1,
                [](te_settings& s) { s.message_window = 4; }};
    Player a(setup), b(setup);
    REQUIRE(a.connect(a.peer(b)).wait() == TE_OK);
    Random random(static_cast<uint64_t>(seed));
    std::vector<std::vector<uint8_t>> sent;
    std::vector<Transfer> transfers;
    for (uint64_t i = 0; i < 60; ++i) {
      sent.push_back(pattern(i + 1000, random.below(20'000)));
      transfers.push_back(a.send(a.peer(b), sent.back().data(), sent.back().size()));
      if (random.chance(0.5)) transfers[random.below(transfers.size())].cancel();
    }
    std::vector<size_t> must;  // those that were sent; the cancelled ones may or may not arrive, but whole
    size_t next = 0;
    for (size_t i = 0; i < transfers.size(); ++i)
      if (transfers[i].wait() == TE_OK) must.push_back(i);
      else CHECK(transfers[i].result() == TE_ERR_CANCELLED);
    const std::vector<uint8_t> last = pattern(7, 77);
    Transfer end = a.send(a.peer(b), last.data(), last.size());
    CHECK(end.wait() == TE_OK);
    for (;;) {
      const Received r = receive(b);
      REQUIRE(r.status == TE_OK);
      if (r.bytes == last) break;
      while (next < sent.size() && sent[next] != r.bytes) {
        if (std::find(must.begin(), must.end(), next) != must.end())
          FAIL("message ", next, " was reported sent and did not arrive in its turn");
        ++next;
      }
      REQUIRE(next < sent.size());
      ++next;
    }
    CHECK(std::none_of(must.begin(), must.end(), [&](size_t i) { return i >= next; }));
  }
}

TEST_CASE("engine: several receivers of one engine share its messages: each comes once") {
  Setup setup{"sim", "reorder=1,delay=1", 1, {}};
  Player hub(setup);
  std::vector<std::unique_ptr<Player>> senders;
  for (int i = 0; i < 4; ++i) senders.push_back(std::make_unique<Player>(setup));
  const int each = scaled(300);
  std::atomic<int> got{0};
  std::vector<std::atomic<int>> seen(static_cast<size_t>(each) * senders.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      te_error why{};
      for (;;) {
        te_message message{};
        const int32_t status = te_message_receive(hub.engine, kPatience, &message, &why);
        if (status != TE_OK) return;
        size_t number = 0;
        std::memcpy(&number, message.data, sizeof number);
        if (number < seen.size()) ++seen[number];
        te_message_release(hub.engine, &message);
        ++got;
      }
    });
  for (size_t s = 0; s < senders.size(); ++s)
    for (int i = 0; i < each; ++i) {
      const size_t number = s * static_cast<size_t>(each) + static_cast<size_t>(i);
      REQUIRE_FALSE(senders[s]->send(senders[s]->peer(hub), &number, sizeof number).refused());
    }
  CHECK(eventually([&] { return got == static_cast<int>(seen.size()); }));
  hub.close();  // wakes the receivers
  for (std::thread& t : threads) t.join();
  CHECK(std::all_of(seen.begin(), seen.end(), [](const std::atomic<int>& n) { return n == 1; }));
}

TEST_CASE("engine: messages received before a peer has left can still be read, and the arrival is told as an event") {
  Setup setup{"sim", "", 1, {}};
  Player b(setup);
  {
    Player a(setup);
    REQUIRE(a.send(a.peer(b), "farewell", 8).wait() == TE_OK);
    te_event events[4];
    uint32_t count = 0;
    REQUIRE(te_events_fetch(b.engine, kPatience, events, 4, &count, &b.error) == TE_OK);
    CHECK(events[0].kind == TE_EVENT_MESSAGE);
  }
  const Received r = receive(b);
  CHECK(r.status == TE_OK);
  CHECK(std::string(r.bytes.begin(), r.bytes.end()) == "farewell");
}

}  // namespace te::engine_test
