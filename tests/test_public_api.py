"""The public names, and what importing them costs."""

import subprocess
import sys

import pytest

import liger_compat
from liger_compat import errors


def test_all_is_complete_sorted_and_importable() -> None:
    names = liger_compat.__all__
    assert names == sorted(names)
    assert all(getattr(liger_compat, name) is not None for name in names)
    assert set(dir(liger_compat)) == set(names)
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert defined <= set(names)


def test_every_error_is_in_the_drawn_tree() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert name in errors.__doc__
            assert value.__doc__


def test_every_public_name_is_documented() -> None:
    for name in liger_compat.__all__:
        assert getattr(liger_compat, name).__doc__


def test_import_changes_nothing_and_needs_neither_transformers_nor_triton() -> None:
    code = """
import sys, torch
before = {name: id(value) for name, value in vars(torch.nn.functional).items()}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "triton", "tqdm", "numpy_"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import liger_compat
assert {name: id(value) for name, value in vars(torch.nn.functional).items()} == before
liger_compat.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        liger_compat.nothing  # noqa: B018
