"""Make models/plain_families.json: the model types of transformers whose attention follows from their config's common keys.

    python tools/plain_families.py [--composites | model_type ...]

Needs transformers and torch. Of each type that models/families.py doesn't write by hand, a small model is built, its calls of
attention are caught, and every key that may concern attention is changed once: a key that changes a call is read, one that
changes none is skipped. A type is taken if attnops then reads what was caught, in every variant. Of the others the reason is
kept. The calls go to tests/data/plain_truth.json. A type with a text_config of such a family is taken if its model makes no masks
of its own; --composites makes these alone.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

from plain_composites import composite_types
from plain_models import ROOT, Unread, calls_of, declared_calls, own_names, pair_of, small_config, tried

from attnops.errors import ConfigError
from attnops.models import families
from attnops.models.keys import SYNONYMS, kind_of_key
from attnops.models.plain_families import PLAIN, PLAIN_FAMILIES, plain_family

TABLE = ROOT / "models" / "plain_families.json"
TRUTH = ROOT / "tests" / "data" / "plain_truth.json"
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "head_dim": (24,),
    "is_causal": (False,),
    "is_decoder": (True,),
    "sliding_window": (5, None),
    "use_sliding_window": (True, False),
    "attention_multiplier": (0.3,),
    "query_pre_attn_scalar": (20,),
    "attn_logit_softcapping": (30.0,),
    "layer_types": (["full_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,),
    "attention_dropout": (0.125,),
    "max_window_layers": (2,),
    "scale_attn_weights": (False,),
    "scale_attn_by_inverse_layer_idx": (True,),
}
"""Keys that are changed, and to what; a sliding window is set where one matters."""


def _read(model_type: str, said: dict[str, Any], length: int) -> list[dict[str, Any]] | str:
    """What attnops declares, or why it doesn't."""
    try:
        return _rounded(declared_calls({"model_type": model_type} | said, length=length))
    except ConfigError as error:
        return str(error)


