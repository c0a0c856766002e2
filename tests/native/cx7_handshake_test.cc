// The handshake against a network that loses, doubles, delays and reorders, in thousands of random schedules. A model device remembers
// which queue pairs exist and to which they were bound, so that a wrong pairing cannot go unseen.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "cx7/switchboard.h"

namespace te::cx7 {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

struct World;

// One NIC.
struct Side final : Effects {
  Side(World* world, uint8_t name, uint64_t cookie, Switchboard::Options base = {});

  struct Pair {
    QueuePairs ours, theirs;
    NicAddress remote;
    bool made = false, bound = false;
  };
  bool make(uint32_t connection, QueuePairs* ours) override;
  bool bind(uint32_t connection, const NicAddress& remote, const QueuePairs& theirs) override;
  void destroy(uint32_t connection) override { pairs.erase(connection); }
  void send(const NicAddress& to, const HandshakeMessage& message) override;
  void up(uint32_t connection) override { ++ups[connection]; }
  void down(uint32_t connection, Loss loss) override { downs.emplace_back(connection, loss); }

  World& world;
  Switchboard::Options options;
  std::map<uint32_t, Pair> pairs;
  std::map<uint32_t, int> ups;
  std::vector<std::pair<uint32_t, Loss>> downs;
  bool refuses_pairs = false;
  std::unique_ptr<Switchboard> board;
};

struct Letter {
  NicAddress to;
  std::vector<uint8_t> bytes;
  int64_t due;
};

struct World {
  explicit World(uint64_t seed) : random(seed) {}

  double chance() { return std::uniform_real_distribution<>(0, 1)(random); }
  uint32_t below(uint32_t bound) { return std::uniform_int_distribution<uint32_t>(0, bound - 1)(random); }

  void post(const NicAddress& to, std::span<const uint8_t> bytes) {
    for (int copies = chance() < doubled ? 2 : 1; copies > 0; --copies) {
      if (chance() < lost) continue;
      const int64_t delay = longest_delay == 0 ? 0 : below(static_cast<uint32_t>(longest_delay)) * kMillisecond / 4;
      letters.push_back({to, {bytes.begin(), bytes.end()}, now + delay});
    }
  }

  // One quarter of a millisecond.
  void step() {
    now += kMillisecond / 4;
    std::vector<Letter> due;
    std::erase_if(letters, [&](Letter& letter) {
      if (letter.due > now) return false;
      due.push_back(std::move(letter));
      return true;
    });
    std::shuffle(due.begin(), due.end(), random);
    for (const Letter& letter : due)
      for (Side* side : sides)
        if (side->options.own.queue_pair == letter.to.queue_pair && side->options.own.queue_key == letter.to.queue_key)
          side->board->receive(letter.bytes, now);
    for (Side* side : sides) side->board->tick(now);
  }

