"""Which implementation computes a call. The only place that asks whether Triton is here."""

import importlib
import os
from functools import cache
from types import ModuleType

import torch

from . import reference

BACKENDS = ("triton", "reference")
"""The implementations, in order of preference."""

_TRITON_DEVICES = ("cuda", "xpu")  # ROCm builds of PyTorch call their devices cuda


@cache
def triton_problem() -> str | None:
    """Why the Triton kernels cannot be loaded in this process, or None when they can."""
    try:
        _launchers()
    except Exception as error:  # Triton fails to import in many ways (missing driver, version clash), all final here
        return f"{type(error).__name__}: {error}"
    return None


def device_problem(device_type: str) -> str | None:
    """Why the Triton kernels cannot run on a kind of device, or None when they can."""
    problem = triton_problem()
    if problem is not None:
        return f'Triton cannot be loaded ({problem}); install "liger_compat[triton]"'
    if device_type not in _TRITON_DEVICES and not _interpreting():
        return f"Triton does not run on {device_type!r} devices, only in its interpreter (TRITON_INTERPRET=1)"
    return None


def choose(requested: str | None, device: torch.device) -> str:
    """Name of the backend for tensors on `device`: the one asked for, else the first that runs there.

    The environment variable LIGER_COMPAT_BACKEND asks for one where the argument is None.

    Raises:
        ValueError: if an unknown backend is asked for.
        RuntimeError: if the backend asked for cannot run on `device`; nothing falls back silently.
    """
    requested = _requested(requested)
    if requested is None:
        # On a CPU the interpreter must be asked for: it is a way to test the kernels, thousands of times slower.
        return "triton" if device.type in _TRITON_DEVICES and device_problem(device.type) is None else "reference"
    if requested == "triton":
        problem = device_problem(device.type)
        if problem is not None:
            raise RuntimeError(_unavailable(problem))
    return requested


def check_request(requested: str | None) -> None:
    """Raises as `choose` does if the backend asked for can run on no device of this machine."""
    if _requested(requested) == "triton":
        devices = [device for device in _TRITON_DEVICES if getattr(torch, device).is_available()]
        problems = [device_problem(device) for device in devices or ["cpu"]]
        if None not in problems:
            raise RuntimeError(_unavailable(str(problems[0])))


def _requested(requested: str | None) -> str | None:
    source = "backend"
    if requested is None:
        source, requested = "LIGER_COMPAT_BACKEND", os.environ.get("LIGER_COMPAT_BACKEND") or None
    if requested is not None and requested not in BACKENDS:
        msg = f"expected {source} to be one of {', '.join(map(repr, BACKENDS))} or None, found {requested!r}"
        raise ValueError(msg)
    return requested


def _unavailable(problem: str) -> str:
    return f'backend "triton" was asked for, but {problem}. Use backend=None to choose what runs here.'


def load(requested: str | None, device: torch.device) -> ModuleType:
    """The implementation for tensors on `device`: `reference`, or the launchers of the Triton kernels."""
    if choose(requested, device) == "reference":
        return reference
    return _launchers()


@cache
def _launchers() -> ModuleType:
    return importlib.import_module("._launch", __package__)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
