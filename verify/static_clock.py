"""Static cycles: what the TPU compiler's final schedule says about a kernel, read from libtpu's dumps.

libtpu writes the bundles (one is issued per cycle) of what it compiles in a process started with
LIBTPU_INIT_ARGS=dump_options(...). They don't show stalls for memory or waits for the matrix units: the schedule may issue
products faster than the published peak rate, which tile_counts.matrix_cycles corrects. The result is an estimate, and a lower
bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["Region", "TileCycles", "dump_options", "kernels_in", "regions", "tile_cycles"]

_MAX_VARIANTS = 3  # through a tile
_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(?:>\s*)*\{")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\(!?%\w+\) )?target = \$region(\d+)")
_BUNDLES, _UTILIZATION = "final_bundles.txt", "final_hlo-static-per-bundle-utilization.txt"


@dataclass
class Region:
    """Bundles start..end that a branch skips or repeats, with the operations of some units in them."""

    start: int
    end: int
    is_loop: bool
    products: int
    vector: int
    inside: list[Region] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        return self.end - self.start

    def all(self) -> Iterator[Region]:
        """This region and all regions within it."""
        yield self
        for region in self.inside:
            yield from region.all()


class TileCycles(NamedTuple):
    """A flash attention kernel's cycles: for each code path of a tile, in program order; besides the tiles for a block of
    the slow axis (start and end of its sums), for a step of the grid, once per kv head, and for each turn of its loops.
    """

    tiles: tuple[int, ...]
    block: int
    step: int
    head: int = 0
    turn: int = 0

    def total(self, tiles: Sequence[int], blocks: int, heads: int = 1, turns: int = 0) -> int:
        """Cycles of so many tiles on each path, blocks of the slow axis, kv heads and turns of their loops; one path may serve
        all tiles.
        """
        variants = self.tiles if len(self.tiles) > 1 else self.tiles * len(tiles)
        inside = sum(count * cycles for count, cycles in zip(tiles, variants, strict=True))
        return inside + sum(tiles) * self.step + blocks * self.block + heads * self.head + turns * self.turn

    def at_least(self, cycles: Sequence[int]) -> TileCycles:
        """The same, with at least so many cycles on each path; a single path takes the most."""
        if len(self.tiles) == 1:
            cycles = [max(cycles, default=0)]
        return self._replace(tiles=tuple(max(a, b) for a, b in zip(self.tiles, cycles, strict=True)))

    def cheapest_first(self) -> TileCycles:
        """The same with sorted paths, for kernels with one path for tiles without a mask and one with it, in either order."""
        return self._replace(tiles=tuple(sorted(self.tiles)))


def dump_options(folder: str, kernel: str) -> str:
    """libtpu's options to dump the final schedule of one kernel, by its name in the compiled program (`name.1`).

    Dumping everything takes ten times as long as compiling it.
    """
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.* "
        f"--xla_jf_dump_only_matching_hlo={kernel}"
    )


def kernels_in(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The dumped kernels: name -> (bundles, utilization)."""
    paths: dict[str, tuple[Path, Path]] = {}
    for path in sorted(folder.glob(f"*{_BUNDLES}")):
        match = re.fullmatch(r"(\d+-(.+?)(?:\.\d+)?)-\d+-final_bundles\.txt", path.name)
        if match is None or match[2].startswith("<"):
            continue
        utilization = sorted(folder.glob(f"{match[1]}-*-{_UTILIZATION}"))
        if utilization:
            paths[match[2]] = (path, utilization[-1])
    return paths


def regions(bundles: str, utilization: str) -> Region:
    """The kernel's regions as a tree, from the texts of the two dumps. Errors: ConfigError for an unknown form."""
    lines = _bundles(bundles)
    units, rows = _units(utilization)
    if len(rows) != len(lines) or "MATMUL" not in units or "VALU" not in units:
        raise ConfigError(
            "these aren't dumps of final bundles and their utilization in the form that libtpu 0.0.51 writes."
        )
    product, vector = units.index("MATMUL"), units.index("VALU")
    starts: dict[int, int] = {}
    for number, line in enumerate(lines):
        for begun in _STARTS.findall(line):
            starts.setdefault(int(begun), number)

    def region(start: int, end: int, is_loop: bool) -> Region:
        part = rows[start : end + 1]
        return Region(start, end, is_loop, sum(r[product] for r in part), sum(r[vector] for r in part))

    root = region(0, len(lines), False)
    inner_regions = []
    for number, line in enumerate(lines):
        for target in _BRANCH.findall(line):
            if int(target) in starts:
                target_line = starts[int(target)]
                inner_regions.append(region(min(number, target_line), max(number, target_line), target_line <= number))
    for inner in sorted(inner_regions, key=lambda r: (r.start, -r.end)):
        _insert(root, inner)
    return root


def tile_cycles(root: Region) -> TileCycles:
    """Read the cycles of a flash attention kernel, whose steps are one loop around a tile's work.

    A guard nested in the guard of a block's start or end is taken as per kv head, and loops in it as going round for each
    part of the head's keys. This fits attnops' fused backward pass, whose sums over keys last for the whole head. In a kernel
    that treats all tiles alike, no guard sets them apart from a block's start and end, which are then the guards among a tile's
    products. Errors: ConfigError for a kernel of another form.
    """
    body = max((r for r in root.all() if r.is_loop), key=lambda r: r.cycles, default=root)
    whole = body.cycles
    # Leave out what guards the whole step (some steps only fetch or write), and what stands beside it.
    while (inner := [r for r in body.inside if r.products]) and inner[0].products == body.products:
        if not any(r.products for r in inner[0].inside):
            break
        body = inner[0]
    tiles = [r for r in body.inside if r.products]
    if not tiles or len(tiles) > _MAX_VARIANTS:
        raise ConfigError(f"the kernel has {len(tiles)} code paths for a tile; wanted one to {_MAX_VARIANTS}.")
    cycles = [r.cycles for r in tiles]
    ends = [r for r in body.inside if not r.products]
    if len(tiles) == 1:
        within = [r for r in tiles[0].inside if not r.products and not r.is_loop]
        cycles[0] -= sum(r.cycles for r in within)
        ends += within
    of_head = [r for end in ends for r in end.inside if not r.is_loop]
    rest, head = sum(r.cycles for r in ends), sum(r.cycles for r in of_head)
    turn = sum(r.cycles for guard in of_head for r in guard.inside if r.is_loop)
    step = whole - rest - sum(cycles)
    return TileCycles(tuple(cycles), rest - head, step, head - turn, turn)


def _insert(tree: Region, region: Region) -> None:
    for inner in tree.inside:
        if inner.start <= region.start and region.end <= inner.end:
            return _insert(inner, region)
    tree.inside.append(region)


def _bundles(text: str) -> list[str]:
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    return bundles


def _units(text: str) -> tuple[list[str], list[list[int]]]:
    """(names of the units, operations of each in each bundle)."""
    lines = text.splitlines()
    names = next((lines[i + 1] for i, line in enumerate(lines[:-1]) if "CAPAC" in line), "")
    at = next((i for i, line in enumerate(lines) if "UTILIZATION:" in line), len(lines))
    rows = [[int(n) for n in line.split()] for line in lines[at + 1 :] if re.match(r"\d", line)]
    return [name.strip() for name in names.split(",")], rows
