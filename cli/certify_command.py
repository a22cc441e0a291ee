"""The options of `attnops certify`. The implementation is imported only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as o

__all__ = ["certify"]

Target = Annotated[
    str | None,
    typer.Argument(
        help="An operation (splash), an implementation (splash.forward_tpu), module:function, or a library's function by name "
        "(jax.nn, flax, torch). Without it, list the names.",
        show_default=False,
    ),
]
As = Annotated[str | None, o.optional("--as", "How module:function is called: a convention's name, or a .toml file.")]
Cases = Annotated[
    int, typer.Option("--cases", min=0, help="Most cases in which features meet, after each feature alone.")
]
OneFeature = Annotated[
    list[str] | None,
    o.optional("--feature", "Try only this feature or factor, such as window.left or window; repeatable."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Each feature alone, and ten cases in which they meet.")]
Seconds = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a case may take; more is a wrong case.")]
Html = Annotated[Path | None, o.optional("--html", "Write a page to this file.")]
Badge = Annotated[Path | None, o.optional("--badge", "Write a badge (SVG) to this file.")]


def certify(
    target: Target = None,
    convention: As = None,
    seed: o.Seed = 0,
    cases: Cases = 200,
    feature: OneFeature = None,
    quick: Quick = False,
    timeout: Seconds = 60.0,
    html: Html = None,
    badge: Badge = None,
    as_json: o.Json = False,
) -> None:
    """Find out what a function of attention gets right, feature by feature, and the smallest case of what it gets wrong."""
    from ..errors import ConfigError
    from .certify import CertifyOptions, check_files, list_names, print_certificate, run_certify, write_files
    from .json_output import print_json

    if target is None:
        if convention or feature or quick or html or badge or as_json:
            raise ConfigError("no target; `attnops certify` lists the names.")
        list_names()
        return
    check_files(html, badge)
    certificate = run_certify(CertifyOptions(target, convention, seed, cases, tuple(feature or ()), quick, timeout))
    written = write_files(certificate, html, badge)
    if as_json:
        print_json(certificate.to_dict())
    else:
        print_certificate(certificate, written)
    if certificate.wrong:
        raise typer.Exit(1)
    if certificate.features[0].verdict == "refused":
        raise ConfigError(
            f"{target} refuses plain attention, and nothing is certified: {certificate.features[0].why}; wanted a convention "
            "that says how it is called, on a device where it runs."
        )