  std::mt19937_64 random;
  double lost = 0, doubled = 0;
  int64_t longest_delay = 0;  // quarters of a millisecond
  int64_t now = kMillisecond;
  uint32_t next_pair = 100;
  std::deque<Letter> letters;
  std::vector<Side*> sides;
};

Side::Side(World* w, uint8_t name, uint64_t cookie, Switchboard::Options base) : world(*w), options(base) {
  options.identity[0] = name;
  options.generation = cookie;
  options.own.queue_pair = name;
  options.own.queue_key = name;
  options.own.cookie = cookie;
  options.own.gid[15] = name;
  board = std::make_unique<Switchboard>(options, this);
  world.sides.push_back(this);
}

bool Side::make(uint32_t connection, QueuePairs* ours) {
  if (refuses_pairs) return false;
  Pair& pair = pairs[connection] = Pair{};
  for (uint32_t& number : pair.ours.number) number = world.next_pair++;
  for (uint32_t& sequence : pair.ours.sequence) sequence = world.below(1u << 24);
  pair.ours.mtu = 3;
  pair.made = true;
  *ours = pair.ours;
  return true;
}

bool Side::bind(uint32_t connection, const NicAddress& remote, const QueuePairs& theirs) {
  Pair& pair = pairs.at(connection);
  CHECK(pair.made);
  CHECK_FALSE(pair.bound);  // once
  pair.bound = true;
  pair.remote = remote;
  pair.theirs = theirs;
  return true;
}

void Side::send(const NicAddress& to, const HandshakeMessage& message) {
  const HandshakeBytes bytes = encode(message);
  world.post(to, bytes);
}

// Both up, and bound to each other.
bool joined(const Side& a, uint32_t at_a, const Side& b) {
  const auto pair = a.pairs.find(at_a);
  if (!a.board->is_up(at_a) || pair == a.pairs.end() || !pair->second.bound) return false;
  for (const auto& [index, other] : b.pairs)
    if (other.bound && other.ours == pair->second.theirs)
      return other.theirs == pair->second.ours && b.board->is_up(index);
  return false;
}

uint32_t open_ok(Side& from, const Side& to) {
  uint32_t connection = 0;
  REQUIRE(from.board->open(to.options.own, to.options.generation, from.world.now, &connection).ok());
  return connection;
}

}  // namespace

TEST_CASE("cx7 wire: addresses and messages come back as they were") {
  NicAddress address;
  address.gid[3] = 7;
  address.lid = 0x1234;
  address.ethernet = false;
  address.queue_pair = 0xABCDEF;
  address.queue_key = 0x7FFFFFFF;
  address.cookie = 0x123456789ABCDEF0;
  NicAddress back;
  REQUIRE(decode(encode(address), &back));
  CHECK(back == address);

  HandshakeMessage m;
  m.sender = address;
  m.identity[5] = 9;
  m.generation = 11;
  m.target_cookie = 12;
  m.target_generation = 13;
  m.attempt = 14;
  m.echo = 15;
  m.ready = true;
  m.pairs = {{1, 2}, {3, 0xFFFFFF}, 5, 16};
  const HandshakeBytes bytes = encode(m);
  HandshakeMessage read;
  REQUIRE(decode(bytes, &read) == Readable::kYes);
  CHECK(read.sender == m.sender);
  CHECK(read.pairs == m.pairs);
  CHECK(read.attempt == 14);
  CHECK(read.echo == 15);
  CHECK(read.ready);
  for (size_t i = 0; i < bytes.size() * 8; ++i) {  // every flipped bit is seen
    HandshakeBytes damaged = bytes;
    damaged[i / 8] ^= static_cast<uint8_t>(1u << (i % 8));
    CHECK(decode(damaged, &read) == Readable::kNo);
  }
  for (size_t length = 0; length < bytes.size(); ++length)
    CHECK(decode(std::span(bytes).first(length), &read) == Readable::kNo);
}

TEST_CASE("cx7 handshake: one side opens, the other follows, four messages") {
  World world(1);
  Side a(&world, 1, 10), b(&world, 2, 20);
  const uint32_t at_a = open_ok(a, b);
  for (int i = 0; i < 8; ++i) world.step();
  CHECK(joined(a, at_a, b));
  CHECK(a.ups[at_a] == 1);
  CHECK(a.board->statistics().sent + b.board->statistics().sent == 3);
  const uint32_t at_b = open_ok(b, a);  // adopts what is there
  CHECK(b.ups[at_b] == 1);
  CHECK(b.pairs.size() == 1);
}

