"""What a message tells the user to install is an extra of the distribution that is installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from attnops.adapters.extra import extra
from attnops.distribution import _distribution, with_extras


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ({"attnops"}, "attnops"),
        ({"attnops-core"}, "attnops-core"),
        ({"attnops", "attnops-core"}, "attnops"),
        (set(), "attnops"),
    ],
)
def test_with_extras(installed: set[str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.2.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    _distribution.cache_clear()
    try:
        assert with_extras("tpu") == f"{wanted}[tpu]"
        assert with_extras("cuda-compile", "cuda-sass") == f"{wanted}[cuda-compile,cuda-sass]"
        with pytest.raises(ModuleNotFoundError, match=rf"pip install '{wanted}\[nowhere\]'"), extra("nowhere"):
            raise ModuleNotFoundError(name="nowhere")
    finally:
        _distribution.cache_clear()
