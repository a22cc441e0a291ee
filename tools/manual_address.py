"""A hook of mkdocs: the manual's own address and its link to the source, from packaging/address.toml.

With the placeholder that is there until the project has a public address, the manual has neither.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ADDRESS = Path(__file__).resolve().parents[1] / "packaging" / "address.toml"


def on_config(config: Any) -> Any:
    where = tomllib.loads(ADDRESS.read_text("utf-8"))
    if "example.invalid" not in where["repository"]:
        config.repo_url = where["repository"]
        config.edit_uri = f"blob/{where['branch']}/docs/"
        config.site_url = where["documentation"]
    return config
