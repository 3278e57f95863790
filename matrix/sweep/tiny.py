"""Tiny random models of any class, without downloads: default configurations shrunk by the rules in rules.toml."""

import dataclasses
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 1000, 4, 2, 16, 2
TOO_MANY_PARAMETERS = 150_000_000
_SUB_CONFIGS = ("text_config", "llm_config", "decoder", "decoder_config", "language_config", "thinker_config")
# Arguments that are None by default and yet are needed once the sizes are small.
_FILLED = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


class TooBigError(Exception):
    """A class that stays large: what makes it so has no name that the rules know."""


def tiny_model(cls: Any) -> Any:
    """A model of `cls` in train mode, always the same.

    Raises whatever upstream raises for a configuration that it cannot build, and TooBigError.
    """
    torch.manual_seed(0)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > TOO_MANY_PARAMETERS:
        msg = f"{count / 1e6:.0f} million parameters"
        raise TooBigError(msg)
    return cls(config).train()


def tiny_config(cls: Any) -> Any:
    """A configuration of `cls` as small as the rules make it."""
    config = _build(cls, _Shrink(cls, cls()).arguments())
    text = text_config(config)
    for name, value in _rules()["attributes"].get(cls.__name__, {}).items():
        setattr(config, name, value)
    if getattr(config, "is_encoder_decoder", False):
        for each in (config, text):
            for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 0), ("bos_token_id", 1)):
                if getattr(each, name, None) is None:  # recent releases keep these elsewhere
                    setattr(each, name, value)
    return config


def text_config(config: Any) -> Any:
    """The configuration of the part that makes the logits."""
    for name in _SUB_CONFIGS:
        if isinstance(sub := getattr(config, name, None), transformers.PretrainedConfig):
            return text_config(sub)
    return config


def vocabulary(config: Any) -> int:
    """How many tokens the model knows."""
    text = text_config(config)
    found = (getattr(text, name, None) for name in ("vocab_size", "tgt_vocab_size", "n_words", "decoder_vocab_size"))
    return next((value for value in found if isinstance(value, int)), VOCABULARY)


@cache
def _rules() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "rules.toml").read_text())