def _row(model_type: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The type's row and its cases. Errors: Unread."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    defaults, own = config.to_dict(), own_names(config)
    base = small_config(model_type)
    first = calls_of(model_type, base)
    cases, read = [(base, first)], set[str]()
    window = {own.get("sliding_window", "sliding_window"): 5} if "sliding_window" in defaults else {}
    for key, values in _VARIANTS.items():
        name = own.get(key, key)
        if name not in defaults and key != "is_causal":
            continue
        changed = False
        for value in values:
            said = (
                base
                | (window if key in ("layer_types", "use_sliding_window", "max_window_layers") else {})
                | {name: value}
            )
            if value is None and defaults.get(name) is None:
                said.pop(name)
            try:
                found = calls_of(model_type, said)
            except Unread:
                continue
            against = first if said.keys() - base.keys() <= {name} else calls_of(model_type, base | window)
            if found != against:
                changed = True
                if (
                    value is not None or "layer_types" not in defaults
                ):  # with layer_types, a null window contradicts them
                    cases.append((said, found))
        if changed:
            read.add(key)
    if defaults.get("head_dim") is not None and "qk_rope_head_dim" not in defaults:
        read.add("head_dim")  # though no other value may be possible beside the width
    return _fitted(model_type, config, read, cases)


def _fitted(
    model_type: str, config: Any, read: set[str], cases: list[Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from transformers import AutoConfig

    defaults, own = config.to_dict(), own_names(config)
    base, first = cases[0]
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "image_size",
             "patch_size"}  # fmt: skip
    latent = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim",
              "rope_interleave", "rope_scaling", "rope_parameters", "head_dim"}  # fmt: skip
    keys = {k for k in sizes if own.get(k, k) in defaults} | read
    if "qk_rope_head_dim" in defaults:
        keys |= {k for k in latent if k in defaults} | {"head_dim", "qk_head_dim", "rope_scaling", "rope_parameters"}
    kept, smaller = {}, AutoConfig.for_model(model_type, **copy.deepcopy(base)).to_dict()
    for key in keys:
        value = defaults.get(own.get(key, key))
        name = own.get(key, key)
        follows = name not in base and smaller.get(name) != value  # its default is computed from other keys
        kept[key] = None if follows or key in ("is_causal", "rope_parameters", "rope_scaling") else value
    names = {own[key]: key for key in kept if key in own}
    row: dict[str, Any] = {
        "defaults": {key: kept[key] for key in sorted(kept)},
        "names": names,
        "causal": all(last <= at for call in first for at, (_, last) in enumerate(call["rows"])),
        "sinks": any(call["sinks"] is not None for call in first),
        "layers": _layers(model_type, config, read),
    }
    if "image_size" in kept:
        patches = [n // m for n, m in zip(pair_of(base["image_size"]), pair_of(defaults["patch_size"]), strict=True)]
        row["extra_tokens"] = len(first[0]["rows"]) - patches[0] * patches[1]
        counted = [
            key for key in defaults if key.startswith("num_") and "token" in key and _adds(model_type, base, key, first)
        ]
        row["defaults"] |= {key: defaults[key] for key in counted}
        row["extra_tokens"] -= sum(base.get(key, defaults[key]) for key in counted)
    elif "num_patches" in defaults and "max_position_embeddings" not in kept:  # an image is cut into at most so many
        row["defaults"] |= {"max_position_embeddings": defaults["num_patches"]}
        row["names"] |= {"num_patches": "max_position_embeddings"}
    row["skips"] = sorted(_others(model_type, config, row, base, first))
    PLAIN_FAMILIES[model_type] = plain_family(row)
    families.FAMILIES[model_type] = PLAIN_FAMILIES[model_type]
    for said, found in cases:
        declared = _read(model_type, said, len(found[0]["rows"]))
        if declared != _rounded(found):
            del families.FAMILIES[model_type], PLAIN_FAMILIES[model_type]
            what = declared if isinstance(declared, str) else _difference(declared, _rounded(found))
            raise Unread(f"is read otherwise: {what}")
    return row, [_case({"model_type": model_type} | said, _rounded(found)) for said, found in cases]


def _case(config: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A case of the record: each different call once, and the number of each layer's."""
    kinds: list[dict[str, Any]] = []
    for call in calls:
        if call not in kinds:
            kinds.append(call)
    return {"config": config, "kinds": kinds, "layers": [kinds.index(call) for call in calls]}


def _rounded(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call | {"scale": float(f"{call['scale']:.6g}")} for call in calls]


def _difference(declared: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    if len(declared) != len(found):
        return f"{len(found)} calls of attention for {len(declared)} layers"
    for number, (one, other) in enumerate(zip(declared, found, strict=True)):
        for key, value in one.items():
            if value != other[key]:
                return f"layer {number} has " + (
                    "another mask" if key == "rows" else f"{key} {other[key]}, not {value}"
                )
    raise AssertionError("nothing differs")


def _layers(model_type: str, config: Any, read: set[str]) -> str | list[int]:
    """Which layers have a window if layer_types doesn't list them."""
    from transformers import AutoConfig

    if "sliding_window" not in read:
        return "none"
    own = own_names(config)
    said = {own.get("num_hidden_layers", "num_hidden_layers"): 23, "sliding_window": 5}
    if "use_sliding_window" in config.to_dict():
        said["use_sliding_window"] = True
    listed = getattr(AutoConfig.for_model(model_type, **said), "layer_types", None)
    if not listed:
        return "all"
    kinds = [kind == "full_attention" for kind in listed]
    if not any(kinds):
        return "all"
    if "max_window_layers" in read:
        return "late"
    for period in range(1, 13):
        for first in range(period):
            every = [number % period == first for number in range(len(kinds))]
            if kinds == every:
                return [period, first]
            if kinds == [*every[:-1], True]:
                return [period, first, -1]
    raise Unread("no rule of attnops gives its default layer_types")


def _adds(model_type: str, base: dict[str, Any], key: str, first: Any) -> bool:
    """Whether an image has one more token where the key is one more."""
    from transformers import AutoConfig

    count = getattr(AutoConfig.for_model(model_type), key)
    more = tried(model_type, base | {key: count + 1})
    return more is not None and len(more[0]["rows"]) == len(first[0]["rows"]) + 1


_ALWAYS_QUIET = ("rope_parameters", "rope_scaling", "max_position_embeddings", "is_encoder_decoder")


def _others(model_type: str, config: Any, row: dict[str, Any], base: Any, first: Any) -> Iterator[str]:
    """The keys of the class that attnops would refuse or tell, and that change no call of attention. Errors: Unread."""
    for key, value in config.to_dict().items():
        kind = kind_of_key(key)
        known = {*row["names"], *row["defaults"], *_ALWAYS_QUIET, "model_type", "dtype", "output_attentions"}
        if key in known or SYNONYMS.get(key, key) in row["defaults"] or kind == "other":
            continue
        if kind == "unknown" and not ("extra_tokens" in row and "token" in key):
            yield key
            continue
        tries = _tries(base.get(key, value))
        told = [found for found in (tried(model_type, base | {key: one}) for one in tries) if found is not None]
        if any(found != first for found in told):
            raise Unread(f"its attention depends on {key}")
        if not told and kind != "refused" and value is not None and value is not False:
            raise Unread(f"{key} may concern attention, and no other value could be tried")
        if kind != "refused" or told:
            yield key


def _tries(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value, value // 2, value + 1)
    if isinstance(value, float):
        return (2 * value + 0.5, value / 2)
    if value is None:
        return (True, 2, 0.5)
    return ()


def _candidates() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    by_hand = {name.partition(" ")[0] for name in families.FAMILIES.keys() - PLAIN_FAMILIES.keys()}
    known = {*by_hand, *families.ALIASES, *(families.COMPOSITES.keys() - PLAIN["composites"].keys())}
    return sorted(set(CONFIG_MAPPING_NAMES) - known)


def main() -> None:
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = [name for name in sys.argv[1:] if name != "--composites"]
    taken, unread = dict(PLAIN["families"]), dict(PLAIN["unread"])
    truth: dict[str, list[Any]] = {}
    for case in json.loads(TRUTH.read_text())["cases"] if TRUTH.exists() else []:
        truth.setdefault(case["config"]["model_type"], []).append(case)
    for model_type in chosen or (() if sys.argv[1:] else _candidates()):
        for known in (taken, unread, truth):
            known.pop(model_type, None)
        families.FAMILIES.pop(model_type, None)
        try:
            if model_type not in MODEL_MAPPING_NAMES:
                raise Unread("has no model class of its own")
            taken[model_type], truth[model_type] = _row(model_type)
            print(model_type, "read", flush=True)
        except (Unread, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            unread[model_type] = str(error)
            print(model_type, error, flush=True)
    composites = composite_types(sorted(set(_candidates()) - set(taken)), unread)
    table = {"transformers": transformers.__version__, "composites": composites}
    table |= {"families": dict(sorted(taken.items())), "unread": dict(sorted(unread.items()))}
    TABLE.write_text(_text(table, '"defaults"'))
    cases = [case for model_type in sorted(truth) for case in truth[model_type]]
    TRUTH.write_text(_text({"transformers": transformers.__version__, "cases": cases}, '"config"'))


def _text(data: Any, row: str) -> str:
    """JSON with one line for each row."""
    text = json.dumps(data)
    if row == '"config"':
        return text.replace('{"config"', '\n{"config"') + "\n"
    lines = {
        key: ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in data[key].items())
        for key in ("families", "composites", "unread")
    }
    tables = ",\n".join(f'"{key}": {{\n{text}\n}}' for key, text in lines.items())
    return f'{{"transformers": {json.dumps(data["transformers"])},\n{tables}}}\n'


if __name__ == "__main__":
    main()
