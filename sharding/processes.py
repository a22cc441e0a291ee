"""Several processes of one job: do all agree before they run, and who was lost while they ran."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import InputError, ProcessError, shown
from .agreement import compare, facts_of
from .channel import Channel, parse_address
from .mesh import AnyMesh
from .rendezvous import Place, meet
from .watch import Watch

__all__ = ["check_processes", "watch_processes"]


def check_processes(
    mesh: AnyMesh | Mapping[str, int] | None = None,
    agree: Mapping[str, Any] | None = None,
    *,
    address: str | None = None,
    timeout: float = 60.0,
    process_id: int | None = None,
    num_processes: int | None = None,
) -> None:
    """Return when every process of the job is here and all have the same mesh; else raise, in each of them, in bounded time.

    Compared are axis names, sizes and types of `mesh`, the ids of its devices in their order, their platform, the versions
    of jax and attnops, and the values of `agree`: JSON values, or what has `to_dict()`, as metadata and plans do.

    `address` is HOST:PORT, where process 0 listens and the others can reach it; not the port of jax's coordinator. None
    takes the host of the environment's JAX_COORDINATOR_ADDRESS and the port after its. `timeout` is in seconds.
    `process_id` and `num_processes` are jax's unless given; given and without a mesh, nothing here starts jax's backend,
    so that a process that never came is named before `jax.distributed.initialize`. One process has nobody to ask, and returns.

    Errors: ProcessError, within `timeout` and 2 seconds of the call, that names the processes which are missing, went away,
    have the same id, or disagree, and on what. InputError, InputTypeError for arguments without a meaning.
    """
    for channel in _meet(mesh, agree, address, timeout, process_id, num_processes)[1].values():
        channel.close()


@contextmanager
def watch_processes(
    mesh: AnyMesh | Mapping[str, int] | None = None,
    agree: Mapping[str, Any] | None = None,
    *,
    address: str | None = None,
    timeout: float = 60.0,
    process_id: int | None = None,
    num_processes: int | None = None,
) -> Iterator[Watch]:
    """Check as check_processes does, then stay connected: who is lost inside the `with` block is named.

    The block gets a watch: `outputs = watch.wait(step(...))` waits for results, and ends with a ProcessError when a process
    is lost, though the computation hang; with a `timeout` also when one stays behind. A jax.errors.JaxRuntimeError that
    leaves the block because of a loss, as those of gloo do, becomes a ProcessError too. A loss is logged when it happens
    (logger "attnops"). JAX computes asynchronously: wait for results inside the block.

    Errors: those of check_processes; ProcessError, from the computation's error, with the ids of who was lost.
    """
    watch = Watch(*_meet(mesh, agree, address, timeout, process_id, num_processes))
    left_with: BaseException | None = None
    try:
        yield watch
    except jax.errors.JaxRuntimeError as error:
        left_with = error
        if not watch.losses():
            raise
        left_with = watch.loss(f"it failed with {next(iter(str(error).splitlines()), 'no text')}")
        raise left_with from error
    except BaseException as error:
        left_with = None if isinstance(error, SystemExit) and not error.code else error
        raise
    finally:
        watch.leave(left_with)


def _meet(
    mesh: AnyMesh | Mapping[str, int] | None,
    agree: Mapping[str, Any] | None,
    address: str | None,
    timeout: float,
    process_id: int | None,
    num_processes: int | None,
) -> tuple[Place, dict[int, Channel]]:
    """Who this process is, and channels to the others when all have come and agree; none in a job of one process."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InputError(f"timeout={shown(timeout)}; wanted seconds, above 0.")
    if (process_id is None) != (num_processes is None):
        raise InputError(f"process_id={process_id}, num_processes={num_processes}; give both, or neither.")
    if num_processes is None or isinstance(mesh, Mesh):
        here = jax.process_index(), jax.process_count()
        if num_processes is not None and (process_id, num_processes) != here:
            given = f"process_id={process_id}, num_processes={num_processes}"
            text = f"{given}, and jax says that this is process {here[0]} of {here[1]}"
            raise ProcessError(f"{text}; call jax.distributed.initialize with the same numbers first.", [here[0]])
        process_id, num_processes = here
    if not isinstance(process_id, int) or not 0 <= process_id < num_processes:
        raise InputError(
            f"process_id={shown(process_id)} of num_processes={num_processes}; wanted 0 to num_processes - 1."
        )
    facts = facts_of(mesh, agree or {})
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        at = parse_address(address)
    elif coordinator:
        at = parse_address(coordinator)
        at = at._replace(port=at.port + 1)
    elif num_processes == 1:
        return Place(0, 1, parse_address("localhost:1")), {}
    else:
        raise InputError(
            f"no address for {num_processes} processes to meet at, and JAX_COORDINATOR_ADDRESS isn't set; give "
            "address='HOST:PORT', a host of process 0 and a port that is free there."
        )
    place = Place(process_id, num_processes, at)
    return place, meet(place, facts, float(timeout), compare) if num_processes > 1 else {}
