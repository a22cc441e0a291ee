"""Processes that meet, here as threads: all are let through, or each is told who is missing or differs, in bounded time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_jobs import free_port

from attnops import (
    AttnOpsError,
    InputError,
    InputTypeError,
    OperationMetadata,
    OperationRegistry,
    ProcessError,
    check_processes,
    watch_processes,
)
from attnops.sharding.agreement import compare, facts_of
from attnops.sharding.channel import parse_address
from attnops.sharding.rendezvous import Place, by_name, meet

SLACK = 8.0  # seconds beyond `timeout`: the promised 2, and a busy machine


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def together(calls: list[Callable[[], Any]], bound: float) -> list[Any]:
    """Make the calls at the same time; return what each returned or raised."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    start = time.monotonic()
    with ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(one, calls))
    assert time.monotonic() - start < bound
    return results


def process(address: str, which: int, count: int, **changes: Any) -> Callable[[], None]:
    arguments: dict[str, Any] = {"timeout": 30.0, "address": address} | changes
    return lambda: check_processes(process_id=which, num_processes=count, **arguments)


def all_say(results: list[Any], processes: tuple[int, ...], *texts: str) -> None:
    for result in results:
        assert isinstance(result, ProcessError), result
        assert isinstance(result, (AttnOpsError, RuntimeError))
        assert result.processes == processes
        for text in texts:
            assert text in str(result)


def test_meetings_one_after_the_other(address: str) -> None:
    def often(which: int) -> None:
        for step in range(30):
            process(address, which, 4, agree={"step": step})()

    assert together([lambda which=which: often(which) for which in range(4)], 20) == [None] * 4


def test_a_late_process_is_waited_for(address: str) -> None:
    def late() -> None:
        time.sleep(1)
        process(address, 0, 2)()

    assert together([late, process(address, 1, 2)], SLACK) == [None, None]


def test_a_process_that_never_comes(address: str) -> None:
    results = together([process(address, which, 4, timeout=1.0) for which in (0, 2)], 1 + SLACK)
    all_say(results, (1, 3), "processes 1, 3 of 4 did not come within the 1.0 s that process 0 waited at", address)


def test_nobody_waits_longer_than_the_earliest_bound(address: str) -> None:
    results = together([process(address, 0, 3, timeout=60), process(address, 1, 3, timeout=1.0)], 1 + SLACK)
    all_say(results, (2,), "process 2 of 3 did not come within the 1.")


def test_process_0_never_comes(address: str) -> None:
    results = together([process(address, which, 3, timeout=1.0) for which in (1, 2)], 1 + SLACK)
    all_say(results, (0,), "process 0 of 3", "was not reached within 1 s", "refused", address)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"hello": 1}\n', b"7\n"])
def test_something_else_listens_at_the_address(address: str, answer: bytes) -> None:
    def other(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)
            time.sleep(0.8)

    with socket.create_server(parse_address(address)) as server:
        thread = threading.Thread(target=other, args=[server])
        thread.start()
        (result,) = together([process(address, 1, 2, timeout=1.0)], 1 + SLACK)
        thread.join()
    all_say([result], (0,), "is not who answers there" if answer else "was not reached within 1 s: timed out")


def test_the_port_is_taken(address: str) -> None:
    with socket.create_server(parse_address(address)):
        (result,) = together([process(address, 0, 2)], SLACK)
    all_say([result], (0,), f"process 0 can't listen at {address}", "in use")


def connect(address: str) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(parse_address(address))
        except OSError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    "text", [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"attnops": 1}\n', b"\x00\xff" * 100 + b"\n"]
)
def test_a_stranger_at_the_door_changes_nothing(address: str, text: bytes) -> None:
    def stranger() -> None:
        with connect(address) as connection:
            connection.sendall(text)
            time.sleep(0.5)

    def late() -> None:
        time.sleep(0.3)
        process(address, 1, 2)()

    assert together([process(address, 0, 2), late, stranger], SLACK) == [None] * 3


def test_a_process_that_goes_away_while_it_waits(address: str) -> None:
    hello = b'{"attnops": 1, "process": 1, "count": 3, "who": "host-b, pid 7", "facts": {}, "left": 60}\n'

    def dies() -> None:
        with connect(address) as connection:
            connection.sendall(hello)
            time.sleep(0.5)

    results = together([process(address, 0, 3, timeout=60), dies], SLACK)
    all_say(results[:1], (1,), "process 1 (host-b, pid 7) came and went away")


