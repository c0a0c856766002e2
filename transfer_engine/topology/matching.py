"""Balanced assignment at least cost. Pure.

`spread` gives every item to one holder, so that the numbers of items per holder differ by at most one and the sum of
the costs is as small as it can be. The core is the Hungarian method with potentials (Kuhn 1955, in the O(n^3) form of
Jonker and Volgenant 1987); n is the number of NICs of one machine.
"""

from __future__ import annotations

from collections.abc import Callable

_FIRST = 4  # weight of a holder's first item over its later ones: everybody gets one near item before anybody gets two


def spread(items: int, holders: int, cost: Callable[[int, int], int]) -> list[int]:
    """Which holder gets each item.

    Args:
        items: how many; any number when there is at least one holder.
        holders: how many.
        cost: of giving item i to holder h; at least zero.

    Returns:
        The holder of each item. Of solutions that cost the same it is always the same one.
    """
    if items == 0:
        return []
    base, extra = divmod(items, holders)
    table = [[cost(item, holder) for holder in range(holders)] for item in range(items)]
    over = 1 + _FIRST * items * (1 + max(map(max, table)))  # one item too many costs more than all else together
    slots = [(holder, place) for place in range(base + bool(extra)) for holder in range(holders)]
    weighted = [(holder, 1 if place else _FIRST, over if place >= base else 0) for holder, place in slots]
    rows = [[costs[holder] * weight + more for holder, weight, more in weighted] for costs in table]
    return [slots[column][0] for column in _assign(rows)]


def _assign(rows: list[list[int]]) -> list[int]:
    """The column of each row; at least as many columns as rows. As in the literature, indices start at 1; 0 is none."""
    height, width = len(rows), len(rows[0])
    infinite = 1 << 62
    row_potential = [0] * (height + 1)
    column_potential = [0] * (width + 1)
    row_of = [0] * (width + 1)
    for row in range(1, height + 1):
        row_of[0] = row
        column = 0
        least = [infinite] * (width + 1)
        came_from = [0] * (width + 1)
        used = [False] * (width + 1)
        while row_of[column] != 0:
            used[column] = True
            current, step, following = row_of[column], infinite, 0
            for candidate in range(1, width + 1):
                if used[candidate]:
                    continue
                reduced = rows[current - 1][candidate - 1] - row_potential[current] - column_potential[candidate]
                if reduced < least[candidate]:
                    least[candidate], came_from[candidate] = reduced, column
                if least[candidate] < step:
                    step, following = least[candidate], candidate
            for candidate in range(width + 1):
                if used[candidate]:
                    row_potential[row_of[candidate]] += step
                    column_potential[candidate] -= step
                else:
                    least[candidate] -= step
            column = following
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    result = [0] * height
    for column in range(1, width + 1):
        if row_of[column]:
            result[row_of[column] - 1] = column - 1
    return result
