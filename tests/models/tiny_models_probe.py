"""The logits of the tiny decoders from transformers' own modules.

With transformers installed, `python tests/models/tiny_models_probe.py` writes tests/data/tiny_models.npz, which
test_tiny_models.py compares with.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import CONFIGS, LENGTH, tokens, weights

__all__ = ["RECORD", "module_logits"]

RECORD = Path(__file__).parents[1] / "data" / "tiny_models.npz"
_PROMPT = 8


def module_logits(name: str) -> np.ndarray:
    """float32 [rows, LENGTH, vocab]; the module's own decode after a prompt gives the same, which is checked."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(name, **copy.deepcopy(CONFIGS[name]))
    config.rope_interleave = True  # of all models of these types
    model = AutoModel.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    known, given = model.state_dict(), {}
    for key, x in weights(name).items():
        # Some versions have the bias of the choice beside the router.
        other = key.replace("mlp.gate.e_score", "mlp.e_score")
        given[key if key in known or other not in known else other] = torch.from_numpy(x)
    head = given.pop("lm_head.weight")
    model.load_state_dict(given, strict=True)
    ids = torch.from_numpy(tokens(name).astype(np.int64))
    with torch.no_grad():
        whole = model(ids, use_cache=False).last_hidden_state @ head.T
        made: Any = model(ids[:, :_PROMPT], use_cache=True)
        parts = [made.last_hidden_state]
        for at in range(_PROMPT, LENGTH):
            made = model(ids[:, at : at + 1], past_key_values=made.past_key_values, use_cache=True)
            parts.append(made.last_hidden_state)
        torch.testing.assert_close(torch.cat(parts, 1) @ head.T, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    return np.asarray(whole.numpy())


def main() -> None:
    np.savez(RECORD, **{name: module_logits(name) for name in CONFIGS})


if __name__ == "__main__":
    main()