def test_process_0_goes_away_while_others_wait(address: str) -> None:
    def dies(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b'{"welcome": 1}\n')

    with socket.create_server(parse_address(address)) as server:
        results = together([lambda: dies(server), process(address, 1, 2, timeout=60)], SLACK)
    all_say(results[1:], (0,), "process 0 of 2", "gave no outcome")


def test_two_processes_with_the_same_id(address: str) -> None:
    results = together([process(address, which, 3, timeout=60) for which in (0, 1, 1)], SLACK)
    all_say(results, (1,), "two processes say that they are process 1", f"pid {os.getpid()}")


def test_another_number_of_processes(address: str) -> None:
    results = together([process(address, 0, 2), process(address, 1, 3)], SLACK)
    all_say(results, (1,), "process 1 is one of 3 processes, process 0 one of 2")


def test_another_mesh(address: str) -> None:
    meshes = ({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
    results = together([process(address, i, 2, mesh=mesh) for i, mesh in enumerate(meshes)], SLACK)
    all_say(results, (1,), "the mesh: process 1 has fsdp=4,tp=1, process 0 has fsdp=2,tp=2.")


def test_who_differs_from_the_most_is_named(address: str) -> None:
    meshes = [{"sp": 8 if i == 0 else 4} for i in range(5)]
    results = together([process(address, i, 5, mesh=mesh) for i, mesh in enumerate(meshes)], SLACK)
    all_say(results, (0,), "the mesh: process 0 has sp=8, processes 1-4 have sp=4.")


def test_meshes_that_differ_in_types_or_in_the_order_of_devices() -> None:
    auto, explicit = (jax.sharding.AxisType.Auto,) * 2, (jax.sharding.AxisType.Explicit,) * 2
    devices = np.array(jax.devices()).reshape(2, 4)
    swapped = devices.copy()
    swapped[1, 2:] = devices[1, :1:-1]
    mesh = jax.sharding.Mesh(devices, ("sp", "tp"), axis_types=auto)
    one, typed, reordered = (
        facts_of(m, {})
        for m in (
            mesh,
            jax.sharding.Mesh(devices, ("sp", "tp"), axis_types=explicit),
            jax.sharding.Mesh(swapped, ("sp", "tp"), axis_types=auto),
        )
    )
    assert compare({0: one, 1: facts_of(jax.sharding.Mesh(devices, ("sp", "tp"), axis_types=auto), {})}) is None
    assert "process 1 has sp=2(explicit),tp=4(explicit), process 0 has sp=2,tp=4." in str(compare({0: one, 1: typed}))
    named, text = compare({0: one, 1: one, 2: reordered}) or ((), "")
    assert named == (2,)
    assert "the mesh at sp=1, tp=2: process 2 has device 7, processes 0, 1 have device 6;" in text
    assert "the mesh at sp=1, tp=3: process 2 has device 6" in text
    assert "sp=1, tp=1" not in text


def test_declarations_that_differ(address: str) -> None:
    metadata = OperationMetadata(operation_configs={"vanilla": {"block_q": 128}}, mesh={"fsdp": 2})
    other = metadata.replace(operation_configs={"vanilla": {"block_q": 256}})
    results = together(
        [process(address, i, 2, agree={"attention": m, "step": 3}) for i, m in enumerate((metadata, other))], SLACK
    )
    all_say(
        results,
        (1,),
        "agree['attention']['operation_configs']['vanilla']['block_q']: process 1 has 256, process 0 has 128.",
    )
    assert "step" not in str(results[0])


def test_plans_that_differ(address: str) -> None:
    attend, x = (
        OperationRegistry.create("vanilla", OperationMetadata()),
        jax.ShapeDtypeStruct((2, 8, 2, 8), jnp.float32),
    )
    plans = attend.plan(x, x, x, causal=True), attend.plan(x, x, x, causal=False)
    assert together([process(address, i, 2, agree={"plan": plans[0]}) for i in range(2)], SLACK) == [None, None]
    results = together([process(address, i, 2, agree={"plan": plans[i]}) for i in range(2)], SLACK)
    all_say(results, (1,), "agree['plan']['mask']: process 1 has")


def test_only_the_first_differences_are_told() -> None:
    named, text = compare({i: {str(n): "x" * 500 if i else "y" for n in range(9)} for i in range(2)}) or ((), "")
    assert named == (1,)
    assert "4: process 1 has" in text
    assert "; and 4 more." in text
    assert len(text) < 2000
    assert "process 1 has nothing" in str(compare({0: {"a": "1"}, 1: {}}))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"timeout": 0}, InputError, "timeout=0; wanted seconds, above 0"),
        ({"timeout": float("inf")}, InputError, "timeout=inf"),
        ({"address": "10.0.0.1"}, InputError, "wanted HOST:PORT"),
        ({"address": "host:99999"}, InputError, "wanted HOST:PORT"),
        ({"address": None}, InputError, "no address for 2 processes"),
        ({"process_id": 2}, InputError, "process_id=2 of num_processes=2"),
        ({"process_id": None}, InputError, "give both, or neither"),
        ({"agree": {"x": object()}}, InputTypeError, r"agree\['x'\]: .*not JSON serializable"),
    ],
)
def test_arguments_without_a_meaning(changes: Any, error: type[Exception], text: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    arguments = {"address": "127.0.0.1:9", "process_id": 1, "num_processes": 2, "timeout": 1.0} | changes
    with pytest.raises(error, match=text):
        check_processes(**arguments)


def test_the_address_of_the_environment(address: str, monkeypatch: Any) -> None:
    host, port = parse_address(address)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"{host}:{port - 1}")
    (result,) = together([lambda: check_processes(process_id=1, num_processes=2, timeout=0.2)], SLACK)
    all_say([result], (0,), f"process 0 of 2, at {address}, was not reached")
    assert parse_address("[::1]:80") == ("::1", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"


def test_one_process_has_nobody_to_ask() -> None:
    mesh = jax.make_mesh((8,), ("sp",))
    check_processes(mesh, {"step": 1})
    with watch_processes(mesh):
        pass
    with pytest.raises(InputTypeError, match="agree"):
        check_processes(mesh, {"step": object()})
    # Who forgot jax.distributed.initialize is alone, and would find that all agree.
    with pytest.raises(ProcessError, match=r"process_id=0, num_processes=2, and jax says that this is process 0 of 1"):
        check_processes(mesh, process_id=0, num_processes=2, address="127.0.0.1:9")


def test_without_a_mesh_jaxs_backend_is_not_started() -> None:
    """So that it can stand before jax.distributed.initialize, which refuses to come after."""
    code = (
        "import jax; from attnops import check_processes; check_processes(process_id=0, num_processes=1);"
        f"jax.distributed.initialize('127.0.0.1:{free_port()}', 1, 0); print(jax.process_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([3], "process 3"),
        ([1, 0], "processes 0, 1"),
        ([0, 1, 2], "processes 0-2"),
        ([7, 1, 5, 6, 9], "processes 1, 5-7, 9"),
    ],
)
def test_names(processes: list[int], text: str) -> None:
    assert by_name(processes) == text


