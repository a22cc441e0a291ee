"""After a meeting: process 0 keeps a connection to each other process, and all are told who is lost or stays behind."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from ..errors import InputError, ProcessError, shown
from .channel import GRACE, Channel
from .rendezvous import Place, by_name

__all__ = ["Watch"]

_SETTLE = 5.0  # seconds that a computation's error waits for the news of whom it's due to
_FAILS = 1.0  # seconds in which a computation that lost a process may fail by itself, with a better reason
_LOG = logging.getLogger("attnops")
_T = TypeVar("_T")


class Watch:
    """The connections of this process, read in a thread until it leaves.

    A process that ends without leaving is lost: the system closes its connections. One that leaves with an error of its
    own is lost too, with the error as the reason. When process 0 leaves, the watch is over for all.
    """

    def __init__(self, place: Place, channels: Mapping[int, Channel]) -> None:
        self._place, self._channels = place, dict(channels)
        self._news = threading.Condition()  # of what follows
        self._lost: dict[int, str] = {}
        self._waits = dict.fromkeys(range(place.count), 0)  # in process 0 of each, elsewhere of this one
        self._behind: dict[int, int] | None = None  # process 0's answer
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._read, name="attnops-watch", daemon=True)
        self._thread.start()

    def wait(self, outputs: _T, timeout: float | None = None) -> _T:
        """Wait as jax.block_until_ready does, but no longer than the processes live that compute it; return `outputs`.

        Every process calls it equally often. `timeout` is in seconds; None waits as long as nobody is lost.

        Errors: the computation's own; ProcessError that names who is lost, or who hasn't come to this wait in time.
        """
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InputError(f"timeout={shown(timeout)}; wanted seconds, above 0, or None.")
        number = self._waits[self._place.process] + 1
        self._waits[self._place.process] = number
        if self._place.process:
            self._send(self._channels[0], {"wait": number})
        ended: list[BaseException | None] = []
        # A thread may be left behind in a computation that never ends. This one isn't: it would not see a loss.
        threading.Thread(target=self._block, args=[outputs, ended], name="attnops-wait", daemon=True).start()
        with self._news:
            self._news.wait_for(lambda: ended or self._lost, timeout)
            if self._lost:
                self._news.wait_for(lambda: ended, _FAILS)
            lost = bool(self._lost)
        if ended:
            if ended[0] is not None:
                raise ended[0]
            return outputs
        raise self.loss("the computation would never end") if lost else self._late(number, timeout or 0.0)

    def loss(self, what: str) -> ProcessError:
        """The error that names who is lost."""
        lost = self.losses()
        reasons = "; ".join(dict.fromkeys(lost.values()))
        text = (
            f"{by_name(lost)} of {self._place.count} {'was' if len(lost) == 1 else 'were'} lost while this one, process"
        )
        return ProcessError(f"{text} {self._place.process}, computed ({reasons}). See the log; here {what}.", lost)

    def losses(self) -> dict[int, str]:
        """Processes that are lost and why, in the order of the losses; waits a little for a first one."""
        with self._news:
            if self._channels:
                self._news.wait_for(lambda: self._lost, _SETTLE)
            return dict(self._lost)

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye, with what went wrong here, and stop."""
        reason = None if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self._wake.close()  # ends the thread
        self._thread.join()
        for channel in self._channels.values():
            self._send(channel, {"bye": reason, "due_to": getattr(error, "processes", ())})
            channel.close()
        self._woken.close()

    def _block(self, outputs: Any, ended: list[BaseException | None]) -> None:
        error = None
        try:
            jax.block_until_ready(outputs)
        except BaseException as raised:
            error = raised
        with self._news:
            ended.append(error)
            self._news.notify_all()

    def _late(self, number: int, timeout: float) -> ProcessError:
        """Who hasn't come to a wait, as process 0 knows."""
        with self._news:
            if self._place.process:
                self._behind = None
                self._send(self._channels[0], {"who_is_behind": number})
                self._news.wait_for(lambda: self._behind is not None or self._lost, GRACE)
            else:
                self._behind = self._behind_of(number)
            behind, lost = self._behind, bool(self._lost)
        waits = f"process {self._place.process} of {self._place.count} waited {timeout:g} s in its wait {number}"
        if behind is None and lost:  # others were quicker to ask, and have left
            return self.loss(f"nothing came of {timeout:g} s of waiting")
        if behind is None:
            return ProcessError(f"{waits}, and process 0 doesn't say who is behind: it is stuck, or has left.", [0])
        if not behind:
            return ProcessError(f"{waits}, as all others do: the computation takes longer, or is stuck on a device.")
        where = ", ".join(f"process {process} has come to wait {at}" for process, at in behind.items())
        return ProcessError(
            f"{by_name(behind)} stayed behind: {waits}; {where}. See the log of {by_name(behind)}.", behind
        )

    def _behind_of(self, number: int) -> dict[int, int]:
        return {process: at for process, at in self._waits.items() if at < number}

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for process, channel in self._channels.items():
                if not self._left(process, channel.left()):
                    selector.register(channel, selectors.EVENT_READ, process)
            while True:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, Channel):
                        return
                    try:
                        left = self._left(key.data, key.fileobj.receive())
                    except (OSError, ValueError) as error:
                        self._lose(key.data, f"the connection to process {key.data} ended ({error})")
                        left = True
                    if left:
                        selector.unregister(key.fileobj)

    def _left(self, process: int, messages: list[dict[str, Any]]) -> bool:
        """Take what a process says; whether it has said goodbye."""
        for message in messages:
            if "wait" in message:
                self._waits[process] = message["wait"]
            elif "who_is_behind" in message:
                behind = self._behind_of(message["who_is_behind"])
                self._send(self._channels[process], {"behind": list(behind.items())})
            elif "behind" in message:
                with self._news:
                    self._behind = {at[0]: at[1] for at in message["behind"]}
                    self._news.notify_all()
            elif "lost" in message:
                self._lose(message["lost"], message["reason"])
            elif message["bye"] is not None:
                # Who leaves because of another names that one to all, but to itself: there the one who left is lost.
                for culprit in message["due_to"] or [process]:
                    here = process if culprit == self._place.process else culprit
                    self._lose(here, f"process {process} left with {message['bye']}", culprit)
        return any("bye" in message for message in messages)

    def _lose(self, process: int, reason: str, culprit: int | None = None) -> None:
        with self._news:
            if process in self._lost:
                return
            self._lost[process] = reason
            self._news.notify_all()
        _LOG.error("process %d of %d was lost: %s", process, self._place.count, reason)
        if self._place.process == 0:
            lost = process if culprit is None else culprit
            for other, channel in self._channels.items():
                if other not in self._lost:
                    self._send(channel, {"lost": lost, "reason": reason})

    def _send(self, channel: Channel, message: Mapping[str, object]) -> None:
        try:
            channel.send(message)
        except OSError:
            return  # gone: said where its connection is read
