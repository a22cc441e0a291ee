"""A chat in the terminal. Earlier turns stay in the cache: each turn finds the pages of the turns before it by their prefix."""

from __future__ import annotations

import sys

from chat_format import ChatFormat
from serving_engine import Engine
from serving_loop import Request, ServingLoop

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the result of decoding an incomplete character


class Streamed:
    """Prints the text of tokens as they arrive."""

    def __init__(self, form: ChatFormat) -> None:
        self.form, self.tokens, self.printed = form, list[int](), ""

    def __call__(self, request: Request, token: int) -> None:
        self.tokens.append(token)
        text = self.form.decode(self.tokens)
        if not text.endswith(_UNFINISHED) or request.finished:
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text


def chat(engine: Engine, form: ChatFormat, system: str, most: int) -> int:
    """Answer lines of standard input until it ends."""
    opening = form.turn("system", system)
    history = list(opening)
    loop = ServingLoop(engine)
    print("Say something; an empty line starts anew, Ctrl-D ends.")
    for number in range(sys.maxsize):
        print("> ", end="", flush=True)
        said = sys.stdin.readline()
        if not said:
            print()
            return 0
        if not said.strip():
            history = list(opening)
            continue
        prompt = history + form.turn("user", said.strip()) + form.opening()
        room = engine.cache.max_length - len(prompt)
        if room < 1:
            print("[the cache's max_length is reached; an empty line starts anew]")
            continue
        request = Request(f"turn {number}", prompt, min(most, room), form.end)
        before = loop.totals.matched
        loop.on_token = Streamed(form)
        seconds = loop.serve([request])
        print(
            f"\n[{len(request.out)} tokens, {len(request.out) / seconds:.1f} a second; of {len(prompt)} tokens before them "
            f"{loop.totals.matched - before} were in the cache]"
        )
        said_back = request.out if request.out[-1] == form.end else [*request.out, form.end]
        history = prompt + said_back + form.closing()
    return 0
