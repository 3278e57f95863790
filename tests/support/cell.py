"""The cell of the matrix that these tests run in: first of all it must be the cell it claims to be."""

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import liger_compat
from liger_compat import kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def cell() -> dict[str, Any]:
    """What nox says that it set up; empty when pytest is run by hand."""
    claimed: dict[str, Any] = json.loads(os.environ.get("LIGER_COMPAT_CELL", "{}"))
    found = {
        "transformers": transformers.__version__,
        "commit": _direct_url("transformers").get("vcs_info", {}).get("commit_id"),
        "torch": torch.__version__.partition("+")[0],
        "backend": kernels.choose(None, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "wheel": _direct_url("liger_compat").get("archive_info", {}).get("hashes", {}).get("sha256"),
    }
    wrong = {key: (claimed[key], found[key]) for key in claimed if claimed[key] != found[key]}
    if wrong:
        pytest.exit(f"this is not the cell it claims to be; claimed and found: {wrong}", returncode=3)
    if claimed and ROOT in Path(liger_compat.__file__).parents and ".nox" not in Path(liger_compat.__file__).parts:
        pytest.exit(f"the checkout is tested, not the wheel: {liger_compat.__file__}", returncode=3)
    return found


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _direct_url(name: str) -> dict[str, Any]:
    text = metadata.distribution(name).read_text("direct_url.json")
    return json.loads(text) if text else {}
