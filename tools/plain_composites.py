"""Model types with a text_config of a plain family, whose models make no masks of their own: for tools/plain_families.py."""

from __future__ import annotations

import inspect
from pathlib import Path

from plain_models import Unread

from attnops.models import families

__all__ = ["composite_types"]

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


def composite_types(types: list[str], unread: dict[str, str]) -> dict[str, dict[str, str]]:
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
