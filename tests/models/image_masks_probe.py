"""What transformers' models of images and text let tokens see: masks of every kind of layer, of tokens with two images.

`python tests/models/image_masks_probe.py` writes tests/data/image_masks.json; needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRUTH = Path(__file__).resolve().parents[1] / "data" / "image_masks.json"
SPANS = [-1, -1, 0, 0, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1]
WINDOW = 5
_TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT | {"model_type": "gemma3_text", "sliding_window": WINDOW},
        "vision_config": _VISION,
    },
    "gemma4": {
        "text_config": _TEXT
        | {"model_type": "gemma4_text", "sliding_window": WINDOW, "use_bidirectional_attention": "vision"},
    },
    "paligemma": {"text_config": _TEXT | {"model_type": "gemma"}, "vision_config": _VISION},
    "paligemma 2": {
        "text_config": _TEXT | {"model_type": "gemma2", "sliding_window": WINDOW},
        "vision_config": _VISION,
    },
}
"""The parts of configs that decide what tokens see."""


def masks_of(name: str) -> dict[str, list[str]]:
    """The rows of each mask, as digits: a row of '110' sees two keys."""
    import torch
    from transformers import AutoConfig
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4
    from transformers.models.paligemma import modeling_paligemma

    config = AutoConfig.for_model(name.partition(" ")[0], **CONFIGS[name]).text_config
    config._attn_implementation = "eager"
    spans = torch.tensor([SPANS])
    given = {"config": config, "inputs_embeds": torch.zeros(1, len(SPANS), 32), "attention_mask": None, "cache": None}
    given |= {"position_ids": None}
    if name.startswith("paligemma"):
        given |= {"token_type_ids": (spans < 0).int()}  # the prefix, image and prompt, is one span
        made: Any = modeling_paligemma.PaliGemmaForConditionalGeneration.create_masks_for_generate(**given)
    else:
        module = modeling_gemma3 if name == "gemma3" else modeling_gemma4
        made = module.create_masks_for_vision_model(**given, block_sequence_ids=spans)
    named = made if isinstance(made, dict) else {"full_attention": made}
    return {
        kind: ["".join("1" if value == 0 else "0" for value in row) for row in mask[0, 0].tolist()]
        for kind, mask in named.items()
    }


def main() -> None:
    TRUTH.write_text(json.dumps({name: masks_of(name) for name in CONFIGS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
