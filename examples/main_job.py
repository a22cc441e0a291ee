"""The main example: a recorded MiniLM layer checked against the model, and a Llama-3-8B layer on eight devices.

`make run` calls this. Every step is an `attnops` command, which is printed so that it can be repeated by hand. The eight
devices are virtual CPU devices; the inputs of the Llama layer are random (its sizes are the model's, its sequence is
shortened). Exits with status 1 if any check fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MESH = ("--mesh", "fsdp=2,tp=2,sp=2")
STEPS = (
    (
        "MiniLM, one layer: six sentences, held against float64 and against what the model computed",
        ("run", "minilm_layer.json", "--inputs", "minilm_layer.npz", "--check"),
    ),
    (
        "Llama-3-8B, one layer, planned for a TPU: what would run there, and where every tensor would live",
        ("plan", "llama3_8b_layer.json", *MESH, "--target", "tpu"),
    ),
    (
        "Llama-3-8B, one layer, train",
        ("run", "llama3_8b_layer.json", *MESH, "--mode", "train", "--check", "--explain"),
    ),
    (
        "Llama-3-8B, one layer, prefill",
        ("run", "llama3_8b_layer.json", *MESH, "--mode", "prefill", "--check"),
    ),
    (
        "Llama-3-8B, one layer, one token against a cache of four rows",
        ("run", "llama3_8b_decode.json", *MESH, "--mode", "autoregressive", "--check"),
    ),
)


def main() -> int:
    """Run the steps, each in its own process, because the number of devices is fixed once jax has started."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    start, failed = time.monotonic(), []
    for title, arguments in STEPS:
        print(f"\n== {title}\n$ attnops {' '.join(arguments)}\n", flush=True)
        command = [sys.executable, "-m", "attnops", *arguments]
        status = subprocess.run(command, cwd=HERE, env=environment, check=False).returncode
        if status:
            failed.append(f"{title}: exit status {status}")
    print(f"\n{len(STEPS) - len(failed)} of {len(STEPS)} steps passed in {time.monotonic() - start:.0f} s")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
