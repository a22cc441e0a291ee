"""How a run of the server is measured, as a table and a picture; and whether two runs gave the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from serving_loop import Request, Totals


class Run(NamedTuple):
    """A way of serving, and its results."""

    title: str
    requests: Sequence[Request]
    totals: Totals
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(request.out) for request in self.requests)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def outside_steps(self) -> float:
        """The share of its time in which no compiled step ran."""
        return 1 - sum(moment.device_seconds for moment in self.totals.moments) / self.seconds

    def outside_products(self, product_seconds: dict[int, float]) -> float:
        """The share of its time outside the model's products with its weights; `product_seconds` by step size."""
        return 1 - sum(product_seconds[moment.size] for moment in self.totals.moments) / self.seconds


def differences(wanted: Run, found: Run) -> list[str]:
    """A line for each request whose tokens differ: which request, and the first difference."""
    lines = []
    for one, other in zip(wanted.requests, found.requests, strict=True):
        if one.out != other.out:
            pairs = list(zip(one.out, other.out, strict=False))
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            mine, its = (r.out[at] if at < len(r.out) else "nothing" for r in (one, other))
            lead = f"; the logit's lead was {one.leads[at]:.1e}" if at < len(one.leads) else ""
            lines.append(f"request {one.name}: token {at} is {mine} {wanted.title}, and {its} with {found.title}{lead}")
    return lines


def table(runs: Sequence[Run], product_seconds: dict[int, float]) -> Table:
    """One column per run; ratios are to the first."""
    made = Table("", *(run.title for run in runs))
    for column in made.columns[1:]:
        column.justify = "right"

    def row(name: str, *cells: str) -> None:
        made.add_row(name, *cells)

    peak = [max(moment.used for moment in run.totals.moments) for run in runs]
    first = [median(r.first_token for r in run.requests if r.first_token is not None) for run in runs]
    row("tokens generated", *(f"{run.tokens}" for run in runs))
    row("seconds", *(f"{run.seconds:.1f}" for run in runs))
    row("tokens per second", *(f"{run.rate:.1f}" for run in runs))
    row("times the first", *(f"{run.rate / runs[0].rate:.1f}" for run in runs))
    row("tokens of prompts that ran", *(f"{run.totals.prefilled}" for run in runs))
    row("... that were in the cache", *(f"{run.totals.matched}" for run in runs))
    row("pages in use, at most", *(f"{n}" for n in peak))
    row("gave their pages back", *(f"{run.totals.preempted}" for run in runs))
    row("median s to the first token", *(f"{s:.2f}" for s in first))
    row("time outside compiled steps", *(f"{run.outside_steps():.1%}" for run in runs))
    row("time outside the products", *(f"{run.outside_products(product_seconds):.0%}" for run in runs))
    return made


def show(made: Table) -> None:
    Console(width=110).print(made)


def draw(runs: Sequence[Run], pages: int, path: Path) -> None:
    """Pages in use over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", Path(__file__).resolve().parents[1] / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(runs, pages)
            figure.savefig(path.with_stem(path.stem + name), dpi=120)
            pyplot.close(figure)


def _figure(runs: Sequence[Run], pages: int) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        moments = run.totals.moments
        (line,) = axes.step([m.at for m in moments], [m.used for m in moments], where="post", label=run.title)
        if any(m.cached for m in moments):
            axes.step(
                [m.at for m in moments], [m.used + m.cached for m in moments], where="post", linestyle=":",
                color=line.get_color(), label=f"{run.title}: kept for their prefix too",
            )  # fmt: skip
    axes.set(xlabel="seconds", ylabel="pages", title=f"Pages in use, of {pages}", ylim=(0, None), xlim=(0, None))
    figure.legend(loc="outside lower center")
    return figure
