"""What is installed, what is wrong with it, and which adapter each model of the release gets."""

import contextlib
import importlib.util
import io
import platform
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, kernels
from .conflicts import global_conflict
from .errors import LigerCompatError
from .reporting import explain
from .upstream import inspect_upstream


def environment() -> Iterator[tuple[str, str]]:
    """Name and state of everything that matters."""
    upstream = inspect_upstream()
    commit = f" at commit {upstream.commit}" if upstream.commit else ""
    yield "liger_compat", __version__
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    yield "transformers", f"{upstream.version}{commit}"
    yield "Triton", kernels.triton_problem() or metadata.version("triton")
    yield "devices", ", ".join(_devices())
    yield "backend", f"{kernels.choose(None, torch.device(_devices()[0].partition(' ')[0]))} on {_devices()[0]}"
    function = upstream.causal_lm_loss
    yield "loss API", "none: models compute their loss themselves" if function is None else "ForCausalLMLoss"
    yield "  settable", upstream.loss_settable.reason
    yield "  known", upstream.loss_known.reason


def problems() -> Iterator[str]:
    """What should be changed, and how."""
    if not torch.cuda.is_available() and _gpu_is_there():
        yield f"There is an NVIDIA GPU, but this torch ({torch.__version__}) cannot use it: install a CUDA build of torch."
    if torch.cuda.is_available() and (problem := kernels.triton_problem()) is not None:
        yield f'Triton cannot be loaded ({problem}): the slower reference is used. Install "liger_compat[triton]".'
    conflict = global_conflict()
    if conflict is not None:
        yield f"{conflict}. liger_compat refuses such models: undo it, or start without the library that did it."
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is None:
        yield (
            f"`import kernels` finds the folder {next(iter(spec.submodule_search_locations or ['?']))}, which some releases "
            "of transformers take for Hugging Face's kernels package: leave that folder, or use python -P."
        )


def models() -> Iterator[Any]:
    """Every language model class of the installed release, from transformers' own lists."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for name in (
        "CAUSAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "MASKED_LM",
        "IMAGE_TEXT_TO_TEXT",
        "VISION_2_SEQ",
        "SPEECH_SEQ_2_SEQ",
    ):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING", {})
        for config in list(mapping):
            classes = mapping[config]
            for cls in classes if isinstance(classes, tuple) else (classes,):
                if cls not in seen:
                    seen.add(cls)
                    yield cls


def adapter_of(cls: Any) -> tuple[str, str]:
    """Adapter of a model class, or "refused" or "unknown", and why; from a model of its default size on the meta device."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = cls(cls.config_class())
        except Exception as error:  # a default configuration that upstream cannot build, in many ways
            return "unknown", f"its default configuration cannot be built: {type(error).__name__}: {str(error)[:100]}"
    try:
        return explain(model).adapter, explain(model).choice.why
    except LigerCompatError as error:
        return "refused", str(error)


def summary(adapters: dict[str, str]) -> str:
    """How many classes get which adapter."""
    return ", ".join(f"{count} {adapter}" for adapter, count in Counter(adapters.values()).most_common())


def _devices() -> list[str]:
    found = [f"cuda ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append("xpu")
    return [*found, "cpu"]


def _gpu_is_there() -> bool:
    return Path("/proc/driver/nvidia/version").exists()
