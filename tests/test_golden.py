"""Every golden case is within its tolerance; as a table: `make golden`."""

from __future__ import annotations

import pytest

from golden_table import cases, compare

CASES = cases()


def test_all_cases_are_here() -> None:
    assert len({file.parent.name if file.is_file() else file.name for file in CASES.values()}) == 31
    assert len(CASES) == 35  # some models come in several files


@pytest.mark.parametrize("name", CASES)
def test_every_array_is_the_originals(name: str) -> None:
    rows = compare(name)
    assert rows and [row for row in rows if not row.passes] == []
