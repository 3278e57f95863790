"""Training a small Llama on real text, unpatched beside patched. Needs no GPU and downloads nothing."""

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from .patching import MODES, patch
from .reporting import Report, report

VOCABULARY = 8192
"""More than the 256 bytes that occur: the logits should be what takes the memory, as in a real model."""


def english_bytes() -> Tensor:
    """English prose that every Python installation has (the topics of `help()`), as byte values in int64, about 700,000."""
    text = "\n\n".join(str(topics.topics[name]) for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(rows: int, columns: int) -> Iterator[Tensor]:
    """Consecutive pieces of the text, (rows, columns) of byte values, again and again."""
    text = english_bytes()
    pieces = text[: len(text) // (rows * columns) * rows * columns].view(-1, rows, columns)
    while True:
        yield from pieces


@dataclass(frozen=True)
class Run:
    """One training run: what it computed and what it took."""

    name: str
    losses: list[float]
    gradient_norm: float
    """Norm of all parameter gradients of the last step."""
    logits: str
    """What reading `outputs.logits` after `backward()` gives, against the unpatched run."""
    step_bytes: int
    """The most memory that the last step took, forward and backward, beyond the parameters and their optimizer."""
    report: Report | None


def run_demo(steps: int, device: str, progress: Callable[[str], None]) -> list[Run]:
    """Trains the same model unpatched and in every mode; `progress` is called with the name of the run after each step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    runs: list[Run] = []
    stock: Tensor | None = None
    for name in ("stock", *MODES):
        candidate = copy.deepcopy(model)
        if name != "stock":
            patch(candidate, logits=name)
        run, logits = _train(name, candidate, steps, stock, progress)
        stock = logits if stock is None else stock
        runs.append(run)
        gc.collect()
    return runs


def _train(
    name: str, model: Any, steps: int, stock: Tensor | None, progress: Callable[[str], None]
) -> tuple[Run, Tensor | None]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, ids in zip(range(steps), batches(4, 128), strict=False):
        batch = ids.to(device)
        last = step == steps - 1
        output: Any = None  # freed here, not while memory is measured
        optimizer.zero_grad()
        with peak_memory(device) if last else nullcontext(int) as peak:
            output = model(input_ids=batch, labels=batch)
            output.loss.backward()
        losses.append(output.loss.item())
        if not last:  # the last step is only looked at
            optimizer.step()
        progress(name)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    logits = None if name == "overwrite" else output.logits.detach()
    if stock is None:
        state = "the model's scores"
    elif logits is None:
        state = _read(output)
    else:
        state = f"the model's scores (off by {(logits - stock).abs().max():.1e} at most)"
    served = None if name == "stock" else report(model)
    return Run(name, losses, norm, state, peak(), served), logits


def _read(output: Any) -> str:
    try:
        output.logits.sum()
    except RuntimeError as error:
        return f"{type(error).__name__}, as promised"
    return "readable: this is a bug"


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields what tells, afterwards, the most memory that was allocated inside, in bytes: on a CUDA device, else on the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr(), warnings.catch_warnings():  # the profiler's C++ part logs its start and stop
        warnings.simplefilter("ignore")
        profile.start()
    try:
        yield lambda: _peak(profile.profiler.kineto_results.events())
    finally:
        with _quiet_stderr():
            profile.stop()


def _peak(events: Any) -> int:
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    saved = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
