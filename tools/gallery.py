"""Draw the gallery of masks and scores: docs/gallery.md and its pictures.

`python tools/gallery.py --write` writes both. A test checks them against what is drawn.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
from written_page import DOCS, WrittenPage

import attnops
import attnops.masks
import attnops.scores

PICTURES = DOCS / "pictures" / "gallery"


class Entry(NamedTuple):
    """One picture. code: an expression, over the names of attnops, attnops.masks and attnops.scores, jnp and `ids`."""

    name: str
    title: str
    code: str
    text: str


_IDS = "jnp.repeat(jnp.arange(4), 8)[None]"
MASKS = (
    Entry("causal", "Causal", "Causal()", "A token sees itself and what is before it."),
    Entry("full", "Full", "Full()", "Every token sees every other: encoders."),
    Entry("window", "A causal window", "Causal() & SlidingWindow(left=7)", "The token itself and 7 before it: Mistral, Gemma."),
    Entry("both", "A window to both sides", "SlidingWindow(left=5, right=5)", "ModernBERT's local layers."),
    Entry("chunked", "Chunks", "Causal() & Chunked(8)", "Only keys of the query's own chunk: Llama 4."),
    Entry("prefix", "A prefix", "Causal() | Prefix(10)", "The first 10 tokens see each other, all others are causal: PrefixLM."),
    Entry(
        "window_and_first", "A window, and the first tokens", "Causal() & (SlidingWindow(left=7) | Prefix(3))",
        "Streaming with attention sinks: the first 3 keys are never forgotten.",
    ),
    Entry(
        "documents", "Packed documents", "Causal() & SegmentIds(ids, ids)",
        "Four documents in one row, each causal in itself. `ids` are traced: another batch doesn't compile again.",
    ),
    Entry(
        "images", "Images in text", "Causal() | SegmentIds(spans, spans)",
        "The tokens of one image see each other; text, whose ids differ from each other, is causal: Gemma 3.",
    ),
    Entry(
        "lengths", "Padding", "Lengths(jnp.array([20]))",
        "Keys from 20 on are padding. As an argument of a call: `kv_lengths`.",
    ),
    Entry(
        "dilated", "Every other block", "dilated_blocks(32, block=4, window=3)",
        "Blocks of 4 keys, every second one of the last.",
    ),
    Entry(
        "longformer", "Longformer", "longformer(32, window=8, first=2)",
        "A window to both sides, and first tokens that see all and that all see.",
    ),
    Entry("bigbird", "BigBird", "bigbird(32, block=2, window=3, first=1, random=2)", "Local, global and random blocks."),
    Entry("not", "All but", "~(Causal() & SlidingWindow(left=7))", "Masks are an algebra: `&`, `|` and `~`."),
)  # fmt: skip
SCORES = (
    Entry("alibi", "ALiBi", "ALiBi(jnp.array([0.25]))", "A slope for each head times the distance: BLOOM, MPT."),
    Entry(
        "t5", "T5's buckets", "RelativeBias(jnp.linspace(-1.0, 1.0, 32)[:, None], T5(bidirectional=False))",
        "A learned number for each head and bucket of distances.",
    ),
    Entry(
        "clip", "Distances up to a limit", "RelativeBias(jnp.linspace(-1.0, 1.0, 17)[:, None], Clip(8))",
        "A learned number for each distance, those beyond the limit alike.",
    ),
    Entry("softcap", "A soft cap", "SoftCap(30.0)", "`30 tanh(x / 30)`: Gemma 2. As an argument of a call: `logits_soft_cap`."),
)  # fmt: skip


def main() -> None:
    """Print the page's part, or write it and the pictures."""
    if "--write" in sys.argv[1:]:
        PICTURES.mkdir(parents=True, exist_ok=True)
        for name, svg in pictures().items():
            (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")
    PAGE.main(__doc__ or "")


def pictures() -> dict[str, str]:
    """The SVG of each entry."""
    drawn = {entry.name: _made(entry).draw(32, block=1).svg() for entry in MASKS}
    return drawn | {entry.name: _made(entry).draw(32, heads=1).svg() for entry in SCORES}


def _made(entry: Entry) -> Any:
    spans = jnp.array([*range(100, 106), *[1] * 8, *range(106, 112), *[2] * 8, *range(112, 116)])[None]
    names = {**vars(attnops.masks), **vars(attnops.scores), "jnp": jnp, "spans": spans, "ids": eval(_IDS)}
    names |= {name: getattr(attnops, name) for name in attnops.__all__}
    return eval(entry.code, names)


def tables() -> str:
    """All entries."""
    parts = []
    for title, entries in (("Masks", MASKS), ("Scores", SCORES)):
        parts.append(f"## {title}")
        parts += [
            f"### {entry.title}\n\n{entry.text}\n\n```text\n{entry.code}\n```\n\n"
            f"![{entry.title}](pictures/gallery/{entry.name}.svg)"
            for entry in entries
        ]
    return "\n\n".join(parts)


PAGE = WrittenPage("gallery.md", "gallery", tables)

if __name__ == "__main__":
    main()
