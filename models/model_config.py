"""Read a model's config, from a file, a dict or an object, into the fields with which its family describes attention.

Every key of a config is read, or is known to concern other things, or is named in a note. A key that concerns attention but
can't be represented is refused. `models/keys.py` has the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, nearest, shown
from ..names import checked_name
from ..planning.notes import Note, note
from .config_dict import as_dict
from .default_notes import has_dims, is_noted
from .families import ALIASES, COMPOSITES, FAMILIES, GLOBAL, NESTED_PARTS, PARTS, Family
from .family import Spans
from .keys import ATTENTION, NOTED, REFUSED, SYNONYMS, is_quiet, kind_of_key
from .nested_part import nested_part
from .plain_families import PLAIN

__all__ = ["ModelConfig", "read_model_config"]

# Keys that every family reads, and their defaults.
_EVERYWHERE: dict[str, Any] = {"dtype": None, "output_attentions": False}
# A saved config has all keys, except that a nested config leaves out those with the class's default.
_NEEDED = ("num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelConfig:
    """One model's attention fields. `fields` has every key of the family, `declared_keys` those that the config has.
    `spans` has the kinds of layers where tokens of one image see each other, as of Composite."""

    name: str
    family: str
    fields: Mapping[str, Any]
    declared_keys: frozenset[str]
    notes: tuple[Note, ...]
    spans: Mapping[str, Spans] = field(default_factory=dict)

    @property
    def rules(self) -> Family:
        return FAMILIES[self.family]

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.name}: {text}")


def read_model_config(
    config: Any,
    *,
    family: str | None = None,
    part: str | None = None,
    ignore: Collection[str] = (),
    name: str | None = None,
    assume: str | None = None,
) -> ModelConfig:
    """Read a config: the path of a config.json or of its folder, a dict, or a transformers config object.

    family: read it as this family instead of its model_type. ignore: keys that are known not to concern attention. part:
    'encoder', 'decoder' or 'cross' of an encoder-decoder; 'text' alone, 'vision' or 'audio' of a model with
    such configs. name: the config's name in messages. assume: the family to read an unknown model_type as, with a note; keys that
    this family doesn't read are refused as always.
    Errors: ConfigError for anything that isn't a model's config, an unknown family, and keys that can't be represented or
    contradict each other.
    """
    data, own_name = as_dict(config)
    name = own_name if name is None else name
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    if not isinstance(ignore, Collection) or not all(isinstance(key, str) for key in ignore):
        raise ConfigError(f"{name}: ignore={shown(ignore)}; wanted the names of keys.")
    notes: list[Note] = []
    composite = COMPOSITES.get(str(data.get("model_type")))
    textless = composite is not None and composite.text is None and (family is None or part in NESTED_PARTS)
    nested = textless or data.get("text_config") is not None
    spans: Mapping[str, Spans] = {}
    if nested:
        beside, kind = (part if part in NESTED_PARTS else "text"), data.get("model_type")
        data = nested_part(data, name, family, beside, notes, assume)
        name = f"{name}: {beside}_config"
        alone = part if part == beside else None  # the text by name is read without what images add to its masks
        part = None if part == beside else part
        whole = COMPOSITES.get(str(kind))
        spans = whole.spans if whole is not None and beside == "text" else {}
        if spans and alone is not None:
            notes.append(note("model.text_alone", kind=kind))
            spans = {}
    for key in data:
        checked_name(key, f"{name}: key")  # notes name keys
    for key in ignore:
        if key not in data:
            raise ConfigError(f"{name}: ignore names {shown(key)}, which the config doesn't have." + nearest(key, data))
    model = _family(data, name, family, part, notes, assume)
    prepare = FAMILIES[model].prepare
    if prepare is not None:
        data = dict(prepare(data, name, notes))
    fields, declared = _fields(data, name, model, ignore, notes)
    if not nested:
        needed = _NEEDED if has_dims(fields) and "mamba_expand" not in fields else (*_NEEDED, "hidden_size")
        missing = [key for key in needed if key not in declared and key in fields]
        if missing:
            key_of = {canonical: key for key, canonical in FAMILIES[model].names.items()}
            names = ", ".join(key_of.get(key, key) for key in missing)
            raise ConfigError(f"{name}: {names} missing; wanted a whole config of a {model} model.")
    taken = [f"{key}={fields[key]}" for key in sorted(fields.keys() - declared) if is_noted(key, fields)]
    off = "use_sliding_window" not in declared and fields.get("use_sliding_window") is False
    if off and "sliding_window" in declared and fields["sliding_window"] is not None:
        notes.append(note("model.window_off", size=fields["sliding_window"]))
    if taken:
        notes.append(note("model.defaults", fields=taken, model=model))
    return ModelConfig(name, model, fields, frozenset(declared), tuple(notes), spans)


def _family(
    data: Mapping[str, Any], name: str, family: str | None, part: str | None, notes: list[Note], assume: str | None
) -> str:
    kind = data.get("model_type") if family is None else family
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(
            f"{name}: {'family' if family else 'model_type'}={shown(kind)}; wanted one name, such as 'llama'."
        )
    known = sorted({*PARTS, *ALIASES, *(known for known in FAMILIES if " " not in known)})
    if kind is None or kind == "":
        raise ConfigError(
            f"{name}: no model_type, so this isn't a model's config as saved by transformers; wanted one of the "
            f"{len({*known, *COMPOSITES})} in 'Model types' in the manual, or family=."
        )
    if kind in COMPOSITES and family is None:  # with a text: the others were read before
        raise ConfigError(
            f"{name}: model_type {kind!r} is multimodal, and its text_config, which has the keys of its layers, is missing. If "
            f"these are those keys, give family={COMPOSITES[kind].text!r}."
        )
    if assume is not None and assume not in known:
        raise ConfigError(
            f"{name}: assume={shown(assume)}; wanted a model_type that attnops reads, such as llama."
            + nearest(assume, known)
        )
    if kind not in known and assume is not None and family is None:
        notes.append(note("model.assumed", kind=kind, family=assume))
        kind = assume
    if kind not in known:
        why, count = None if family else PLAIN["unread"].get(kind), len({*known, *COMPOSITES})
        hint = "" if family else " If its attention is that of one of them, such as llama, give assume='llama'."
        raise ConfigError(
            f"{name}: {'family' if family else 'model_type'} {shown(kind)} is not one that attnops can read"
            f"{'' if why is None else f' ({why})'}; 'Model types' in the manual has the {count} that it reads."
            + ((nearest(kind, known) if why is None else "") or hint)
        )
    if kind in ALIASES:
        notes.append(note("model.alias", kind=kind, family=ALIASES[kind]))
        kind = ALIASES[kind]
    parts = PARTS.get(kind)
    if parts is None:
        if part is not None:
            raise ConfigError(f"{name}: part={shown(part)}; {kind} has one attention: leave it out.")
        return kind
    if part is None:
        raise ConfigError(f"{name}: {kind} has {len(parts)} attentions; give part= one of {', '.join(parts)}.")
    if not isinstance(part, str) or part not in parts:
        raise ConfigError(f"{name}: part={shown(part)}; wanted one of {', '.join(parts)}.")
    return f"{kind} {part}"


def _fields(
    data: Mapping[str, Any], name: str, model: str, ignore: Collection[str], notes: list[Note]
) -> tuple[dict[str, Any], set[str]]:
    rules = FAMILIES[model]
    known = _EVERYWHERE | dict(rules.defaults)
    renamed = {"attention_dropout"} & set(rules.names.values())  # read only under the family's own name
    fields, set_by, unknown = dict(known), dict[str, str](), list[str]()
    for key, value in data.items():
        target = rules.names.get(key, SYNONYMS.get(key, key))
        if key in ignore or key == "model_type" or key in rules.skips:
            continue
        if target in known and key not in renamed:
            if target in set_by and None not in (fields[target], value) and fields[target] != value:
                raise ConfigError(
                    f"{name}: {set_by[target]}={shown(fields[target])} and {key}={shown(value)} contradict each other; keep one."
                )
            if target in set_by and value is None:
                continue
            fields[target], set_by[target] = value, key
            continue
        kind = kind_of_key(key)
        if key in NOTED and not is_quiet(key, value):
            notes.append(note("model.noted", key=key, value=shown(value), remark=NOTED[key]))
        if kind == "refused" and not is_quiet(key, value):
            raise ConfigError(
                f"{name}: {key}={shown(value)}: {REFUSED[key][1]}, which attnops can't read from a config."
            )
        if kind == "attention" and not _quiet(key, value, data, rules):
            raise ConfigError(
                f"{name}: {key}={shown(value)}, but models of type {model} don't read {key}. Remove it, give family= if "
                f"the model is of another family, or name the key in ignore=.{nearest(key, known)}"
            )
        nothing = is_quiet(key, value) or (value == 0 and "drop" in key)
        if kind == "suspicious" and not nothing:
            raise ConfigError(
                f"{name}: {key}={shown(value)} may concern attention, but attnops doesn't know it. If it doesn't, name it in "
                "ignore=." + nearest(key, ATTENTION)
            )
        if kind == "unknown" and not is_quiet(key, value):
            unknown.append(key)
    if unknown:
        notes.append(note("model.unknown_keys", keys=sorted(unknown)))
    if ignore:
        notes.append(note("model.ignored_keys", keys=list(ignore)))
    for key in list(set_by):
        if fields[key] is None and key not in _NULLABLE:  # null means unset, except for a window, a cap or a head dim
            fields[key] = known[key]
            del set_by[key]
    return fields, set(set_by)


_NULLABLE = (
    "sliding_window", "attn_logit_softcapping", "attention_chunk_size", "head_dim", "num_key_value_heads", "softmax_scale",
    "mamba_d_ssm",
)  # fmt: skip


def _quiet(key: str, value: Any, data: Mapping[str, Any], rules: Family) -> bool:
    """Whether an attention key that the family doesn't read has no effect, or only states what holds anyway."""
    if key == "scale_attn_weights":
        return value is None or value is True  # false asks for logits that aren't scaled
    if is_quiet(key, value) or (key in ("is_causal", "is_decoder") and value is True):
        return True
    if key == "attention_dropout" and value == 0:
        return True
    if key in ("max_window_layers", "sliding_window") and data.get("use_sliding_window") is False:
        return True
    renamed = {meant: data[name] for name, meant in rules.names.items() if name in data}
    fields = dict(rules.defaults) | dict(data) | renamed
    heads = fields.get("num_attention_heads")
    if key == "num_key_value_heads" and heads is not None:
        return bool(value == heads)
    if key == "head_dim" and isinstance(value, int) and isinstance(heads, int):
        return bool(value * heads == fields["hidden_size"])
    if key == "layer_types" and isinstance(value, list | tuple):
        windows = fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False
        return not windows and list(value) == [GLOBAL] * len(value) and len(value) == fields["num_hidden_layers"]
    return key in ("rope_scaling", "rope_parameters", "max_position_embeddings")
