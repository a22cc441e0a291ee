"""`attnops example`: the declarations used by the manual's commands, which are part of the package."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, nearest, shown
from .console import fields, text

__all__ = ["EXAMPLES", "Example", "list_examples", "write_example"]

_FROM = Path(__file__).resolve().parents[1] / "examples"


class Example(NamedTuple):
    """Its files, relative to the examples folder; what it shows; a command to run it."""

    files: tuple[str, ...]
    about: str
    command: str


EXAMPLES = {
    "llama3_8b_layer": Example(
        ("llama3_8b_layer.json",), "a layer of Llama 3 8B, with block sizes declared", "plan {0} --target v5e"
    ),
    "llama3_8b_decode": Example(
        ("llama3_8b_decode.json",), "one query per row against a cache of 2048 keys", "plan {0} --target v5e"
    ),
    "long_context_ring": Example(
        ("long_context_ring.json",), "a sequence split over devices, keys in a ring", "plan {0} --mesh sp=8 --target v5p"
    ),
    "minilm_layer": Example(
        ("minilm_layer.json", "minilm_layer.npz"), "a recorded layer of MiniLM, with its recorded output",
        "run {0} --inputs {1} --check",
    ),
    "gemma-2-27b-it": Example(
        ("models/gemma-2-27b-it.json",), "a model's config: windows in every other layer, caps",
        "plan --model {0} --target v5p",
    ),
}  # fmt: skip


def list_examples() -> None:
    """Print the names of the examples and what they show."""
    text().print(fields([(name, example.about) for name, example in EXAMPLES.items()]))


def write_example(name: str, folder: Path) -> None:
    """Copy the files of an example into a folder. Files that already exist are kept, and must be identical.

    Errors: ConfigError for an unknown name, for a file with other contents, and if nothing can be written.
    """
    if name not in EXAMPLES:
        raise ConfigError(
            f"no example is named {shown(name)}; wanted one of {', '.join(EXAMPLES)}.{nearest(name, EXAMPLES)}"
        )
    example = EXAMPLES[name]
    rows = []
    for file in example.files:
        path, data = folder / file, (_FROM / file).read_bytes()
        try:
            if path.exists() and path.read_bytes() != data:
                raise ConfigError(f"{path} exists with other contents; move it, or give another folder with --to.")
            rows.append(("there" if path.exists() else "wrote", str(path)))
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; wanted a folder to write to.") from None
    command = example.command.format(*(folder / file for file in example.files))
    text().print(fields([*rows, ("try", f"attnops {command}")]))
