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
import inspect
import json
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from plain_cases import LENGTH, declared_calls  # noqa: E402
from transformers_probe import caught  # noqa: E402

from attnops.errors import ConfigError  # noqa: E402
from attnops.models import families  # noqa: E402
from attnops.models.keys import SYNONYMS, kind_of_key  # noqa: E402
from attnops.models.plain_families import PLAIN, PLAIN_FAMILIES, plain_family  # noqa: E402

TABLE = ROOT / "models" / "plain_families.json"
TRUTH = ROOT / "tests" / "data" / "plain_truth.json"
_SECONDS = 60

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8,
    "max_position_embeddings": 64, "intermediate_size": 32, "vocab_size": 64, "ffn_dim": 32, "n_inner": 32,
    "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "moe_num_experts": 4, "moe_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "ffn_hidden_size": 32, "embedding_size": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.25, "layerdrop": 0.0, "drop_path_rate": 0.0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "encoder_layers": 8, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "d_model": 32,
    "encoder_layerdrop": 0.0, "rotary_dim": 8, "max_window_layers": 3, "use_sliding_window": True,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"hidden_size": 512} for name in ("qwen2_vl_text", "qwen2_5_vl_text")},
    **{name: {"hidden_size": 256} for name in ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text")},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    "pixtral": {"hidden_size": 64},
}
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


class Unread(Exception):
    """Why a type isn't taken."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Unread(f"took more than {seconds} s to build")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _small(model_type: str) -> dict[str, Any]:
    """The keys of a small config, in the type's own names."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    said, own = config.to_dict(), _own_names(config)
    nested = [key for key, value in said.items() if key.endswith("_config") and isinstance(value, dict)]
    if nested:
        raise Unread(f"has configs of several parts: {', '.join(sorted(nested))}")
    small = {own.get(key, key): value for key, value in SMALL.items()}
    small = {key: value for key, value in small.items() if key in said and not isinstance(said[key], list | dict)}
    if said.get("head_dim") is not None and "qk_rope_head_dim" not in said:
        small["head_dim"] = 16
    if "image_size" in said and "patch_size" in said:
        sides = [3 * side for side in _pair(said["patch_size"])]
        small["image_size"] = sides[0] if isinstance(said["image_size"], int) else sides
    return small | _OWN.get(model_type, {})


_ALSO = {
    "attention_dropout": ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout_rate", "attn_dropout"),
    "attn_logit_softcapping": ("attn_logit_soft_cap",),
}


def _own_names(config: Any) -> dict[str, str]:
    """Our name of a key -> the type's, where they differ."""
    own, said = dict(getattr(type(config), "attribute_map", None) or {}), config.to_dict()
    if own.get("head_dim") == "qk_rope_head_dim":
        del own["head_dim"]  # which is only a part of a head
    for key, others in _ALSO.items():
        named = [other for other in others if other in said]
        if own.get(key, key) not in said and named:
            own[key] = named[0]
    return own


