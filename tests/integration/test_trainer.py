"""transformers' Trainer over a patched model and over its unpatched twin: the same losses, metrics and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_compat
from compare import BOUNDS, distances
from families import available, build
from liger_compat.demo import batches

pytest.importorskip("accelerate", reason="na: accelerate is not installed")
from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = available("llama", "gemma2", "cohere", "mixtral", "t5", "llava")


def dataset(count: int) -> list[dict[str, Tensor]]:
    """Pieces of text, their labels masked unevenly."""
    rows = []
    for number, piece in zip(range(count), batches(1, 24), strict=False):
        labels = piece[0].clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": piece[0], "labels": labels})
    return rows


def train(model: nn.Module, folder: Path, *, trainer: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Trains, then evaluates; returns the trainer and the metrics."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        logging_steps=1,
        max_steps=3,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        dataloader_num_workers=0,
        seed=0,
        **options,
    )
    found = Trainer(model, arguments, train_dataset=dataset(24), eval_dataset=dataset(12), **(trainer or {}))
    found.train()
    return found, found.evaluate()


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(
    family: str,
    folder: Path,
    *,
    logits: str = "defer",
    trainer: dict[str, Any] | None = None,
    bound: float = 0.0,
    **options: Any,
) -> liger_compat.Report:
    """Trains both; everything that is logged and every weight is the same."""
    stock = build(family)
    model = liger_compat.patch(build(family), logits=logits)
    expected, expected_metrics = train(stock, folder / "stock", trainer=trainer, **options)
    found, found_metrics = train(model, folder / "patched", trainer=trainer, **options)
    bound = bound or (BOUNDS[torch.bfloat16].loss if options.get("bf16") else 1e-4)  # losses are logged with four digits
    assert len(losses(found)) == 3
    assert losses(found) == pytest.approx(losses(expected), rel=bound)
    names = {name for name in expected_metrics if not name.endswith(("runtime", "per_second"))}
    for name in names:
        assert found_metrics[name] == pytest.approx(expected_metrics[name], rel=bound), name
    weights, wanted = dict(model.named_parameters()), dict(stock.named_parameters())
    assert distances(weights, wanted) < (BOUNDS[torch.bfloat16].tensors if options.get("bf16") else 1e-4)
    assert found.model_accepts_loss_kwargs == expected.model_accepts_loss_kwargs
    return liger_compat.report(model)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_computes_no_logits(family: str, bf16: bool, accumulation: int, tmp_path: Path) -> None:
    options = {"bf16": bf16, "gradient_accumulation_steps": accumulation, "prediction_loss_only": True}
    report = compare(family, tmp_path, **options)
    counters = report.counters
    assert counters.fused == counters.kernel_losses == 3 * accumulation + 3
    assert not counters.materialised, counters
    assert not counters.stepped_aside, counters


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    guessed, labels = logits[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean()), "spread": float(np.std(logits))}


@pytest.mark.parametrize("logits", ["defer", "keep"])
@pytest.mark.parametrize("how", ["at the end", "in steps", "preprocessed"])
@pytest.mark.parametrize("family", available("llama", "t5"))
def test_metrics(family: str, how: str, logits: str, tmp_path: Path) -> None:
    """Then the logits of evaluation are computed, and the metrics are those of stock."""
    trainer: dict[str, Any] = {"compute_metrics": accuracy}
    if how == "preprocessed":
        trainer["preprocess_logits_for_metrics"] = lambda scores, labels: (
            (scores[0] if isinstance(scores, tuple) else scores) / 2
        )
    options = {"eval_accumulation_steps": 1} if how == "in steps" else {}
    report = compare(family, tmp_path, logits=logits, trainer=trainer, **options)
    assert report.counters.kernel_losses == 3 + 3
    if logits == "defer":
        assert sum(report.counters.materialised.values()) == 3


def test_label_smoothing(tmp_path: Path) -> None:
    """Trainer computes that loss from the logits itself, which are computed for it."""
    report = compare("llama", tmp_path, label_smoothing_factor=0.1, prediction_loss_only=True)
    assert sum(report.counters.materialised.values()) >= 3


def test_a_loss_of_the_trainer(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        scores = outputs.logits[:, :-1].float()
        total = F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum())

    report = compare("llama", tmp_path, trainer={"compute_loss_func": loss}, prediction_loss_only=True)
    assert report.counters.fused >= 3
    assert not report.counters.materialised


OPTIONS = [
    {"gradient_checkpointing": True},
    {"neftune_noise_alpha": 5.0},
    {"auto_find_batch_size": True},
    {"max_grad_norm": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    report = compare("llama", tmp_path, prediction_loss_only=True, **options)
    assert not report.counters.materialised


def test_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    results = []
    for name in ("stock", "patched"):
        model = build("llama") if name == "stock" else liger_compat.patch(build("llama"))
        arguments = {"output_dir": str(tmp_path / name), "use_cpu": True, "report_to": [], "save_steps": 2, "logging_steps": 1}
        trainer = Trainer(model, TrainingArguments(max_steps=2, **arguments), train_dataset=dataset(24))
        trainer.train()
        fresh = build("llama") if name == "stock" else liger_compat.patch(build("llama"))
        trainer = Trainer(fresh, TrainingArguments(max_steps=4, **arguments), train_dataset=dataset(24))
        trainer.train(resume_from_checkpoint=True)
        results.append((losses(trainer), dict(fresh.named_parameters())))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    assert distances(results[1][1], results[0][1]) < 1e-4