TEST_CASE("cx7 handshake: every schedule of loss, doubles, delays and crossed opens ends joined") {
  const int schedules = 4000;
  for (int seed = 0; seed < schedules; ++seed) {
    CAPTURE(seed);
    World world(static_cast<uint64_t>(seed));
    world.lost = world.chance() * 0.6;
    world.doubled = world.chance() * 0.5;
    world.longest_delay = 1 + world.below(400);
    Switchboard::Options base;
    base.patience_ns = int64_t{600'000} * kMillisecond;  // the network gets better in the end
    Side a(&world, 1, 10, base), b(&world, 2, 20, base);
    std::map<Side*, std::vector<uint32_t>> held;
    // A random history of opens, closes and failures on both sides, while messages of all ages are under way.
    for (int act = 0, acts = 1 + static_cast<int>(world.below(12)); act < acts; ++act) {
      Side& side = world.below(2) == 0 ? a : b;
      Side& other = &side == &a ? b : a;
      std::vector<uint32_t>& mine = held[&side];
      switch (world.below(4)) {
        case 0:
        case 1:
          mine.push_back(open_ok(side, other));
          break;
        case 2:
          if (!mine.empty()) {
            side.board->close(mine.back());
            mine.pop_back();
          }
          break;
        default:
          if (!mine.empty()) side.board->fail(mine.back());
      }
      for (uint32_t steps = world.below(200); steps > 0; --steps) world.step();
    }
    // From here on one side wants the connection, and opens it again when it is told that it is down, as the engine does.
    Side& wanting = world.below(2) == 0 ? a : b;
    Side& other = &wanting == &a ? b : a;
    for (auto* side : {&a, &b}) {
      for (const uint32_t connection : held[side]) side->board->close(connection);
      side->downs.clear();
    }
    world.lost = world.doubled = 0;
    uint32_t connection = open_ok(wanting, other);
    bool done = false;
    int dead = 0;
    for (int steps = 0; steps < 40'000 && !done; ++steps) {
      world.step();
      // Requests towards queue pairs that are gone fail after the device's retries.
      dead = wanting.board->is_up(connection) && !joined(wanting, connection, other) ? dead + 1 : 0;
      if (dead == 2000) wanting.board->fail(connection);
      for (const auto& [index, loss] : std::exchange(wanting.downs, {})) {
        if (index != connection) continue;
        CHECK(loss != Loss::kUnreachable);
        wanting.board->close(connection);
        connection = open_ok(wanting, other);
      }
      done = world.letters.empty() && joined(wanting, connection, other);
    }
    REQUIRE(done);
    // Never a wrong pairing: whoever is up is bound to a pair that, if it still exists, is bound to it.
    for (const auto& [side, peer] : {std::pair{&a, &b}, std::pair{&b, &a}})
      for (const auto& [index, pair] : side->pairs)
        if (side->board->is_up(index))
          for (const auto& [theirs, found] : peer->pairs)
            if (found.ours == pair.theirs) CHECK(found.theirs == pair.ours);
  }
}

TEST_CASE("cx7 handshake: nobody there: repeated with back-off, then unreachable, once") {
  World world(3);
  Switchboard::Options base;
  base.patience_ns = 2000 * kMillisecond;
  Side a(&world, 1, 10, base);
  NicAddress nobody;
  nobody.queue_pair = 77;
  nobody.queue_key = 78;
  uint32_t connection = 0;
  REQUIRE(a.board->open(nobody, 5, world.now, &connection).ok());
  for (int i = 0; i < 4 * 3000; ++i) world.step();
  REQUIRE(a.downs.size() == 1);
  CHECK(a.downs[0].second == Loss::kUnreachable);
  CHECK(a.board->statistics().sent < 20);
  a.board->close(connection);
  CHECK(a.pairs.empty());
  CHECK_FALSE(a.board->busy());
}

TEST_CASE("cx7 handshake: a restarted engine at the same queue pair refuses who means the old one") {
  World world(4);
  Side a(&world, 1, 10), fresh(&world, 2, 21);
  NicAddress old = fresh.options.own;
  old.cookie = 20;
  uint32_t connection = 0;
  REQUIRE(a.board->open(old, 20, world.now, &connection).ok());
  for (int i = 0; i < 8; ++i) world.step();
  REQUIRE(a.downs.size() == 1);
  CHECK(a.downs[0].second == Loss::kRestarted);
  CHECK(fresh.board->statistics().foreign == 1);
}

TEST_CASE("cx7 handshake: garbage, other versions and foreign messages are counted and change nothing") {
  World world(5);
  Side a(&world, 1, 10), b(&world, 2, 20);
  std::vector<uint8_t> bytes(300);
  for (int i = 0; i < 2000; ++i) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(world.below(256));
    a.board->receive(std::span(bytes).first(world.below(300)), world.now);
  }
  CHECK(a.board->statistics().damaged == 2000);
  CHECK(a.pairs.empty());
  HandshakeMessage m;
  m.sender = b.options.own;
  m.target_cookie = 999;
  m.attempt = 1;
  m.pairs = {{5, 6}, {0, 0}, 3, 1};
  a.board->receive(encode(m), world.now);
  CHECK(a.board->statistics().foreign == 1);
  CHECK(a.pairs.empty());
}

