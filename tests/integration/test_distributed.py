"""Two ranks on a CPU."""

from typing import Any

import distributed_cases as cases
import pytest
import torch
from ranks import run

from families import available

DDP: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("options", DDP, ids=str)
@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_ddp(logits: str, options: dict[str, Any]) -> None:
    run(cases.ddp, "llama", logits, options)


@pytest.mark.parametrize("family", available("t5", "gemma2"))
def test_ddp_of_other_models(family: str) -> None:
    run(cases.ddp, family, "defer", {})


def test_ddp_with_another_loss() -> None:
    run(cases.ddp_auxiliary_loss)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("units", ["head in root", "head kept", "head resharded"])
def test_fsdp2(units: str, bf16: bool) -> None:
    _needs_fsdp2()
    run(cases.fsdp2, "llama", units, bf16)


def test_fsdp2_with_the_root_resharded() -> None:
    _needs_fsdp2()
    run(cases.fsdp2, "llama", "root resharded", False)


def test_fsdp2_of_an_encoder_and_decoder() -> None:
    _needs_fsdp2()
    run(cases.fsdp2, "t5", "head in root", False)


def test_fsdp2_reads_before_backward() -> None:
    _needs_fsdp2()
    run(cases.fsdp2_reads)


def test_tensor_parallel_head() -> None:
    run(cases.tensor_parallel)


def test_copies() -> None:
    run(cases.copies)


def _needs_fsdp2() -> None:
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("na: this torch has no fully_shard")
