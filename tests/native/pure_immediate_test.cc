// The 32 bits of an immediate: every field comes back for every corner value, and no field reaches into another.
#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>

#include "native/immediate.h"

namespace te {

TEST_CASE("pure: a plain immediate gives back its id and its count for all ids and corner counts") {
  for (uint32_t id = 0; id < kIdCount; ++id)
    for (const uint32_t count : {1u, 2u, 255u, 256u, 4095u, 4096u, 32768u, 65535u, 65536u}) {
      const uint32_t immediate = plain_immediate(static_cast<uint16_t>(id), count);
      if (immediate_id(immediate) != id || immediate_count(immediate) != count) FAIL("id=", id, " count=", count);
    }
}

TEST_CASE("pure: a plain immediate gives back every count") {
  for (uint32_t count = 1; count <= kMaxPagesPerImmediate; ++count)
    for (const uint32_t id : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
      const uint32_t immediate = plain_immediate(static_cast<uint16_t>(id), count);
      if (immediate_id(immediate) != id || immediate_count(immediate) != count) FAIL("id=", id, " count=", count);
    }
}

TEST_CASE("pure: a slot immediate gives back slot, parts and counter for all parts and counters") {
  for (uint32_t parts = 1; parts <= kMaxParts; ++parts)
    for (uint32_t counter = 0; counter < kMaxCounterIndex; ++counter)
      for (const uint32_t slot : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
        const uint32_t immediate = slot_immediate(static_cast<uint16_t>(slot), parts, counter);
        if (immediate_id(immediate) != slot || immediate_parts(immediate) != parts ||
            immediate_counter(immediate) != counter)
          FAIL("slot=", slot, " parts=", parts, " counter=", counter);
      }
}

}  // namespace te