constexpr std::string_view kAddressExample =
    "01 01 00 00 11 00 00 00 78 56 34 12 08 07 06 05 04 03 02 01 "
    "00 00 00 00 00 00 00 00 00 00 ff ff 0a 4d 00 01";
constexpr std::string_view kOfferExample =
    "74 37 58 51 01 01 01 00 01 01 00 00 11 00 00 00 "
    "78 56 34 12 08 07 06 05 04 03 02 01 00 00 00 00 "
    "00 00 00 00 00 00 ff ff 0a 4d 00 01 18 17 16 15 "
    "14 13 12 11 00 01 02 03 04 05 06 07 08 09 0a 0b "
    "0c 0d 0e 0f 28 27 26 25 24 23 22 21 38 37 36 35 "
    "34 33 32 31 03 00 00 00 00 00 00 00 02 00 00 00 "
    "00 00 00 00 21 00 00 00 22 00 00 00 c3 b2 a1 00 "
    "00 02 00 00 05 10 00 00 00 00 00 00 e1 d1 57 1a";

std::string shown(std::span<const uint8_t> bytes) {
  std::string out;
  for (const uint8_t byte : bytes) out += format(out.empty() ? "%02x" : " %02x", byte);
  return out;
}

// tests/docs/test_handshake.py sees to it that these are the same.
TEST_CASE("cx7 handshake: bytes are those of the examples in docs/handshake.md") {
  NicAddress nic;
  const uint8_t gid[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 77, 0, 1};
  std::copy(std::begin(gid), std::end(gid), std::begin(nic.gid));
  nic.queue_pair = 0x11;
  nic.queue_key = 0x12345678;
  nic.cookie = 0x0102030405060708;
  const te_nic_address address = encode(nic);
  CHECK(shown(std::span(address.bytes, address.length)) == kAddressExample);
  HandshakeMessage offer;
  offer.ready = true;
  offer.sender = nic;
  offer.target_cookie = 0x1112131415161718;
  for (uint8_t i = 0; i < 16; ++i) offer.identity[i] = i;
  offer.generation = 0x2122232425262728;
  offer.target_generation = 0x3132333435363738;
  offer.attempt = 3;
  offer.echo = 2;
  offer.pairs = {{0x21, 0x22}, {0xA1B2C3, 0x200}, 5, 16};
  CHECK(shown(encode(offer)) == kOfferExample);
}

// As a later version would say it: the places of all fields but those of the queue pairs are the same.
std::vector<uint8_t> of_version(uint8_t version, const HandshakeMessage& message) {
  const HandshakeBytes bytes = encode(message);
  std::vector<uint8_t> out(bytes.begin(), bytes.end());
  out[4] = version;
  const uint32_t sum = crc32c(std::span(out).first(out.size() - 4));
  for (size_t i = 0; i < 4; ++i) out[out.size() - 4 + i] = static_cast<uint8_t>(sum >> (8 * i));
  return out;
}