@contextmanager
def dying_member(address: str, which: int, count: int) -> Iterator[None]:
    """A process that meets the others and is gone after the block, without a goodbye."""
    place = Place(which, count, parse_address(address))
    channels = meet(place, facts_of(None, {}), 30.0, compare)
    try:
        yield
    finally:
        for channel in channels.values():
            channel.close()


@pytest.mark.parametrize("dead", [0, 2])
def test_who_is_lost_while_others_compute_is_named(address: str, dead: int, caplog: Any) -> None:
    def dies() -> None:
        with dying_member(address, dead, 3):
            time.sleep(0.2)

    def computes(which: int) -> None:
        with watch_processes(process_id=which, num_processes=3, address=address):
            time.sleep(0.4)
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed\nmore")

    alive = [p for p in range(3) if p != dead]
    results = together([dies, *(lambda p=p: computes(p) for p in alive)], SLACK)[1:]
    all_say(results, (dead,), f"process {dead} of 3 was lost", "connection", "Gloo AllGather failed")
    assert all(isinstance(r.__cause__, jax.errors.JaxRuntimeError) for r in results)
    assert f"process {dead} of 3 was lost" in caplog.text


def test_who_leaves_with_an_error_of_its_own_is_named_with_it(address: str) -> None:
    def fails() -> None:
        with watch_processes(process_id=1, num_processes=3, address=address):
            raise ValueError("a batch of the\nwrong shape")

    def computes(which: int) -> None:
        with watch_processes(process_id=which, num_processes=3, address=address):
            time.sleep(0.4)
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed")

    own, *results = together([fails, lambda: computes(0), lambda: computes(2)], SLACK)
    assert isinstance(own, ValueError)
    all_say(results, (1,), "(process 1 left with ValueError: a batch of the wrong shape)")


