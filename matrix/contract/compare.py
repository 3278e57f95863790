"""What a change of facts means to liger_compat."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from . import shim
from .facts import Facts

KINDS = ("breaking", "behaviour", "additive", "cosmetic")
"""Gravest first. "breaking": something that is relied on is gone or means something else. "behaviour": code that liger_compat
stands in for has changed, so that only running it tells. "additive": something more. "cosmetic": no fact has changed."""


@dataclass(frozen=True)
class Change:
    """One fact that changed."""

    kind: str
    path: str
    fact: str
    what: str
    before: str
    after: str

    @property
    def rule(self) -> str:
        """The part of liger_compat that it touches."""
        return shim.rule(self.fact)


def compare(path: str, before: Facts, after: Facts) -> Iterator[Change]:
    """The changes of one file, by fact."""
    for fact in sorted({*before, *after}):
        old, new = before.get(fact), after.get(fact)
        if old == new:
            continue
        symbol, _, aspect = fact.rpartition(".")
        exists = f"{symbol.partition('.')[0]}.exists"
        if aspect != "exists" and (exists in before) != (exists in after):
            continue  # the class came or went as a whole: said once
        if old is None:
            yield Change("additive", path, fact, "added", "", str(new))
        elif new is None:
            yield Change("breaking", path, fact, "removed", old, "")
        else:
            kind, what = _judge(aspect, symbol, old, new, before, after)
            yield Change(kind, path, fact, what, old, new)


def gravest(kinds: Iterator[str]) -> str:
    """The gravest of some kinds; "cosmetic" of none."""
    return min(kinds, key=KINDS.index, default="cosmetic")


def _judge(aspect: str, symbol: str, old: str, new: str, before: Facts, after: Facts) -> tuple[str, str]:
    if aspect == "signature":
        return _signatures(old, new)
    if aspect == "body":
        added = _added(before.get(f"{symbol}.signature", ""), after.get(f"{symbol}.signature", ""))
        if _without(new, added) == _without(old, {}):
            return "additive", "does the same without its new parameters"
        return "behaviour", "another body"
    if aspect == "value":
        return "breaking", "leads to another function"
    if aspect == "loss":
        calls = [{line.partition("(")[0] for line in text.splitlines()} for text in (old, new)]
        return ("behaviour", "other arguments of the loss") if calls[0] == calls[1] else ("breaking", "another way to the loss")
    return "behaviour", "other operations on the logits"


def _signatures(old: str, new: str) -> tuple[str, str]:
    before, after = _parameters(old), _parameters(new)
    gone = [name for name in before if name not in after]
    come = [name for name in after if name not in before]
    if gone:
        return "breaking", f"without the parameter{'s' * (len(gone) > 1)} {', '.join(gone)}" + (
            f", with {', '.join(come)}" if come else ""
        )
    required = [name for name in come if after[name] is None and not name.startswith("*")]
    if required:
        return "breaking", f"needs {', '.join(required)}"
    kept = [name for name in after if name in before]
    if kept != list(before):
        return "breaking", "another order of parameters"
    if any(before[name] is not None and after[name] is None for name in before):
        return "breaking", "without a default"
    if come:
        return "additive", f"with the parameter{'s' * (len(come) > 1)} {', '.join(come)}"
    return "behaviour", "other defaults"


def _parameters(signature: str) -> dict[str, str | None]:
    """Names, in order, with the text of their defaults; `*args` and `**kwargs` under these names."""
    arguments = ast.parse(f"lambda {signature}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = {each.arg: default and ast.unparse(default) for each, default in zip(positional, defaults, strict=True)}
    if arguments.vararg:
        found[f"*{arguments.vararg.arg}"] = None
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[each.arg] = default and ast.unparse(default)
    if arguments.kwarg:
        found[f"**{arguments.kwarg.arg}"] = None
    return found


def _added(old: str, new: str) -> dict[str, str]:
    """Parameters that are new, with their defaults."""
    before = _parameters(old)
    return {name: default for name, default in _parameters(new).items() if name not in before and default is not None}


def _without(body: str, added: dict[str, str]) -> str:
    """A body as it runs when the parameters in `added` are None: `if p is None: X` is X, `if p is not None: X` nothing."""
    tree = _Default({name for name, default in added.items() if default == "None"}).visit(ast.parse(body))
    return ast.unparse(ast.fix_missing_locations(tree))


class _Default(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        self.generic_visit(node)
        test = node.test
        if (
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and test.left.id in self.names
            and len(test.ops) == 1
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
        ):
            if isinstance(test.ops[0], ast.Is):
                return node.body
            if isinstance(test.ops[0], ast.IsNot):
                return node.orelse or None
        return node
