"""The version, and the distribution that this package was installed from: attnops, or attnops-core, which is without eformer."""

from __future__ import annotations

import functools

__all__ = ["VERSION", "with_extras"]

VERSION = "0.2.0"


def with_extras(*names: str) -> str:
    """This distribution with extras, as pip is told: attnops[tpu]. With another distribution's name pip would install both."""
    return f"{_distribution()}[{','.join(names)}]"


@functools.cache
def _distribution() -> str:
    import importlib.metadata  # 20 ms, which `import attnops` needn't wait for

    for name in ("attnops", "attnops-core"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return "attnops"
