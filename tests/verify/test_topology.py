"""Described topologies, asked for by several threads at once."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_threads_that_ask_first_at_the_same_time() -> None:
    """In a process of its own: libtpu is loaded once a process."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
import jax
from attnops.verify.topology import described_mesh

start = threading.Barrier(4)
def ask(name):
    start.wait()
    return described_mesh(name).size

with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(ask, ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "v4:2x2x1"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[4, 4, 4, 8]"  # two devices a chip on v4
