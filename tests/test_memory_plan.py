"""Gaps of the memory plan, against trying every offset."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from gpunet.memory_plan import _first_gap


@hypothesis.given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=8), st.integers(1, 9))
@hypothesis.settings(deadline=None)
def test_the_first_gap_is_the_lowest_free_offset(ranges: list[tuple[int, int]], size: int) -> None:
    blocked = [(start, start + length) for start, length in ranges]
    wanted = next(
        offset
        for offset in range(40)
        if all(offset + size <= start or stop <= offset for start, stop in blocked)
    )
    assert _first_gap(np.array(blocked, np.int64).reshape(-1, 2), size) == wanted
