"""Processes of one job meet over TCP: process 0 listens, compares what each of them says, and tells them all the outcome.

JAX's own meeting places (multihost_utils.process_allgather, assert_equal, sync_global_devices) are collectives of the
devices: they wait without a bound for a process that isn't there, and can't name it. Nothing here asks jax, so that it
works before jax.distributed.initialize too.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ProcessError
from .channel import GRACE, Address, Channel

__all__ = ["Facts", "Place", "by_name", "meet"]

_PROTOCOL = 1

Facts = Mapping[str, Any]
Compare = Callable[[Mapping[int, Facts]], tuple[tuple[int, ...], str] | None]


@dataclass(frozen=True)
class Place:
    """This process among those of its job, and where they meet."""

    process: int
    count: int
    address: Address


def by_name(processes: Iterable[int]) -> str:
    """Return 'process 3', or 'processes 3, 5-7'."""
    runs: list[list[int]] = []
    for process in sorted(processes):
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    names = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" if len(r) > 2 else f"{r[0]}, {r[1]}" for r in runs]
    return f"process{'es' if sum(map(len, runs)) > 1 else ''} {', '.join(names)}"


def meet(place: Place, facts: Facts, timeout: float, compare: Compare) -> dict[int, Channel]:
    """Meet the other processes; return open channels: of process 0 to each of them, of another to process 0.

    `compare` runs in process 0, on every process's facts; what it returns is raised in all of them.

    Errors: ProcessError, in each process within `timeout` seconds of its coming (and a grace of 2), that names those who
    didn't come, went away, claim the same id, or disagree.
    """
    deadline = time.monotonic() + timeout
    if place.process == 0:
        return _Host(place, deadline).meet(facts, compare)
    return _join(place, facts, deadline, timeout)


class _Outcome(Exception):
    """What ends a meeting early."""

    def __init__(self, processes: Iterable[int], text: str) -> None:
        self.processes, self.text = tuple(processes), text


class _Host:
    """Process 0 in a meeting."""

    def __init__(self, place: Place, deadline: float) -> None:
        self._place, self._deadline, self._start = place, deadline, time.monotonic()
        self._ids: dict[Channel, int] = {}
        self._who = {0: f"{socket.gethostname()}, pid {os.getpid()}"}

    def meet(self, facts: Facts, compare: Compare) -> dict[int, Channel]:
        collected = {0: facts}
        try:
            # The listener is closed before anybody is told anything: who hurries on to the next meeting can't get into this.
            with _listen(self._place) as listener, selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                try:
                    while len(collected) < self._place.count:
                        self._wait(selector, listener, collected)
                finally:
                    for key in list(selector.get_map().values()):  # strangers
                        if isinstance(key.fileobj, Channel) and key.fileobj not in self._ids:
                            key.fileobj.close()
            if found := compare(collected):
                raise _Outcome(*found)
        except BaseException as error:
            if isinstance(error, _Outcome):
                self._tell({"outcome": [error.processes, error.text]})
            for channel in self._ids:
                channel.close()
            if isinstance(error, _Outcome):
                raise ProcessError(error.text, error.processes) from None
            raise
        self._tell({"outcome": None})
        return {process: channel for channel, process in self._ids.items()}

    def _tell(self, message: Mapping[str, Any]) -> None:
        for channel in self._ids:
            try:
                channel.send(message)
            except OSError:
                continue  # gone since: the next meeting, or the watch, says so

    def _wait(self, selector: selectors.BaseSelector, listener: socket.socket, collected: dict[int, Facts]) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            missing = sorted(set(range(self._place.count)) - set(collected))
            raise _Outcome(
                missing,
                f"{by_name(missing)} of {self._place.count} did not come within the {time.monotonic() - self._start:.1f} s "
                f"that process 0 waited at {self._place.address}: died, stuck, never started, or sent to another address. "
                "See the log.",
            )
        for key, _ in selector.select(left):
            if not isinstance(key.fileobj, Channel):
                connection, _ = listener.accept()
                selector.register(Channel(connection), selectors.EVENT_READ)
                continue
            channel = key.fileobj
            try:
                for hello in channel.receive():
                    self._welcome(channel, hello, collected)
            except (OSError, ValueError, KeyError) as error:
                selector.unregister(channel)
                channel.close()
                if channel in self._ids:
                    process = self._ids.pop(channel)
                    text = (
                        f"process {process} ({self._who[process]}) came and went away before all were there: {error}."
                    )
                    raise _Outcome([process], text) from None

    def _welcome(self, channel: Channel, hello: dict[str, Any], collected: dict[int, Facts]) -> None:
        if hello.get("attnops") != _PROTOCOL:
            raise ValueError("not a message of attnops, or of another version of it")
        process, count, left, who = (hello[name] for name in ("process", "count", "left", "who"))
        if process in collected:
            self._ids[channel] = process  # told the outcome as well
            both = f"{self._who[process]}; {who}"
            raise _Outcome(
                [process], f"two processes say that they are process {process}: {both}. Give each its own id."
            )
        self._ids[channel], self._who[process], collected[process] = process, who, hello["facts"]
        if count != self._place.count:
            text = f"process {process} is one of {count} processes, process 0 one of {self._place.count}"
            raise _Outcome([process], f"{text}. Start all with the same number of processes.")
        # Nobody waits longer than declared: the earliest bound of those who are here is the bound of all.
        self._deadline = min(self._deadline, time.monotonic() + left)
        channel.send({"welcome": process})


def _listen(place: Place) -> socket.socket:
    address = place.address
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(tuple(address), family=family, backlog=max(place.count, 16))
    except OSError as error:
        text = f"process 0 can't listen at {address}: {error}. Give a host that is this machine, and a free port"
        raise ProcessError(f"{text}; jax's coordinator has a port of its own.", [0]) from error


def _join(place: Place, facts: Facts, deadline: float, timeout: float) -> dict[int, Channel]:
    channel = _reach(place, facts, deadline, timeout)
    try:
        message = channel.read(deadline + GRACE)
    except (OSError, ValueError) as error:
        channel.close()
        _gone(place, f"took part in the meeting and gave no outcome within {timeout:g} s: {error}")
    if message["outcome"] is not None:
        channel.close()
        processes, text = message["outcome"]
        raise ProcessError(text, processes)
    return {0: channel}


def _reach(place: Place, facts: Facts, deadline: float, timeout: float) -> Channel:
    """A channel on which process 0 has said welcome."""
    pause = 0.02
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.001)
            return _greet(Channel(socket.create_connection(place.address, timeout=left)), place, facts, deadline)
        except OSError as error:  # not there yet, or already done with an earlier meeting
            if time.monotonic() + pause > deadline:
                _gone(place, f"was not reached within {timeout:g} s: {error}", error)
        except ValueError:
            _gone(place, "is not who answers there; another port than that of jax's coordinator is wanted")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _greet(channel: Channel, place: Place, facts: Facts, deadline: float) -> Channel:
    try:
        who = f"{socket.gethostname()}, pid {os.getpid()}"
        hello = {"attnops": _PROTOCOL, "process": place.process, "count": place.count, "who": who}
        channel.send(hello | {"facts": facts, "left": deadline - time.monotonic()})
        answer = channel.read(deadline)
        if "outcome" in answer:
            processes, text = answer["outcome"]
            raise ProcessError(text, processes)
        if "welcome" not in answer:
            raise ValueError("not a message of attnops")
    except BaseException:
        channel.close()
        raise
    return channel


def _gone(place: Place, what: str, error: BaseException | None = None) -> NoReturn:
    text = f"process 0 of {place.count}, at {place.address}, {what}. If the address is right, see the log of process 0."
    raise ProcessError(text, [0]) from error
