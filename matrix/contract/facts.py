"""Facts about one source file of transformers, as text that can be compared: what it promises to liger_compat.

A fact is named `symbol.aspect`. Formatting, comments, docstrings and annotations are no part of any.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from . import shim

Facts = dict[str, str]

LANGUAGE_MODEL = re.compile(
    r"\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining|DoubleHeadsModel)"
)
# A class of a module: its line, and all that follow to the next one that begins something else.
_CLASS = re.compile(r"^class (\w+).*\n(?:(?:[ \t)#].*)?\n)*", re.MULTILINE)


def of_file(path: str, source: str) -> Facts:
    """The facts of the file at `path` (below src/); empty where liger_compat relies on nothing in it.

    Raises:
        SyntaxError: if it is not valid Python.
    """
    if path.rpartition("/")[2].startswith("modeling_") and "/models/" in path:
        return _of_models(source)
    names = shim.relied_on(path)
    return _of_symbols(source, names) if names else {}


def is_relevant(path: str) -> bool:
    """Whether `of_file` can find facts in the file at `path`."""
    name = path.rpartition("/")[2]
    is_model = "/models/" in path and name.startswith("modeling_") and not name.startswith(("modeling_tf_", "modeling_flax_"))
    return path.endswith(".py") and (is_model or bool(shim.relied_on(path)))


def _of_symbols(source: str, names: frozenset[str]) -> Facts:
    facts: Facts = {}
    for node in ast.parse(source).body:
        for name, found in _definitions(node):
            if name == "LOSS_MAPPING" and isinstance(found, ast.Dict):
                for key, value in zip(found.keys, found.values, strict=True):
                    if key is not None:
                        facts[f"LOSS_MAPPING[{ast.unparse(key)}].value"] = ast.unparse(value)
            elif name in names:
                facts |= _of_function(name, found) if isinstance(found, ast.FunctionDef) else {f"{name}.exists": "yes"}
            if isinstance(found, ast.ClassDef):
                facts |= _of_members(found, names)
    return facts


def _definitions(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Names that a statement of a module binds, with what to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.ImportFrom | ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name, node
    elif isinstance(node, ast.If | ast.Try):
        for child in node.body:
            yield from _definitions(child)


def _of_members(cls: ast.ClassDef, names: frozenset[str]) -> Facts:
    facts: Facts = {}
    for member in cls.body:
        if not isinstance(member, ast.FunctionDef) or member.name not in names:
            continue
        # A property and its setter have one name.
        decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
        setter = any(decorator.endswith(".setter") for decorator in decorators)
        name = f"{cls.name}.{member.name}{'.setter' if setter else ''}"
        facts |= _of_function(name, member)
        if "property" in decorators:
            facts[f"{name}.property"] = "yes"
    return facts


def _of_models(source: str) -> Facts:
    """Facts of every language model class. Only their own text is parsed: a file is long, and few of its lines matter."""
    facts: Facts = {}
    for match in _CLASS.finditer(f"{source}\n"):
        if LANGUAGE_MODEL.fullmatch(match.group(1)):
            try:
                facts |= _of_model(match.group().rstrip())
            except SyntaxError:  # text at the left margin, in a string of the class
                whole = next(node for node in ast.parse(source).body if getattr(node, "name", "") == match.group(1))
                facts |= _of_model(ast.unparse(whole))
    return facts


@lru_cache(maxsize=100_000)
def _of_model(text: str) -> Facts:
    cls = ast.parse(text).body[0]
    if not isinstance(cls, ast.ClassDef):  # pragma: no cover  # the text begins with `class`
        return {}
    members = {member.name: member for member in cls.body if isinstance(member, ast.FunctionDef)}
    facts = {f"{cls.name}.exists": "yes"}
    if "get_output_embeddings" in members:
        facts[f"{cls.name}.get_output_embeddings.body"] = _body(members["get_output_embeddings"])
    forward = members.get("forward")
    if forward is not None:
        facts[f"{cls.name}.forward.signature"] = _signature(forward)
        facts[f"{cls.name}.forward.loss"] = _route(forward)
        facts[f"{cls.name}.forward.logits"] = _logits(forward)
    return facts


def _of_function(name: str, node: ast.FunctionDef) -> Facts:
    return {f"{name}.signature": _signature(node), f"{name}.body": _body(node)}


def _signature(node: ast.FunctionDef) -> str:
    """Parameters and their defaults."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(each.arg) for each in node.args.posonlyargs],
        args=[ast.arg(each.arg) for each in node.args.args],
        vararg=node.args.vararg and ast.arg(node.args.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in node.args.kwonlyargs],
        kw_defaults=node.args.kw_defaults,
        kwarg=node.args.kwarg and ast.arg(node.args.kwarg.arg),
        defaults=node.args.defaults,
    )
    return ast.unparse(bare)


def _body(node: ast.FunctionDef) -> str:
    statements = node.body
    if statements and isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
        statements = statements[1:]
    return "\n".join(ast.unparse(_Bare().visit(statement)) for statement in statements)


class _Bare(ast.NodeTransformer):
    """Drops what changes no result: annotations, and what is said to loggers and in warnings."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        said = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(("logger.", "warnings.warn"))
        return ast.copy_location(ast.Pass(), node) if said else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def _route(forward: ast.FunctionDef) -> str:
    """The calls that make the loss, with their arguments: by the loss API, inline, or by a model inside that has the labels."""
    found = set()
    for node in ast.walk(forward):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if last in shim.LOSS_CALLS:
            found.add(ast.unparse(node))
        elif any(keyword.arg == "labels" for keyword in node.keywords) and "Output" not in called:
            found.add(f"{called}(labels=...)")
    return "\n".join(sorted(found))


def _logits(forward: ast.FunctionDef) -> str:
    """What the logits are made of and what is done to them before they are returned, in order."""
    found = []
    for node in ast.walk(forward):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        if any("logits" in ast.unparse(target) for target in targets):
            found.append((node.lineno, ast.unparse(node)))
    return "\n".join(text for _, text in sorted(found))
