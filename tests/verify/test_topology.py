"""Described topologies, asked for by several threads at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
from jax.experimental import topologies

from attnops.verify.topology import described_mesh


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_threads_ask_libtpu_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that ask first at the same time would both load it, and one be refused."""
    real, inside, most = topologies.get_topology_desc, 0, 0
    lock = threading.Lock()

    def watched(**call: Any) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.05)
        try:
            return real(**call)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(topologies, "get_topology_desc", watched)
    with ThreadPoolExecutor(4) as pool:
        meshes = list(pool.map(described_mesh, ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "v4:2x2x1"]))
    assert [mesh.size for mesh in meshes] == [4, 4, 4, 8]  # two devices a chip on v4
    assert most == 1
