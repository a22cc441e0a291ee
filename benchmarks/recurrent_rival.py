"""One other implementation of a recurrence as a process: run by a Python that has its library, in turns with ours.

    python benchmarks/recurrent_rival.py NAME [SOURCE]

It reads the path of an .npz with the arrays, and answers `ready VERSION`, with the outputs beside it as .npy, or `missing WHY`.
Then each line that it reads is answered with the seconds of one run. SOURCE: a checkout of MaxText; one function is read.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# name -> the operation that it computes
RIVALS = {
    "ejkernel gated_delta_rule": "gated_delta_rule",
    "ejkernel kernel_delta_attention": "gated_delta_rule",  # its decay is one of a head
    "ejkernel recurrent_gla": "gla",
    "ejkernel state_space_v2": "mamba2",
    "maxtext jax_chunk_gated_delta_rule": "gated_delta_rule",
    "transformers torch_chunk_gated_delta_rule": "gated_delta_rule",
    "transformers chunk_kimi_delta_attention": "kda",
    "fla naive_chunk_gated_delta_rule": "gated_delta_rule",
    "fla naive_chunk_kda": "kda",
    "fla naive_chunk_simple_gla": "simple_gla",
}
Arrays = dict[str, np.ndarray]
Run = Callable[[], Any]


def with_jax(function: Callable[..., Any], **arrays: Any) -> Run:
    """A run of a compiled function of jax."""
    import jax

    compiled = jax.jit(lambda arrays: function(**arrays)[0])
    given = {name: jax.numpy.asarray(x) for name, x in arrays.items()}
    return lambda: jax.block_until_ready(compiled(given))


def with_torch(function: Callable[..., Any], arrays: list[np.ndarray], **options: Any) -> Run:
    """A run of a function of torch."""
    import torch

    given = [torch.from_numpy(x) for x in arrays]

    def run() -> Any:
        with torch.no_grad():
            return function(*given, **options)[0]

    return run


def ejkernel(name: str, call: Arrays, source: Path | None) -> Run:
    """Its XLA path."""
    from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule
    from ejkernel.kernels._xla.gla import recurrent_gla
    from ejkernel.kernels._xla.kernel_delta_attention import kernel_delta_attention
    from ejkernel.kernels._xla.state_space_v2 import state_space_v2

    def ssm(**x: Any) -> Any:
        outputs, *rest = state_space_v2(**x, n_groups=x["B"].shape[2])
        return outputs.reshape(x["x"].shape), *rest

    if name == "recurrent_gla":
        return with_jax(recurrent_gla, **{"g" if n == "decay" else n: x for n, x in call.items()})
    if name == "state_space_v2":
        return with_jax(ssm, **call, D=np.zeros_like(call["A"]))
    function = gated_delta_rule if name == "gated_delta_rule" else kernel_delta_attention
    return with_jax(lambda **x: function(**x, use_qk_l2norm=False, chunk_size=64), **call)


def maxtext(name: str, call: Arrays, source: Path | None) -> Run:
    """The one function, from the file that defines it."""
    import jax
    import jax.numpy as jnp

    if source is None:
        raise ImportError("no checkout is named")
    text = (source / "src/maxtext/models/qwen3.py").read_text()
    (found,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == name)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": jax.lax, "Array": jax.Array}
    exec(compile(ast.Module([found], []), str(source), "exec"), names)
    given = {"g" if n == "decay" else n: x for n, x in call.items()}
    return with_jax(lambda **x: names[name](**x, compute_dtype=jnp.float32), **given)


def transformers(name: str, call: Arrays, source: Path | None) -> Run:
    """Its chunked functions in torch."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    function = chunk_kimi_delta_attention if "kimi" in name else torch_chunk_gated_delta_rule
    return with_torch(function, [call[n] for n in ("query", "key", "value", "decay", "beta")])


def fla(name: str, call: Arrays, source: Path | None) -> Run:
    """Its naive functions in torch; the file alone, as the package wants Triton."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'fla'")
    folder = Path(spec.submodule_search_locations[0]) / "ops" / name.removeprefix("naive_chunk_")
    of_file = importlib.util.spec_from_file_location(name, folder / "naive.py")
    assert of_file is not None
    assert of_file.loader is not None
    module = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(module)
    arrays = [call[n] for n in ("query", "key", "value", "decay", "beta") if n in call]
    return with_torch(getattr(module, name), arrays)


def version(library: str) -> str:
    """That of the installed package."""
    try:
        return importlib.metadata.version("fla-core" if library == "fla" else library)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def main() -> None:
    library, name = sys.argv[1].split()
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    path = Path(sys.stdin.readline().strip())
    try:
        run = globals()[library](name, dict(np.load(path)), source)
    except ImportError as error:
        print("missing", str(error).replace("\n", " "), flush=True)
        return
    np.save(path.with_suffix(".npy"), np.asarray(run(), np.float32))
    print("ready", version(library), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
