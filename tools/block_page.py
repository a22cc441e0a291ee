"""Writes the block sizes that tools/block_table.py found: a table that plans of splash read, and benchmarks/block-choices.md."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from attnops.operators.splash.candidates import SHIPPED
from attnops.verify.generations import abstract_target

TARGETS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "block-choices.md"
BEGIN, END = (f"<!-- {word}: written by tools/block_table.py -->" for word in ("begin", "end"))


def compiler() -> str:
    """What compiles here."""
    return f"libtpu {metadata.version('libtpu')}, jax {metadata.version('jax')}"


def write(measured: dict[str, Any]) -> None:
    """The table that plans read, and the page. What they say of generations that weren't searched stays, if the compiler does."""
    rows = dict(sorted(measured.items()))
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old_page, _, tail = rest.partition(END)
    old = json.loads(SHIPPED.path.read_text())
    searched = {row["generation"] for row in rows.values()}
    same = old["compiler"] == compiler()
    kinds = tuple(f"{abstract_target(TARGETS[generation])[0]}, " for generation in searched)
    choices = {key: fields for key, fields in old["choices"].items() if same and not key.startswith(kinds)}
    choices |= {key: row["fields"] for key, row in rows.items() if "fields" in row}
    SHIPPED.path.write_text(
        json.dumps({"compiler": compiler(), "choices": dict(sorted(choices.items()))}, indent=1) + "\n"
    )
    sections = _sections(old_page) if same else {}
    sections |= {generation: section(rows, generation) for generation in searched}
    PAGE.write_text(f"{head}{BEGIN}\n\n{page(sections)}\n\n{END}{tail}", encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """A page's text on each generation."""
    found = (part.partition("\n\n") for part in text.split("### ")[1:])
    return {name: told.strip() for name, _, told in found}


def page(sections: dict[str, str]) -> str:
    """A section for each generation."""
    parts = [f"Compiled with {compiler()}."]
    missing = [generation for generation in TARGETS if generation not in sections]
    if missing:
        parts.append(f"Not searched yet: {', '.join(missing)}; a plan for them takes the heuristic's sizes.")
    for generation in (g for g in TARGETS if g in sections):
        parts += [f"### {generation}", sections[generation]]
    return "\n\n".join(parts)


def section(rows: dict[str, Any], generation: str) -> str:
    """A table of one generation's rows, and how many calls need none."""
    lines = [
        "| Call | Forward: block_q, block_kv; unit | Backward: block_q, block_kv; unit | VMEM, MiB | Of the heuristic's "
        "cycles |",
        "|---|---|---|---|---|",
    ]
    of_it = {key: row for key, row in rows.items() if row["generation"] == generation}
    own = sum("heuristic" in row for row in of_it.values())
    for key, row in of_it.items():
        if "heuristic" not in row:
            call = key.partition(", ")[2].removeprefix("bfloat16, ")
            lines.append(f"| {row['shape']}: {call} | {_cells(row)} |")
    told = (
        f"Of {len(of_it)} calls, {own} need no row: the heuristic's sizes take at most 1 % more cycles than any other."
    )
    return "\n\n".join([told, *(["\n".join(lines)] if len(lines) > 2 else [])])


def _cells(row: dict[str, Any]) -> str:
    if "fields" not in row:
        return f"none compiles: {row.get('failure', 'no candidate')} | | |"
    given = row["fields"]

    def sizes(suffix: str) -> str:
        q, kv, q_unit, kv_unit = (
            given[f"block_{axis}{suffix}{inner}"] for inner in ("", "_compute") for axis in ("q", "kv")
        )
        return f"{q}, {kv}; {q_unit} x {kv_unit}"

    inner = given["block_kv_compute_in"]
    forward = sizes("") + (f", in {inner}" if inner < given["block_kv_compute"] else "")
    forward += ", sums by product" if given.get("sum_by_product") else ""
    backward = sizes("_dkv")
    backward += " fused" if given["use_fused_bwd_kernel"] else f"; dq {given['block_q_dq']}, {given['block_kv_dq']}"
    used = [row["vmem"].get(f"attnops_splash_{kernel}") for kernel in ("forward", "backward", "dkv", "dq")]
    vmem = ", ".join(f"{size / 2**20:.1f}" for size in used if size) or "unknown"
    ratio = ", ".join(f"{row['ratio'][part]:.2f}" for part in ("forward", "backward") if part in row["ratio"])
    return f"{forward} | {backward} | {vmem} | {ratio}"
