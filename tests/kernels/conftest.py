"""Both backends, and memory that shows what was not written."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from liger_compat import kernels


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "triton" and (problem := kernels.device_problem(device.type)) is not None:
        pytest.skip(f"na: {problem}")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _interpreter_rounds() -> Iterator[None]:
    """Triton's interpreter truncates FP32 to BF16, where every GPU rounds to nearest; errors here shall be those of a GPU."""
    if kernels.device_problem("cpu") is not None:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(rounded, target.scalar)
        return original(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("cast_impl", "create_fp_trunc"):
            patch.setattr(InterpreterBuilder, name, cast_impl)
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin return NaN: a kernel that leaves a place unwritten is found out."""
    _device_constructors()  # cached for the whole process: the true ones, not those below
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return call
