"""Arranges the loops of a fused function: elementwise steps inline, and what needs whole rows computed row by row.

    before: square all rows; sum all rows; scale all rows         after: for each row: sum of squares; scaled row

Sums stay in their order and nothing is vectorised by hand: LLVM does that, for pointers of any alignment.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir


def arrange(function: Any) -> Any:
    """The function with other loops and the same results. Rows are the outermost loop of its last step."""
    schedule = s_tir.Schedule(function)
    root = schedule.get_sblock("root")
    outputs = [_name(schedule, block) for block in schedule.get_output_blocks(root)]
    for block in schedule.get_child_blocks(root):
        if _name(schedule, block) not in outputs and _elementwise(schedule, block):
            schedule.compute_inline(block)
    *earlier, last = schedule.get_child_blocks(root)
    if not earlier or outputs != [_name(schedule, last)]:
        return schedule.mod["main"].with_attrs(function.attrs)
    row = schedule.get_loops(last)[0]
    for block in reversed(earlier):
        schedule.compute_at(block, row)
    return schedule.mod["main"].with_attrs(function.attrs)


def _name(schedule: Any, block: Any) -> str:
    return str(schedule.get(block).name_hint)


def _elementwise(schedule: Any, block: Any) -> bool:
    """Whether no iteration of the block is summed over."""
    return all(int(item.iter_type) == _DATA_PARALLEL for item in schedule.get(block).iter_vars)


_DATA_PARALLEL = 0
