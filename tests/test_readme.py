"""The README tells the truth."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def load(name: str) -> ModuleType:
    """A module of matrix/, which is not installed."""
    spec = importlib.util.spec_from_file_location(f"matrix_{name}", ROOT / "matrix" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_support_table_is_that_of_the_pins() -> None:
    pins = load("pins")
    table = re.search(r"<!-- pins -->\n(.*)<!-- /pins -->", README, flags=re.DOTALL).group(1)
    assert table == pins.table(pins.load()), "run: python -m matrix.pins"


def test_the_two_commands_are_those_of_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in re.findall(r"^pip install nox && (nox -s \w+)$", README, flags=re.MULTILINE):
        assert command in script
