"""matrix/ is not installed: it is imported from the root, for these tests only."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the package matrix."""
    monkeypatch.syspath_prepend(ROOT)
    yield lambda name: importlib.import_module(f"matrix.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matrix"]:
        del sys.modules[name]
