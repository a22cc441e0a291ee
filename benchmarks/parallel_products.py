"""How many operations each device spends on matrix products, and in which hop, while a compiled program runs.

A ring skips tiles at run time, depending on the device's place, so the program's text alone doesn't show the work. JAX's profiler
names every instruction that XLA:CPU runs, with the device; the text shows how many operations a product has, and how many
collectives its operands have passed through. These are counts, not times: they don't depend on the machine's cores.
"""

from __future__ import annotations

import math
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>[a-z][\w\-]*)\((?P<operands>[^)]*)\)"
)
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|branch_computations|(?:true|false)_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_COLLECTIVES = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter")


class Product(NamedTuple):
    """A multiplying instruction: operations per run, and the collectives that its operands have passed through."""

    operations: int
    hop: int


class _Line(NamedTuple):
    kind: str
    sizes: tuple[int, ...]
    operands: list[str]
    called: list[str]
    text: str


def products(text: str) -> dict[str, Product]:
    """The multiplying instructions of a compiled program's text, fused or not, by their names.

    A loop's body has the hop of the loop: a program whose collectives are in a loop has only one hop.
    """
    bodies = {name: (entry, dict(lines)) for name, entry, lines in _computations(text)}
    main = next(lines for entry, lines in bodies.values() if entry)
    found: dict[str, Product] = {}

    def operations(computation: str) -> int:
        lines = bodies[computation][1]
        return sum(of_line(lines, line) for line in lines.values())

    def of_line(lines: dict[str, _Line], line: _Line) -> int:
        if line.kind == "dot":
            match = _CONTRACTED.search(line.text)
            left = lines[line.operands[0]].sizes
            summed = [left[int(i)] for i in match[1].split(",") if i] if match else []
            return 2 * math.prod(line.sizes) * math.prod(summed)
        return sum(operations(name) for name in line.called) if line.kind == "fusion" else 0

    def walk(lines: dict[str, _Line], hop: int | None) -> None:
        depth: dict[str, int] = {}
        for name, line in lines.items():
            before = max((depth[one] for one in line.operands if one in depth), default=0)
            depth[name] = before + line.kind.startswith(_COLLECTIVES) if hop is None else hop
            if count := of_line(lines, line):
                found[name] = Product(count, depth[name])
            if line.kind in ("while", "conditional", "call"):
                for called in line.called:
                    walk(bodies[called][1], depth[name])

    walk(main, None)
    return found


def executed(call: Callable[[], Any], text: str) -> dict[int, dict[int, int]]:
    """Run `call`, which runs the compiled program of this text once; device -> hop -> operations of its products."""
    multiplying = products(text)
    devices: dict[int, dict[int, int]] = {i: defaultdict(int) for i in range(jax.device_count())}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # jaxlib's types for these have no module; Python 3.13 warns about that, and as an error it would end the process.
        warnings.filterwarnings("ignore", "builtin type", DeprecationWarning)
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        for event in (event for plane in data.planes for line in plane.lines for event in line.events):
            if product := multiplying.get(event.name):
                devices[dict(event.stats)["device_ordinal"]][product.hop] += product.operations
    return {device: dict(hops) for device, hops in devices.items()}


def balance(devices: dict[int, dict[int, int]]) -> dict[str, Any]:
    """Operations of each device, in total and by hop; the busiest device, and the sum of each hop's busiest, over the mean."""
    totals = [sum(hops.values()) for hops in devices.values()]
    numbers = sorted({hop for hops in devices.values() for hop in hops})
    lockstep = sum(max(hops.get(hop, 0) for hops in devices.values()) for hop in numbers)
    mean = sum(totals) / len(totals)
    return {
        "operations": totals,
        "hops": [[hops.get(hop, 0) for hops in devices.values()] for hop in numbers],
        "busiest over mean": max(totals) / mean,
        "lockstep over mean": lockstep / mean,
    }


def _computations(text: str) -> Iterator[tuple[str, bool, list[tuple[str, _Line]]]]:
    name: str | None = None
    entry, lines = False, list[tuple[str, _Line]]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, entry, lines = head["name"], head["entry"] is not None, []
        elif line == "}" and name is not None:
            yield name, entry, lines
            name = None
        elif name is not None and (match := _INSTRUCTION.match(line)):
            sizes = re.match(r"\w+\[([\d,]*)\]", match["type"])
            called = [one for part in _CALLED.findall(line) for one in re.findall(r"%([\w.\-]+)", part)]
            shape = tuple(int(n) for n in sizes[1].split(",") if n) if sizes else ()
            lines.append(
                (
                    match["name"],
                    _Line(match["kind"], shape, re.findall(r"%([\w.\-]+)", match["operands"]), called, line),
                )
            )
