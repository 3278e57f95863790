"""What liger_compat itself says that it relies on in transformers: read from its own source, so that it cannot drift."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "liger_compat"

LOSS_CALLS = frozenset({"loss_function", "CrossEntropyLoss", "loss_fct", "cross_entropy", "nll_loss", "fixed_cross_entropy"})
"""Calls in a forward that make a loss."""

_DEFINED_IN = {
    "PreTrainedModel": ("transformers/modeling_utils.py",),
    "loss_function": ("transformers/modeling_utils.py",),
    "get_output_embeddings": ("transformers/modeling_utils.py",),
    "ForCausalLMLoss": ("transformers/loss/loss_utils.py",),
    "fixed_cross_entropy": ("transformers/loss/loss_utils.py",),
    "LOSS_MAPPING": ("transformers/loss/loss_utils.py",),
    "num_items_in_batch": ("transformers/trainer.py",),
}
"""Names of transformers that occur in liger_compat, and where upstream defines them."""

_TRAINER = frozenset({"get_batch_samples", "compute_loss", "_get_num_items_in_batch", "_prepare_inputs"})
"""What hands num_items_in_batch to a model."""


@cache
def names() -> frozenset[str]:
    """Every name, attribute and word of a string in the source of liger_compat."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(node.value.replace("'", " ").replace(".", " ").split())
    return frozenset(found)


@cache
def imports() -> frozenset[tuple[str, str]]:
    """(module, name) of everything that liger_compat imports from transformers."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "transformers":
                found.update((node.module or "", alias.name) for alias in node.names)
    return frozenset(found)


@cache
def relied_on(path: str) -> frozenset[str]:
    """Names in the file at `path` (below src/) that liger_compat relies on."""
    wanted = {name for name, files in _DEFINED_IN.items() if path in files and name in names()}
    wanted |= {name for module, name in imports() if path == f"{module.replace('.', '/')}.py"}
    if path in _DEFINED_IN["num_items_in_batch"] and "num_items_in_batch" in names():
        wanted |= _TRAINER
    return frozenset(wanted)


def rule(fact: str) -> str:
    """The part of liger_compat that a fact is about."""
    symbol, _, aspect = fact.rpartition(".")
    last = symbol.rpartition(".")[2]
    if symbol.startswith("LOSS_MAPPING"):
        return "adapters/loss_function.py: which models call ForCausalLMLoss"
    if last in ("ForCausalLMLoss", "fixed_cross_entropy"):
        return "upstream.py: what ForCausalLMLoss computes" if aspect == "body" else "upstream.py: its parameters"
    if "loss_function" in symbol:
        return "upstream.py: whether one model's loss_function can be replaced"
    if last == "get_output_embeddings":
        return "adapters/head.py: the output head"
    if last in _TRAINER:
        return "loss.py: num_items_in_batch"
    if aspect == "loss":
        return "inspection.py: how a forward makes its loss"
    if aspect == "logits":
        return "deferred/recognise.py: what is done to logits before the loss"
    if last == "forward":
        return "patching.py: the parameters of a forward"
    return "imports"
