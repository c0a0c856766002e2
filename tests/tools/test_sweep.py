from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_engine.tools import sweep
from transfer_engine.tools.sweep import GUARD_BYTES, Case

MIB = 1 << 20


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    operation = draw(st.sampled_from(sweep.OPERATIONS))
    paged = operation == "pages"
    size = draw(st.integers(1 if paged else 0, 300))
    return Case(
        operation,
        size,
        draw(st.integers(1, 40)),
        growth_bytes=0 if paged else draw(st.integers(0, 20)),
        source_offset=draw(st.integers(0, 50)),
        target_offset=draw(st.integers(0, 50)),
        source_stride=size + draw(st.integers(0, 9)) if paged else None,
        target_stride=size + draw(st.integers(0, 9)) if paged else None,
        index_bytes=draw(st.sampled_from([4, 8])),
        seed=draw(st.integers(0, 1 << 60)),
    )


@given(any_case())
def test_segments_cover_the_target_window_once(case: Case) -> None:
    position = 0
    found: list[int] = []
    for part in sweep.segments(case):
        assert part.start == position
        assert part.length > 0 or part.piece is not None
        position += part.length
        if part.piece is not None:
            found.append(part.piece)
            piece = sweep.pieces(case)[part.piece]
            assert (part.start, part.length, part.pattern_start) == (piece.target, piece.length, piece.source)
    assert position == sweep.spans(case)[1]
    assert sorted(found) == list(range(case.count))


@given(any_case())
def test_guards_stand_before_and_behind_every_target(case: Case) -> None:
    parts = list(sweep.segments(case))
    assert parts[0].piece is None
    assert parts[0].length >= GUARD_BYTES
    assert parts[-1].piece is None
    assert parts[-1].length == GUARD_BYTES
    if not case.is_paged:
        assert all(one.piece is None or other.piece is None for one, other in itertools.pairwise(parts))


@given(any_case())
def test_pieces_stay_within_the_spans_and_add_up(case: Case) -> None:
    listed = sweep.pieces(case)
    assert sum(piece.length for piece in listed) == case.payload_bytes
    source, target = sweep.spans(case)
    assert all(case.source_offset <= piece.source <= piece.source + piece.length <= source for piece in listed)
    assert all(piece.target + piece.length + GUARD_BYTES <= target for piece in listed)


@given(any_case())
def test_a_case_survives_its_journey(case: Case) -> None:
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


@given(st.integers(1, 200), st.integers(0, 1 << 60))
def test_page_tables_hold_distinct_slots_and_leave_some_out(count: int, seed: int) -> None:
    for table in sweep.page_tables(Case("pages", 8, count, seed=seed)):
        assert len(set(table)) == len(table) == count
        assert max(table) < count + max(1, count // 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "erase", "size_bytes": 1},
        {"operation": "write", "size_bytes": -1},
        {"operation": "write", "size_bytes": 1.5},
        {"operation": "write", "size_bytes": True},
        {"operation": "write", "size_bytes": 1, "count": 0},
        {"operation": "write", "size_bytes": 1 << 62},
        {"operation": "pages", "size_bytes": 0},
        {"operation": "pages", "size_bytes": 8, "target_stride": 7},
        {"operation": "pages", "size_bytes": 8, "index_bytes": 2},
    ],
)
def test_foreign_cases_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"case|pages|proportion"):
        Case.from_dict(fields)


@pytest.mark.parametrize("quick", [True, False])
def test_the_plan_has_every_operation_and_no_seed_twice(quick: bool) -> None:
    cases = [case for row in sweep.plan(quick=quick) for case in row.cases]
    assert {case.operation for case in cases} == set(sweep.OPERATIONS)
    assert len({case.seed for case in cases}) == len(cases)
    assert any(case.source_offset % 2 and case.target_offset % 2 for case in cases)
    assert {case.index_bytes for case in cases if case.is_paged} == {4, 8}
    assert any(case.is_paged and case.target_step % 2 for case in cases)
    messages = [case for case in cases if case.operation == "message"]
    assert min(case.size_bytes for case in messages) == 0
    assert max(case.size_bytes for case in messages) == MIB


def test_the_full_plan_writes_every_power_of_two_and_its_neighbours() -> None:
    sizes = {case.size_bytes for row in sweep.plan(quick=False) for case in row.cases if case.operation == "write"}
    assert {0, *(1 << i for i in range(27))} <= sizes
    assert {(1 << i) + 1 for i in range(2, 25, 2)} <= sizes
    assert {(1 << i) - 1 for i in range(4, 27, 2)} <= sizes


def test_a_plan_for_slow_networks_leaves_out_what_moves_more_and_keeps_the_rest() -> None:
    full, bounded = sweep.plan(quick=True), sweep.plan(quick=True, most_bytes=1 << 18)
    heads = [row.head.payload_bytes for row in bounded]
    assert heads == [row.head.payload_bytes for row in full if row.head.payload_bytes <= 1 << 18]
    assert {row.head.operation for row in bounded} == set(sweep.OPERATIONS)
    assert sweep.buffer_bytes(bounded)[0] < 1 << 19


def test_all_cases_fit_into_the_buffers() -> None:
    rows = sweep.plan(quick=False)
    source, target = sweep.buffer_bytes(rows)
    for row in rows:
        for case in row.cases:
            need = sweep.spans(case)
            assert need[0] <= source
            assert need[1] <= target
    assert target < 70 * MIB
