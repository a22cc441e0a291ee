"""One case of the command: its arguments and its files mutated, run in this process; what must hold of status and output."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from fuzz_cases import DECLARATIONS, MODELS, SECONDS, within
from fuzz_mutate import DEPTH, WORDS, as_json, mutated, odd_string, odd_value

from attnops.cli.app import main

__all__ = ["Ended", "command_case", "run_command"]

# {file} is a declaration, {model} a model's config, {inputs} arrays. None of these runs an attention for long.
_LINES = (
    "plan {file}", "plan {file} --json", "plan {file} --mesh tp=2 --target tpu", "plan {file} --mode train --strict",
    "plan {file} --inputs {inputs}", "plan {file} --fallback error --target v5e:2x2", "plan --model {model} --q-len 128",
    "plan --model {model} --json --q-len 64 --kv-len 128 --batch 2 --dtype float32 --operation vanilla",
    "plan --model {model} --layer 0 --q-len 64 --write out", "plan --model {model} --ignore vocab_size --family llama",
    "list", "list --json", "schema", "schema splash", "verify --help", "tune --help", "run --help", "--help", "",
)  # fmt: skip
# These would compile: they come with something that has to be refused.
_BAD = (
    "run {file} --repeats 0", "run {file} --output none/x.npz", "run {missing}", "run {file} --seed -1", "verify {missing}",
    "verify {file} --target v5e:0x0", "verify {file} --target zz", "tune {missing}", "tune {file} --how {odd} --target zz",
    "run {file} --mesh tp=9999", "run {file} --inputs {missing}", "verify {file} --inputs {folder}", "run {binary}",
    "certify zz", "certify vanilla --feature {odd}", "certify json:dumps --as {missing}", "certify json:dumps --as {odd}",
    "certify vanilla.forward_zz", "certify json:dumps", "certify vanilla --as {binary}", "certify vanilla --cases -1",
)  # fmt: skip
_OPTIONS = (
    "--json", "--mesh", "--mode", "--target", "--lowered", "--timeout", "--strict", "--fallback", "--model", "--operation",
    "--family", "--part", "--ignore", "--dtype", "--batch", "--q-len", "--kv-len", "--layer", "--inputs", "-h",
    "--version", "--", "-",
)  # fmt: skip
_SMALL = {"operation": "vanilla", "call": {"q_len": 8, "q_heads": 2, "head_dim": 4}}


class Ended(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


def run_command(arguments: list[str]) -> Ended:
    """Run it in this process, with streams that encode as a terminal's do."""
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors) for errors in ("strict", "backslashreplace")
    ]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), within(SECONDS):
        try:
            status = main(arguments)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return Ended(status, *texts)


def command_case(random: Random, folder: Path) -> tuple[list[str], bool]:
    """The arguments of a command, and whether it must be refused. Files are made in `folder`, which is the working one."""
    must_fail = random.random() < 0.3
    line = random.choice(_BAD if must_fail else _LINES)
    made = _files(random, folder)
    arguments = [made.get(word, word) for word in line.split()]
    if must_fail:
        return arguments, True
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        arguments = _change(random, arguments, [*made.values()])
    if random.random() < 0.1:
        arguments.insert(random.randrange(len(arguments) + 1), "--no-such-option")
        return arguments, _reached(arguments)
    return arguments, False


def _reached(arguments: list[str]) -> bool:
    """Whether an unknown option is looked at: help comes before it, and what follows -- is no option."""
    return not {"--help", "-h", "--"} & set(arguments) and arguments[0] != "--no-such-option"


def _change(random: Random, arguments: list[str], files: list[str]) -> list[str]:
    changed, kind = list(arguments), random.randrange(6)
    at = random.randrange(len(changed)) if changed else 0
    if kind == 0 and changed:
        del changed[at]
    elif kind == 1 and changed:
        changed.insert(at, changed[at])
    elif kind == 2 and changed and changed[0] not in ("run", "verify", "tune"):
        changed[at] = _word(random, files) if at else random.choice((odd_string(random), "list", "schema", "plan"))
    elif kind == 3:
        changed.insert(at + 1, random.choice(_OPTIONS))
    elif kind == 4 and changed:
        changed[at + 1 : at + 1] = [random.choice(_OPTIONS), _word(random, files)]
    elif changed:
        changed.append(f"{random.choice(_OPTIONS)}={_word(random, files)}")
    return changed


def _word(random: Random, files: list[str]) -> str:
    text = random.choice(
        (odd_string(random), random.choice(WORDS), random.choice(files), str(random.choice((0, 1, -1, 2, 2**31, 10**30))),
         "tp=2,sp=2", "fsdp=0", "tp=99999999999", "v5e:2x2", "v5e:99x99", "v4:2x2x1")
    )  # fmt: skip
    return text.replace("\x00", "0")  # no argument of a process has a zero in it


def _files(random: Random, folder: Path) -> dict[str, str]:
    """Files by the word that stands for them; sound ones, most of the time."""
    declaration = random.choice(DECLARATIONS) if random.random() < 0.4 else _SMALL
    found = {"{file}": "a.json", "{model}": "model.json", "{inputs}": "in.npz", "{missing}": "none.json", "{folder}": "folder",
             "{binary}": "binary.json", "{odd}": "odd"}  # fmt: skip
    (folder / "folder").mkdir(exist_ok=True)
    (folder / "binary.json").write_bytes(bytes(random.randrange(256) for _ in range(64)))
    (folder / "a.json").write_text(_json(random, declaration), encoding="utf-8", errors="surrogatepass")
    (folder / "model.json").write_text(_json(random, random.choice(MODELS)), encoding="utf-8", errors="surrogatepass")
    arrays = {name: np.ones((1, 8, 2, 4), np.float32) for name in ("query", "key", "value")}
    if random.random() < 0.3:
        arrays[random.choice(("query", "mask", "bias", "x", "kv_lengths"))] = np.ones(
            random.choice(((), (1,), (1, 8, 2, 4)))
        )
    np.savez(folder / "in.npz", **arrays)  # type: ignore[arg-type]
    if random.random() < 0.15:
        name = random.choice(("a.json", "model.json", "in.npz"))
        data = bytearray((folder / name).read_bytes())
        start = random.randrange(max(len(data), 1))
        data[start : start + 20] = bytes(random.randrange(256) for _ in range(random.randrange(20)))
        (folder / name).write_bytes(data)
    return found


def _json(random: Random, data: object) -> str:
    kind = random.random()
    if kind < 0.05:
        return random.choice(("", "null", "[]", "5", "{", "[" * DEPTH, '"x"', "\ufeff{}", as_json(odd_value(random))))
    return as_json(mutated(random, data) if kind < 0.5 else data)
