"""`python -m matrix.sweep.run OUT.json`: patches every language model class of the release and compares with stock."""

import argparse
import copy
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import liger_compat

from .batch import batch_of
from .tiny import TooBigError, tiny_model

CLASSES = re.compile(
    r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining|WithLMHeadModel|DoubleHeadsModel)$"
)
LOSS, GRADIENTS = 1e-5, 1e-4
"""Relative bounds: of the loss, and of each gradient against it plus a thousandth of all."""


@dataclass
class Result:
    """What became of one class."""

    name: str
    outcome: str
    """"match", "refused", "differs", "not built" (upstream cannot build it tiny), "no token loss"."""
    why: str = ""
    adapter: str = ""
    deferred: bool = False
    """Whether the loss was computed without the logits."""
    kernel_losses: int = 0


def classes() -> Iterator[tuple[str, Any]]:
    """Every matching class of the installed release's modelling files, with its module's name; exported or not."""
    root = Path(transformers.__file__).parent / "models"
    for module in sorted(pkgutil.walk_packages([str(root)], "transformers.models."), key=lambda m: m.name):
        file = module.name.rpartition(".")[2]
        if not file.startswith("modeling_") or file.startswith(("modeling_tf_", "modeling_flax_")) or ".auto." in module.name:
            continue
        short = module.name.removeprefix("transformers.models.").rpartition(".")[0]
        try:
            loaded = importlib.import_module(module.name)
        except Exception as error:  # a model that needs a package which is not here
            yield f"{short}.*", error
            continue
        for name, cls in vars(loaded).items():
            if not inspect.isclass(cls) or cls.__module__ != module.name or not issubclass(cls, transformers.PreTrainedModel):
                continue
            if CLASSES.search(name) and "PreTrainedModel" not in name:
                yield f"{short}.{name}", cls


def check(name: str, cls: Any) -> Result:
    """Builds, trains for a step, patches and compares one class."""
    if isinstance(cls, Exception):
        return Result(name, "not built", _line(cls))
    try:
        model = tiny_model(cls)
        if "labels" not in inspect.signature(model.forward).parameters:
            return Result(name, "no token loss", "its forward takes no labels")
        batch = batch_of(model)
        stock = copy.deepcopy(model)
        expected = _step(stock, batch)
    except (TooBigError, Exception) as error:
        return Result(name, "not built", _line(error))
    if expected is None:
        return Result(name, "no token loss", "it computes no loss from labels alone")
    try:
        liger_compat.patch(model)
    except liger_compat.UnsupportedModelError as error:
        return Result(name, "refused", str(error).partition(". ")[2].removesuffix(" Nothing was changed."))
    found = _step(model, batch)
    report = liger_compat.report(model)
    why = _difference(found, expected, model, stock, report)
    deferred = report.counters.fused == 1
    note = why or report.choice.logits_why or "; ".join([*report.counters.materialised, *report.counters.stepped_aside])
    return Result(name, "differs" if why else "match", note, report.adapter, deferred, report.counters.kernel_losses)


def _step(model: Any, batch: dict[str, Any]) -> Any:
    torch.manual_seed(1)  # dropout
    output = model(**batch)
    loss = output.loss if hasattr(output, "loss") else output[0]
    if loss is None:
        return None
    loss.backward()
    return output, loss


def _difference(found: Any, expected: Any, model: Any, stock: Any, report: Any) -> str:
    """What differs, or nothing."""
    (output, loss), (stock_output, stock_loss) = found, expected
    if report.counters.kernel_losses != 1:
        return f"{report.counters.kernel_losses} losses by the kernel"
    if (loss.dtype, loss.shape) != (stock_loss.dtype, stock_loss.shape) or abs(loss - stock_loss) > LOSS * abs(stock_loss):
        return f"loss {loss} instead of {stock_loss}"
    norms = [p.grad.norm() for p in stock.parameters() if p.grad is not None]
    total = torch.stack(norms).norm()
    for (name, theirs), ours in zip(stock.named_parameters(), model.parameters(), strict=True):
        if (theirs.grad is None) != (ours.grad is None):
            return f"gradient of {name} {'missing' if ours.grad is None else 'too many'}"
        if theirs.grad is not None and (ours.grad - theirs.grad).norm() > GRADIENTS * (theirs.grad.norm() + 1e-3 * total):
            return f"gradient of {name}"
    logits, stock_logits = (getattr(each, "logits", None) for each in (output, stock_output))
    if isinstance(stock_logits, Tensor) and not torch.equal(logits, stock_logits):
        return "logits"
    return ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:200]


def main() -> int:
    """Writes the results; fails if a class differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--match", default="", help="only classes whose name contains this")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = [pair for pair in tqdm(classes(), desc="importing") if options.match in pair[0]]
    results = [check(name, cls) for name, cls in tqdm(found, desc=f"transformers {transformers.__version__}", unit="class")]
    data = {"transformers": transformers.__version__, "results": [asdict(result) for result in results]}
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    print(
        Counter(result.outcome for result in results),
        Counter(result.deferred for result in results if result.outcome == "match"),
    )
    for result in results:
        if result.outcome == "differs":
            print(f"DIFFERS {result.name}: {result.why}")
    return int(any(result.outcome == "differs" for result in results))


if __name__ == "__main__":
    sys.exit(main())