def test_an_error_that_no_loss_explains_stays_what_it_is(address: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("attnops.sharding.watch._SETTLE", 0.3)

    def computes() -> None:
        with watch_processes(process_id=0, num_processes=2, address=address):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def idles() -> None:
        with watch_processes(process_id=1, num_processes=2, address=address):
            time.sleep(1)

    first, second = together([computes, idles], SLACK)
    assert type(first) is jax.errors.JaxRuntimeError
    assert second is None
    threads = [t.name for t in threading.enumerate()]
    assert "attnops-watch" not in threads


def test_who_leaves_in_peace_is_not_lost(address: str, caplog: Any) -> None:
    def ends() -> None:
        with watch_processes(process_id=1, num_processes=2, address=address):
            sys.exit(0)

    def idles() -> None:
        with watch_processes(process_id=0, num_processes=2, address=address):
            time.sleep(0.5)

    def exits() -> None:
        with pytest.raises(SystemExit):
            ends()

    assert together([exits, idles], SLACK) == [None, None]
    assert not caplog.text


class Output:
    """What jax.block_until_ready waits for: ready after some seconds, or failed."""

    def __init__(self, seconds: float = 0.0, error: str = "") -> None:
        self.seconds, self.error = seconds, error

    def block_until_ready(self) -> Output:
        time.sleep(self.seconds)
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)
        return self


def test_waiting_for_results(address: str) -> None:
    def steps(which: int) -> list[int]:
        with watch_processes(process_id=which, num_processes=3, address=address) as watch:
            return [len(watch.wait([Output(0.01), jnp.ones(2)], 20)) for _ in range(5)]

    assert together([lambda which=which: steps(which) for which in range(3)], SLACK) == [[2] * 5] * 3
    with watch_processes() as watch:
        assert watch.wait(3) == 3
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
            watch.wait(Output(error="out of memory"))
        with pytest.raises(InputError, match="timeout=0"):
            watch.wait(3, timeout=0)
        with pytest.raises(ProcessError, match=r"process 0 of 1 waited 0.1 s in its wait 3, as all others do"):
            watch.wait(Output(0.5), timeout=0.1)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_computation_that_hangs_because_of_a_loss(address: str, dead: int) -> None:
    def dies() -> None:
        with dying_member(address, dead, 3):
            time.sleep(0.2)

    def hangs(which: int) -> None:
        with watch_processes(process_id=which, num_processes=3, address=address) as watch:
            watch.wait(Output(SLACK))

    alive = [p for p in range(3) if p != dead]
    results = together([dies, *(lambda p=p: hangs(p) for p in alive)], SLACK)[1:]
    all_say(results, (dead,), f"process {dead} of 3 was lost", "connection", "the computation would never end")


@pytest.mark.parametrize("late", [0, 1])
def test_who_stays_behind_is_named(address: str, late: int) -> None:
    def computes(which: int) -> None:
        with watch_processes(process_id=which, num_processes=3, address=address) as watch:
            for step in range(4):
                if step == 3 and which == late:
                    time.sleep(2)
                watch.wait(Output(SLACK if step == 3 else 0), timeout=1)

    results = together([lambda which=which: computes(which) for which in range(3)], SLACK)
    tired = [r for which, r in enumerate(results) if which != late]
    all_say(tired, (late,), f"process {late} stayed behind: process", f"process {late} has come to wait 3")
    # ... and who comes late hears why nobody is there.
    assert results[late].processes != (late,)
    assert f"left with ProcessError: process {late} stayed behind" in str(results[late])
