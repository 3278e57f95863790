"""COMPATIBILITY.md is what the recorded sweeps say, and they say that nothing differs."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    """matrix is not installed; the root is on the path for as long as it is imported."""
    monkeypatch.syspath_prepend(ROOT)
    yield importlib.import_module("matrix.sweep.report")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matrix"]:
        del sys.modules[name]


def test_the_file_is_not_stale(report) -> None:
    assert report.FILE.read_text() == report.render(report.load()), "run: python -m matrix.sweep.report"


def test_nothing_differs_and_most_is_deferred(report) -> None:
    data = report.load()
    assert {"4.40.2", "4.45.2", "4.49.0", "4.57.6", "5.0.0", "5.24.0"} <= set(data)
    for release, classes in data.items():
        count = Counter(entry[0] for entry in classes.values())
        assert not count["!"], release
        built = sum(count[letter] for letter in "DdKkR")
        assert (count["D"] + count["d"]) / built >= (0.97 if release == "5.24.0" else 0.94), (release, count)
        assert all(entry[1] for entry in classes.values() if entry[0] in "RKk"), "every refusal has a reason"
