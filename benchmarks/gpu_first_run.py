"""What to run first on a GPU of the Hopper or Blackwell generation: numbers of the kernels' features, repetitions, times.

    python benchmarks/gpu_first_run.py --json FILE [--page FILE] [--minutes N]

Each feature is compared with the float64 reference, in bfloat16 or float16, forward and backward. The same call and its gradient
are repeated: results that differ in a bit tell of a race (gpu_first_numbers.py). Steps over pages are checked and repeated in the
same way, and decoding steps are timed with the bandwidth of their pages (gpu_first_pages.py). Then the cells of gpu.py are timed
by turns: the kernels in Mosaic GPU, those in Triton, cuDNN, JAX's and tokamax's. The file, and the page in Markdown, are written
after each row. Ten minutes; what is left out for lack of time is listed. The exit status is 0 if all numbers agree, 1 if
some don't, 2 if there is no such GPU or jax here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu
import jax
from gpu_first_numbers import check, features
from gpu_first_pages import STEPS, check_pages, page_features, timed_pages

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

ROUNDS = 7


def steps(generation: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """What is checked and timed by itself: part, name, and what gives the row."""
    for name, feature in features().items():
        yield "numbers", name, lambda feature=feature: check(feature, generation)
    for name, feature in page_features().items():
        yield "numbers", f"pages: {name}", lambda feature=feature: check_pages(feature)
    for name in STEPS:
        yield "pages", name, lambda name=name: timed_pages(name)


def page(data: dict[str, Any]) -> str:
    """The results in Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in data["versions"].items())
    numbers = {name: row for name, row in data["numbers"].items() if "refused" not in row}
    lines = ["# First run on a GPU", "", versions, "", "## Numbers", ""]
    lines += ["Greatest errors against the float64 reference; whether repeated calls gave the same bits.", ""]
    columns = ("forward", "lse", "d_query", "d_key", "d_value")
    lines += ["| Feature | Agrees | Same bits | " + " | ".join(columns) + " |", "|---" * (len(columns) + 3) + "|"]
    for name, row in numbers.items():
        errors = " | ".join(f"{row[column]:.1e}" if column in row else "-" for column in columns)
        told = ["yes" if row.get(key) else "**no**" for key in ("agrees", "alike")]
        lines.append(f"| {name} | {' | '.join(told)} | {errors} |")
    lines += ["", *(f"- {name}: {row['failure']}" for name, row in numbers.items() if "failure" in row)]
    refused = {name: row["refused"] for name, row in data["numbers"].items() if "refused" in row}
    lines += [f"- {name}: refused ({', '.join(codes)})" for name, codes in refused.items()]
    if data["pages"]:
        lines += [
            "",
            "## Decoding over pages",
            "",
            "Milliseconds of a step, and the share of the published bandwidth.",
            "",
        ]
        lines += ["| Step | Kernel | ms | GB/s | of published |", "|---|---|---|---|---|"]
        for name, row in data["pages"].items():
            for who, ms in row.get("ms", {}).items():
                share = row["of published"].get(who, "-")
                lines.append(f"| {name} | {who} | {ms} | {row['GB/s'][who]} | {share} |")
    if data["times"]:
        lines += [
            "",
            "## Times",
            "",
            "Milliseconds of attnops' kernels in Triton, and their ratio to those of the others.",
            "",
        ]
        lines.append(gpu.report(data["times"]))
    lines += ["", f"Left out for lack of time: {', '.join(data['left_out']) or 'nothing'}.", ""]
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    device, generation = jax.devices()[0], gpu.generation()
    if generation is None:
        print(
            f"gpu_first_run: jax {jax.__version__} and {device.device_kind} ({device.platform}); wanted jax "
            f"{'.'.join(map(str, JAX_NEEDED))} or later and a GPU of the Hopper or Blackwell generation. Nothing was run.",
            file=sys.stderr,
        )
        return 2
    end = time.monotonic() + 60 * options.minutes
    data: dict[str, Any] = {
        "versions": {"jax": jax.__version__, "device": device.device_kind},
        "numbers": {}, "pages": {}, "times": {}, "left_out": [],
    }  # fmt: skip

    def take(part: str, name: str, row: Any) -> None:
        data[part][name] = row
        print(part, name, row, flush=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")
        if options.page:
            options.page.write_text(page(data))

    for part, name, run in steps(generation):
        if time.monotonic() > end:
            data["left_out"].append(f"{part}: {name}")
            continue
        try:
            take(part, name, run())
        except Exception as error:  # the compiler's or the driver's
            take(part, name, {"agrees": False, "failure": f"{type(error).__name__}: {str(error)[:400]}"})
    for name, cell in gpu.cells().items():
        if time.monotonic() > end:
            data["left_out"].append(f"times: {name}")
            continue
        for _, row in gpu.time_cells({name: cell}, ROUNDS):
            take("times", name, row)
    wrong = [name for name, row in data["numbers"].items() if not row["agrees"]]
    print(f"disagree: {', '.join(wrong) or 'none'}; left out for lack of time: {len(data['left_out'])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
