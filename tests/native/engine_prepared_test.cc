// Prepared transfers: each post is a transfer of its own, of what the source holds then.
#include "tests/native/engine_support.h"

namespace te::engine_test {

TEST_CASE("engine: a prepared write or page list is posted many times") {
  for (const Setup& setup : all_setups()) {
    CAPTURE(setup.text());
    Pair pair(setup);
    te_handle write = TE_NONE, pages = TE_NONE;
    const te_write_args w{pair.source.region, pair.remote, pair.remote_counter, 0, 100, 20000, 3000};
    REQUIRE(te_prepare_write(pair.writer.engine, &w, &write, &pair.writer.error) == TE_OK);
    std::vector<int32_t> from{3, 1, 2}, to{9, 7, 8};
    te_page_args p{};
    p.region = pair.source.region;
    p.remote = pair.remote;
    p.counter = pair.remote_counter;
    p.source_stride = p.target_stride = p.page_bytes = 1024;
    p.count = 3;
    p.source = from.data();
    p.target = to.data();
    p.source_index_bytes = p.target_index_bytes = 4;
    REQUIRE(te_prepare_pages(pair.writer.engine, &p, &pages, &pair.writer.error) == TE_OK);
    from.assign(3, 0);  // taken at the call
    for (uint64_t round = 1; round <= 10; ++round) {
      Transfer first = pair.writer.post(write), second = pair.writer.post(pages);
      require_ok(std::move(first));
      require_ok(std::move(second));
      CHECK(pair.owner.counted(pair.counter, 4 * round));
      CHECK(pair.landed(100, 20000, 3000));
      CHECK(pair.landed(3 * 1024, 9 * 1024, 1024));
      CHECK(pair.landed(1024, 7 * 1024, 1024));
      pair.target.poison();
    }
    CHECK(te_prepared_close(pair.writer.engine, pages, &pair.writer.error) == TE_OK);
    // Closing the source refuses what was prepared.
    CHECK(pair.writer.close(pair.source) == TE_OK);
    CHECK(pair.writer.post(write).result() == TE_ERR_REGION_CLOSED);
    CHECK(pair.writer.idle());
  }
}

}  // namespace te::engine_test