class _Shrink:
    """One default configuration, and the arguments that make it small."""

    def __init__(self, cls: Any, default: Any) -> None:
        self.cls = cls
        self.old = {name: _read(default, name, value) for name, value in _parameters(cls).items()}
        self.heads = self._first_int("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
        self.layers = self._first_int("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
        kinds = next(
            (v for n in ("layer_types", "layers_block_type", "block_types") if self._is_per_layer(v := self.old.get(n))), ()
        )
        self.new_layers = max(LAYERS, min(4, len(set(map(str, kinds)))))
        self.next_token = VOCABULARY - 1

    def arguments(self) -> dict[str, Any]:
        new = {name: self._value(name, value) for name, value in self.old.items()}
        new = {name: value for name, value in new.items() if value is not self.old[name]}
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := new.get(name, self.old.get(name)), dict):
                new[name] = _rope(self._with_mrope(name, rope), new.get("head_dim", HEAD_DIM))
        return new | _rules()["config"].get(self.cls.__name__, {})

    def _value(self, name: str, old: Any) -> Any:
        if isinstance(old, transformers.PretrainedConfig):
            arguments = _Shrink(type(old), old).arguments()
            return {"model_type": old.model_type, **arguments} if getattr(old, "model_type", "") else arguments
        if old is None:
            return _FILLED.get(name)
        if isinstance(old, bool):
            return old
        if isinstance(old, int):
            return self._int(name, old)
        if isinstance(old, list | tuple) and old:
            return self._list(name, old)
        return old

    def _int(self, name: str, old: int) -> int:
        if name == "image_size":
            patch = self.old.get("patch_size")
            return 4 * patch if isinstance(patch, int) else min(old, 32)
        rule = next((rule for rule in _rules()["rule"] if name in rule["names"]), None)
        if rule is None or not old:
            return self._token(old) if name.endswith(("_token_id", "_token_index", "_token_idx", "_id")) else old
        if "most" in rule:
            return min(old, rule["most"])
        if rule["is"] == "layers":
            return self.new_layers if old == self.layers else LAYERS
        if rule["is"] == "kv_heads":
            return HEADS if old == self.heads else KV_HEADS
        return int(rule["is"])

    def _list(self, name: str, old: Any) -> Any:
        if name.endswith("_token_ids") and all(isinstance(value, int) for value in old):
            return old if max(old) < VOCABULARY else type(old)(map(self._token, old))
        if not self._is_per_layer(old):
            return old
        kinds = list({str(value): value for value in old}.values())  # one layer of every kind, in their order
        return (kinds + list(old))[: self.new_layers]

    def _token(self, old: int) -> int:
        """An id inside the small vocabulary, from its end."""
        if old < VOCABULARY:
            return old
        self.next_token -= 1
        return self.next_token

    def _is_per_layer(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and self.layers is not None and len(value) == self.layers

    def _first_int(self, *names: str) -> int | None:
        return next((self.old[name] for name in names if isinstance(self.old.get(name), int)), None)

    def _with_mrope(self, name: str, rope: dict[str, Any]) -> dict[str, Any]:
        """Rotary parameters with the sections that multimodal models read without declaring them."""
        flat = not any(isinstance(value, dict) for value in rope.values())
        if name != "rope_parameters" or not flat or "mrope_section" in rope or not _reads(self.cls, "mrope_section"):
            return rope
        return {"rope_type": "default", "rope_theta": 1e4, **rope, "mrope_section": [1, 1, 2]}


def _parameters(cls: Any) -> dict[str, Any]:
    """Arguments of a configuration's constructor, with their defaults."""
    if dataclasses.is_dataclass(cls):
        fields = [field for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
        return {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base.__module__.startswith("transformers.models"):
            named = list(inspect.signature(base.__init__).parameters.values())[1:]
            return {p.name: p.default for p in named if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return {}


def _read(config: Any, name: str, default: Any) -> Any:
    if default is inspect.Parameter.empty:
        default = None
    try:
        return getattr(config, name, default)
    except Exception:  # what differs by layer refuses to be read as one value
        config.allow_global_per_layer_attribute_access = True
        try:
            return getattr(config, name, default)
        except Exception:  # nothing else is known of it
            return default


def _rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters for a small head."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: _rope(value, head_dim) for kind, value in rope.items()}
    half = max(1, int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
    new = dict(rope)
    if isinstance(sections := rope.get("mrope_section"), list | tuple):
        new["mrope_section"] = [max(1, size * half // sum(sections)) for size in sections]
        new["mrope_section"][0] += half - sum(new["mrope_section"])
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list | tuple):
            new[name] = [1.0] * half
    if isinstance(rope.get("original_max_position_embeddings"), int):
        new["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], 256)
    return new


def _reads(cls: Any, name: str) -> bool:
    """Whether the modelling code beside a configuration mentions a name."""
    folder = Path(inspect.getfile(cls)).parent
    declared = str(getattr(cls, "ignore_keys_at_rope_validation", name))
    return name in declared and any(name in file.read_text() for file in folder.glob("modeling_*.py"))


def _build(cls: Any, arguments: dict[str, Any]) -> Any:
    """The configuration; classes want what is inside them as dicts with or without their type, or as objects."""
    errors = []
    for form in (_as_is, _without_type, _as_object):
        try:
            return cls(**{name: form(cls, name, value) for name, value in arguments.items()})
        except Exception as error:  # the next form may do
            errors.append(error)
    raise errors[0]


def _as_is(cls: Any, name: str, value: Any) -> Any:
    return value


def _without_type(cls: Any, name: str, value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "model_type"} if isinstance(value, dict) else value


def _as_object(cls: Any, name: str, value: Any) -> Any:
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    sub = (getattr(cls, "sub_configs", None) or {}).get(name)
    if sub is None or sub is transformers.AutoConfig:
        sub = transformers.CONFIG_MAPPING[value["model_type"]]
    return _build(sub, _without_type(cls, name, value))