TEST_CASE("cx7 handshake: an offer of another version is refused by its attempt, and nothing else of it is answered") {
  World world(11);
  Side a(&world, 1, 10), b(&world, 2, 20);
  HandshakeMessage offer;
  offer.sender = b.options.own;
  offer.target_cookie = a.options.own.cookie;
  offer.attempt = 7;
  offer.pairs = {{5, 6}, {0, 0}, 3, 1};
  a.board->receive(of_version(2, offer), world.now);
  REQUIRE(world.letters.size() == 1);
  HandshakeMessage answer;
  REQUIRE(decode(world.letters.front().bytes, &answer) == Readable::kYes);
  CHECK(answer.kind == HandshakeKind::kRefuse);
  CHECK(answer.refusal == Refusal::kVersion);
  CHECK(answer.echo == 7);
  CHECK(answer.target_cookie == b.options.own.cookie);
  CHECK(a.pairs.empty());
  offer.kind = HandshakeKind::kRefuse;
  offer.refusal = Refusal::kVersion;
  a.board->receive(of_version(2, offer), world.now);
  offer.kind = HandshakeKind::kBye;
  a.board->receive(of_version(2, offer), world.now);
  CHECK(world.letters.size() == 1);
}

TEST_CASE("cx7 handshake: who is refused by another version says so, for the attempt that is refused") {
  World world(12);
  Side a(&world, 1, 10), b(&world, 2, 20);
  uint32_t connection = 0;
  REQUIRE(!a.board->open(b.options.own, 0, world.now, &connection));
  HandshakeMessage offer;
  REQUIRE(decode(world.letters.front().bytes, &offer) == Readable::kYes);
  HandshakeMessage refusal;
  refusal.kind = HandshakeKind::kRefuse;
  refusal.refusal = Refusal::kVersion;
  refusal.sender = b.options.own;
  refusal.target_cookie = a.options.own.cookie;
  refusal.echo = offer.attempt + 1;
  a.board->receive(of_version(2, refusal), world.now);
  CHECK(a.downs.empty());
  refusal.echo = offer.attempt;
  a.board->receive(of_version(2, refusal), world.now);
  REQUIRE(a.downs.size() == 1);
  CHECK(a.downs.front().second == Loss::kVersion);
}

TEST_CASE("cx7 handshake: strangers are bounded and forgotten; one that cannot be served is refused") {
  World world(6);
  Switchboard::Options base;
  base.most_strangers = 4;
  base.patience_ns = 100 * kMillisecond;
  Side a(&world, 1, 10, base);
  HandshakeMessage m;
  m.target_cookie = 10;
  m.pairs = {{5, 6}, {0, 0}, 3, 1};
  m.attempt = 1;
  for (uint32_t i = 0; i < 10; ++i) {
    m.sender.queue_pair = 50 + i;
    a.board->receive(encode(m), world.now);
  }
  CHECK(a.pairs.size() == 4);
  for (int i = 0; i < 4 * 200; ++i) world.step();
  CHECK(a.pairs.empty());
  CHECK_FALSE(a.board->busy());

  Side full(&world, 3, 30), asker(&world, 4, 40);
  full.refuses_pairs = true;
  open_ok(asker, full);
  for (int i = 0; i < 8; ++i) world.step();
  REQUIRE(asker.downs.size() == 1);
  CHECK(asker.downs[0].second == Loss::kFull);
}

TEST_CASE("cx7 handshake: an engine connects to itself") {
  World world(7);
  Side a(&world, 1, 10);
  const uint32_t connection = open_ok(a, a);
  CHECK(a.board->is_up(connection));
  CHECK(a.pairs.at(connection).theirs == a.pairs.at(connection).ours);
  a.board->close(connection);
  CHECK(a.pairs.empty());
}

TEST_CASE("cx7 handshake: traffic over the queue pairs is as good as the last message") {
  World world(8);
  Side a(&world, 1, 10), b(&world, 2, 20);
  open_ok(a, b);
  world.step();  // the offer arrives, b is bound
  world.step();  // a is up; its last message is lost
  world.letters.clear();
  REQUIRE_FALSE(b.board->is_up(0));
  b.board->heard(0);
  CHECK(b.board->is_up(0));
}

}  // namespace te::cx7