def _inputs(config: Any, model: Any) -> dict[str, Any]:
    import torch

    taken = set(inspect.signature(model.forward).parameters)
    if "input_ids" in taken:
        given: dict[str, Any] = {"input_ids": torch.full((1, LENGTH), 3)}
    elif "spatial_shapes" in taken:
        patch = config.num_channels * config.patch_size**2
        given = {"pixel_values": torch.zeros(1, LENGTH, patch), "pixel_attention_mask": torch.ones(1, LENGTH)}
        given["spatial_shapes"] = torch.tensor([[4, LENGTH // 4]])
    elif "pixel_values" in taken:
        side, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        height, width = (side, side) if isinstance(side, int) else side
        given = {"pixel_values": torch.zeros(1, channels, height, width)}
    elif "input_values" in taken:
        given = {"input_values": torch.zeros(1, 8000)}
    elif "input_features" in taken:
        bins = getattr(config, "num_mel_bins", 80)
        given = {"input_features": torch.zeros(1, bins, 2 * LENGTH)}
    else:
        raise Unread(f"takes {', '.join(sorted(taken)[:3])}, and neither tokens, an image nor sound")
    return given


def _calls(model_type: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What is caught of each layer. Errors: Unread."""
    from transformers import AutoConfig

    try:
        with _limited(_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(model_type, **copy.deepcopy(said))
            calls = caught(config, lambda model: _inputs(config, model))
    except Unread:
        raise
    except Exception as error:
        told = re.sub(r" from '/[^']*'?", "", " ".join(str(error).split()))[:120]  # no paths of this machine
        raise Unread(f"a small model can't be built or run here: {type(error).__name__}: {told}") from error
    if not calls:
        raise Unread("its code doesn't call attention through transformers' interface")
    if any(call["rows"] is None for call in calls):
        raise Unread("its mask has holes in a row")
    if any(call["more"] for call in calls):
        raise Unread(f"passes attention more than a mask: {', '.join(sorted({m for c in calls for m in c['more']}))}")
    return [{key: value for key, value in call.items() if key != "more"} for call in calls]


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
    defaults, own = config.to_dict(), _own_names(config)
    base = _small(model_type)
    first = _calls(model_type, base)
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
                found = _calls(model_type, said)
            except Unread:
                continue
            against = first if said.keys() - base.keys() <= {name} else _calls(model_type, base | window)
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

    defaults, own = config.to_dict(), _own_names(config)
    base, first = cases[0]
    sizes = {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "image_size",
        "patch_size",
    }
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
        patches = [n // m for n, m in zip(_pair(base["image_size"]), _pair(defaults["patch_size"]), strict=True)]
        row["extra_tokens"] = len(first[0]["rows"]) - patches[0] * patches[1]
        counted = [
            key for key in defaults if key.startswith("num_") and "token" in key and _adds(model_type, base, key, first)
        ]
        row["defaults"] |= {key: defaults[key] for key in counted}
        row["extra_tokens"] -= sum(base.get(key, defaults[key]) for key in counted)
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


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def _rounded(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call | {"scale": float(f"{call['scale']:.6g}")} for call in calls]


def _difference(declared: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    if len(declared) != len(found):
        return f"{len(found)} calls of attention for {len(declared)} layers"
    for number, (one, other) in enumerate(zip(declared, found, strict=True)):
        for key, value in one.items():
            if value != other[key]:
                told = "its mask" if key == "rows" else f"{key} {other[key]}, not {value}"
                return f"layer {number} has {told}" if key != "rows" else f"layer {number} has another mask"
    raise AssertionError("nothing differs")


def _layers(model_type: str, config: Any, read: set[str]) -> str | list[int]:
    """Which layers have a window if layer_types doesn't list them."""
    from transformers import AutoConfig

    if "sliding_window" not in read:
        return "none"
    own = _own_names(config)
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
    more = _tried(model_type, base | {key: count + 1})
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
        told = [found for found in (_tried(model_type, base | {key: one}) for one in tries) if found is not None]
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


def _tried(model_type: str, said: dict[str, Any]) -> list[dict[str, Any]] | None:
    try:
        return _calls(model_type, said)
    except Unread:
        return None


def _candidates() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    by_hand = {name.partition(" ")[0] for name in families.FAMILIES.keys() - PLAIN_FAMILIES.keys()}
    known = {*by_hand, *families.ALIASES, *(families.COMPOSITES.keys() - PLAIN["composites"].keys())}
    return sorted(set(CONFIG_MAPPING_NAMES) - known)


_OTHER_MASKS = (
    "or_mask_function",
    "and_mask_function",
    "block_sequence_ids",
    "create_masks_for_generate",
    "build_text_mask",
)
_WITH_IMAGES = ("gemma3_text", "gemma4_text")  # whose models let the tokens of an image see each other
_PARTS = ("vision", "audio")


def _composite(model_type: str) -> dict[str, str] | None:
    """The family of each part whose config is nested, if the text's masks are those of text alone; None for another type."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    if getattr(getattr(config, "text_config", None), "model_type", None) is None:
        return None
    parts = {"text": config.text_config.model_type}
    parts |= {part: getattr(getattr(config, f"{part}_config", None), "model_type", None) for part in _PARTS}
    if parts["text"] in _WITH_IMAGES:
        raise Unread("its model is one whose tokens of an image see each other")
    if parts["text"] not in families.FAMILIES:
        raise Unread(f"has a text_config of {parts['text']}")
    folder = Path(inspect.getfile(type(config))).parent
    source = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
    named = "AutoModel.from_config" in source  # then the text is that family's own model
    found = [word for word in (*_OTHER_MASKS, *(() if named else ("cross_attention",))) if word in source]
    if found:
        raise Unread(f"its model makes masks of its own, or attends to other parts: {', '.join(found)}")
    return {part: kind for part, kind in parts.items() if kind in families.FAMILIES}


def _composites(types: list[str], unread: dict[str, str]) -> dict[str, dict[str, str]]:
    found = {}
    for model_type in types:
        try:
            if (parts := _composite(model_type)) is not None:
                found[model_type] = parts
                unread.pop(model_type, None)
        except Unread as error:
            unread[model_type] = str(error)
        except Exception as error:  # each class validates its own
            unread[model_type] = f"its config can't be made: {type(error).__name__}"
    return found


def main() -> None:
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = [name for name in sys.argv[1:] if name != "--composites"]
    taken, unread = dict(PLAIN["families"]), dict(PLAIN["unread"])
    truth = (
        {case["config"]["model_type"]: [] for case in json.loads(TRUTH.read_text())["cases"]} if TRUTH.exists() else {}
    )
    for case in json.loads(TRUTH.read_text())["cases"] if TRUTH.exists() else []:
        truth[case["config"]["model_type"]].append(case)
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
    composites = _composites(sorted(set(_candidates()) - set(taken)), unread)
    table = {
        "transformers": transformers.__version__, "families": _sorted(taken), "composites": composites, "unread": _sorted(unread)
    }  # fmt: skip
    TABLE.write_text(_text(table, '"defaults"'))
    cases = [case for model_type in sorted(truth) for case in truth[model_type]]
    TRUTH.write_text(_text({"transformers": transformers.__version__, "cases": cases}, '"config"'))


def _sorted(rows: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(rows.items()))


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
