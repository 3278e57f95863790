"""The table of field reports names tests that exist, and every report's test is in the table."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS / "field_reports" / "README.md").read_text()


def test_every_named_test_exists() -> None:
    for row in re.findall(r"^\| (R\d+) .*$", TABLE, flags=re.MULTILINE):
        line = next(line for line in TABLE.splitlines() if line.startswith(f"| {row} "))
        file = ""
        names = re.findall(r"`([^`]*)::(\w+)`", line)
        assert names, f"{row} has neither a test nor a reason"
        for where, name in names:
            file = where or file
            path = TESTS.parent / file if file.startswith("tests/") else TESTS / "field_reports" / file
            assert f"def {name}(" in path.read_text(), f"{row}: {path} has no {name}"


def test_every_test_is_in_the_table() -> None:
    for file in (TESTS / "field_reports").glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"test_r\d+", node.name):
                assert node.name in TABLE, f"{file.name}::{node.name} is not in the table"
