"""What transformers' own modules of recurrent layers compute, for random weights.

With torch and transformers installed, `python tests/recurrent/recurrent_probe.py` writes tests/data/recurrent_modules.npz: the
input, the output and the weights of each module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["HIDDEN", "RECORD", "TOKENS"]

RECORD = Path(__file__).parents[1] / "data" / "recurrent_modules.npz"
TOKENS, HIDDEN = 70, 12


def _modules() -> dict[str, Callable[[], Any]]:
    from transformers import Mamba2Config, MambaConfig, MiniMaxConfig, Qwen3NextConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    qwen = Qwen3NextConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=6, linear_conv_kernel_dim=4,
    )  # fmt: skip
    mamba2 = Mamba2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=6,
        state_size=8,
        expand=2,
        n_groups=2,
        chunk_size=16,
    )
    mamba = MambaConfig(hidden_size=HIDDEN, num_hidden_layers=2, state_size=4, expand=2, time_step_rank=3)
    minimax = MiniMaxConfig(
        hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3, head_dim=8, block_size=16
    )
    return {
        "gated_delta_rule": lambda: Qwen3NextGatedDeltaNet(qwen, 0),
        "mamba2": lambda: Mamba2Mixer(mamba2, 0),
        "mamba1": lambda: MambaMixer(mamba, 0),
        "lightning": lambda: MiniMaxLightningAttention(minimax, 2),
    }


def main() -> None:
    import torch

    record: dict[str, np.ndarray] = {}
    for name, make in _modules().items():
        torch.manual_seed(0)
        module = make().eval().float()
        x = torch.randn(2, TOKENS, HIDDEN)
        with torch.no_grad():
            for weight in module.parameters():
                weight.copy_(torch.randn(weight.shape) * (0.5 if weight.ndim < 2 else weight.shape[-1] ** -0.5))
            found = module(x, position_embeddings=None, attention_mask=None) if name == "lightning" else module(x)
        output = found[0] if isinstance(found, tuple) else found
        record |= {f"{name}/input": x.numpy(), f"{name}/output": output.numpy()}
        record |= {f"{name}/weights/{key}": weight.detach().numpy() for key, weight in module.named_parameters()}
    np.savez(RECORD, **record)


if __name__ == "__main__":
    main()
