"""Numbers of many readings."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.server.bench.summary import percentile, summarise
from treadle.server.bench.tables import summary_lines


@pytest.mark.parametrize("count", [1, 2, 5, 101])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    for percent in (0, 50, 90, 99, 100):
        assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent))


def test_a_summary_is_of_all_values_in_its_unit() -> None:
    summary = summarise([0.003, 0.001, 0.002], 1e3)
    assert summary["count"] == 3 and summary["median"] == summary["p50"] == pytest.approx(2)
    assert (summary["min"], summary["max"], summary["mean"]) == pytest.approx((1, 3, 2))


def test_nothing_is_not_zero() -> None:
    """No readings give no numbers, and a table says so."""
    assert summarise([]) == {"count": 0}
    assert "no readings" in summary_lines({"ttft": summarise([])})[1]
