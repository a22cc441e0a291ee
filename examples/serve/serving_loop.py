"""The host side of serving: continuous batching. It decides which sequences run, which wait, and which give their pages back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from step_engine import StepEngine

from attnops import InputError
from attnops.errors import CapacityError
from attnops.serving import PagePool, PagePools


@dataclass(eq=False)
class Request:
    """A prompt and its answer, which ends at the token `end` or after `most` tokens."""

    name: str
    prompt: list[int]
    most: int
    end: int | None = None
    out: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)  # for each token: its logit's lead over the second largest
    came: float = 0.0
    first_token: float | None = None  # seconds after its arrival

    @property
    def context(self) -> list[int]:
        return self.prompt + self.out

    @property
    def finished(self) -> bool:
        return len(self.out) >= self.most or (self.end is not None and self.out[-1:] == [self.end])


class Moment(NamedTuple):
    """The pool after a step, and the cost of the step."""

    at: float
    used: int
    cached: int
    rows: int
    size: int  # of the compiled step, including padding
    device_seconds: float


@dataclass
class Totals:
    """Counts over a loop's lifetime."""

    prefilled: int = 0  # prompt tokens that ran
    matched: int = 0  # prompt tokens found in the cache
    preempted: int = 0
    moments: list[Moment] = field(default_factory=list)


class ServingLoop:
    """Serves requests in order of arrival, `slots` at a time, over one pool of pages.

    A step has one token of every decoding sequence, and chunks of prompts in the rest of the engine's budget. A prompt
    is admitted when there are pages for all of it. Sequences that grow later may find none: then the latest one gives its
    pages back, and runs again from its tokens when there is room. With `share`, prompts reuse the whole pages of
    published prefixes, and of states those that are kept there.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        slots: int | None = None,
        share: bool = True,
        on_token: Callable[[Request, int], None] | None = None,
    ) -> None:
        self.engine, self.slots = engine, engine.slots if slots is None else slots
        if not 1 <= self.slots <= engine.slots:
            raise InputError(f"slots={slots}; wanted 1 to {engine.slots}, the cache's max_sequences.")
        self.pool = PagePools.of(engine.plan, prefix_sharing=share)
        # A prefix is found at multiples of this many tokens; 0: never, as some states are kept for their sequence alone.
        self.prefix_unit = math.lcm(*(
            pool.page_size * (1 if isinstance(pool, PagePool) else pool.snapshots or 0) for pool in self.pool.pools
        ))  # fmt: skip
        self.share, self.on_token = share, on_token
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.totals = Totals()
        self.began = time.perf_counter()

    def submit(self, request: Request) -> None:
        """Queue a request. Errors: InputError for an empty prompt, or one longer than the cache's max_length with its answer."""
        length, longest = len(request.prompt) + request.most, self.engine.cache.max_length
        if not request.prompt or request.most < 1 or length > longest:
            raise InputError(
                f"request {request.name!r} has {len(request.prompt)} tokens and may get {request.most} more; wanted at least one "
                f"of each, and at most {longest} together, the cache's max_length."
            )
        request.came = time.perf_counter()
        self.waiting.append(request)

    def serve(self, requests: Iterable[Request] = ()) -> float:
        """Run until nothing is left; returns the seconds taken."""
        began = time.perf_counter()
        for request in requests:
            self.submit(request)
        while self.waiting or self.running:
            self.step()
        return time.perf_counter() - began

    def step(self) -> None:
        """One step of the device: choose, run, take the tokens, give back the pages of finished requests."""
        new = self._chosen()
        found = self.engine.run({request.name: tokens for request, tokens in new.items()}, self.pool)
        now = time.perf_counter()
        for request, token, lead in zip(new, found.tokens, found.leads, strict=True):
            # The step that writes these pages is done: others may read them from now on.
            self.pool.publish(request.name)
            if self._missing(request) == 0:
                self._take(request, int(token), float(lead), now)
        counts = self.pool.counts()[0]
        self.totals.moments.append(
            Moment(now - self.began, counts.used, counts.cached, len(new), found.size, found.seconds)
        )
        for request in [r for r in self.running if r.finished]:
            self.pool.free(request.name)
            self.running.remove(request)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _missing(self, request: Request) -> int:
        """Tokens of its context that no step has written yet."""
        return len(request.context) - int(self.pool.kv_lens([request.name])[0])

    def _take(self, request: Request, token: int, lead: float, now: float) -> None:
        request.out.append(token)
        request.leads.append(lead)
        if request.first_token is None:
            request.first_token = now - request.came
        if self.on_token is not None:
            self.on_token(request, token)

    def _chosen(self) -> dict[Request, list[int]]:
        """The next step's tokens of each request; the pool has counted them."""
        decoding = sum(self._missing(request) == 1 for request in self.running)
        room = self.engine.budget - decoding
        new: dict[Request, list[int]] = {}
        for request in list(self.running):
            if request not in self.running:  # it gave its pages to an earlier request
                continue
            count = self._missing(request)
            if count > 1:
                count = self._chunk(request, room)
                room -= count
            if count and self._grown(request, count):
                new[request] = self._next(request, count)
        while self.waiting and len(self.running) < self.slots and room > 0 and self._let_in(self.waiting[0], new):
            request = self.waiting.popleft()
            count = self._chunk(request, room)
            self._append(request, count)
            new[request] = self._next(request, count)
            room -= count
        return new

    def _chunk(self, request: Request, room: int) -> int:
        """How many of its tokens run in a step: those that fit; with states up to where one can be kept for its prefix."""
        end = self.pool.tokens_to_snapshot(request.name) if self.prefix_unit else None
        return min(self._missing(request), room, *(() if end is None else (end,)))

    def _next(self, request: Request, count: int) -> list[int]:
        """The tokens that were just counted: the last ones in the pool."""
        length = int(self.pool.kv_lens([request.name])[0])
        tokens = request.context[length - count : length]
        self.totals.prefilled += count if count > 1 or not request.out else 0
        return tokens

    def _append(self, request: Request, count: int) -> None:
        length = int(self.pool.kv_lens([request.name])[0])
        self.engine.carry_out(self.pool.append(request.name, request.context[length : length + count]))

    def _grown(self, request: Request, count: int) -> bool:
        """Append, taking pages from the latest requests if there are none; False if this one had to give its own."""
        while True:
            try:
                self._append(request, count)
            except CapacityError:
                last = self.running.pop()
                self.pool.free(last.name)
                self.waiting.appendleft(last)
                self.totals.preempted += 1
                if last is request:
                    return False
            else:
                return True

    def _let_in(self, request: Request, new: dict[Request, list[int]]) -> bool:
        """Start a request on its cached prefix, with pages for the rest of its tokens, or let it wait."""
        context = request.context
        prefix = context[:-1]  # the last token's query must run
        known = self.pool.match(prefix)[0].tokens
        if self.share and any(self._soon(prefix, other) > known for other in new):
            return False
        try:
            growths = self.pool.adopt(request.name, prefix, tokens=len(context) - known)
        except CapacityError:
            if not self.running:
                raise
            return False
        self.engine.carry_out(growths)
        self.totals.matched += growths[0].matched
        self.running.append(request)
        return True

    def _soon(self, prefix: list[int], other: Request) -> int:
        """How much of a prefix, where it can be found, this step writes for another request; it is published after the step."""
        length = int(self.pool.kv_lens([other.name])[0])
        common = 0
        for mine, its in zip(prefix, other.context[:length], strict=False):
            if mine != its:
                break
            common += 1
        return common - common % self.prefix_unit if self.prefix_unit else 0
