"""suite: the cases of a certificate as parametrised pytest tests of one's own function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError, UnknownNameError, nearest, shown
from .convention import Convention, convention_named
from .examine import Examination
from .families import family_of, runner_of
from .features import FEATURES, Feature
from .source import Subject

__all__ = ["chosen_features", "suite"]


def chosen_features(
    names: Sequence[str], known: Sequence[Feature] = FEATURES, family: str = "attention"
) -> tuple[Feature, ...]:
    """The features of a family by names of features or factors; all for none. Errors: UnknownNameError."""
    every = dict.fromkeys([one.name for one in known] + [one.factor for one in known])
    for name in names:
        if name not in every:
            raise UnknownNameError(
                f"no feature {shown(name)} of family {family}; `attnops certify` lists them.{nearest(name, every)}"
            )
    return tuple(one for one in known if not names or one.name in names or one.factor in names)


def _imported_as(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """(a function's name, the line that imports it): of the module where it or what it wraps is defined, if that has it."""
    for of in (function, getattr(function, "func", None)):
        module = str(getattr(of, "__module__", ""))
        for name, value in vars(sys.modules.get(module, object)).items():
            if value is function and name.isidentifier():
                return name, (f"from {module} import {name} as f",)
    name = str(getattr(function, "__qualname__", "f"))
    return name, (f"# here f is {name}, which no module has by a name",)


def suite(
    function: Callable[..., Any],
    convention: str | Convention,
    *,
    features: Sequence[str] = (),
    without: Sequence[str] = (),
    pairs: int = 20,
    seed: int = 0,
) -> Callable[..., None]:
    """A test function for pytest with one case for each feature, without and with its gradient, and `pairs` in which they meet.

    convention: how `function` is called: a name that `--as` takes, a TOML file, or a Convention. features: only these features or
    factors; without: not these. A case that the function refuses, with any exception, is skipped with its message; a wrong one
    fails with a script of the smallest case. Errors: ConfigError, UnknownNameError.
    """
    import pytest

    declared = convention if isinstance(convention, Convention) else convention_named(convention)
    if not callable(function):
        raise ConfigError(f"suite got {shown(function)}; wanted a function.")
    name, define = _imported_as(function)
    subject = Subject(name, declared, define)
    family = family_of(subject)
    left_out = chosen_features(without, family.features, declared.family) if without else ()
    chosen = chosen_features(features, family.features, declared.family)
    wanted = [one for one in chosen if one not in left_out and family.inexpressible(one) is None]
    run = runner_of(Subject(name, declared, ()), function)
    cases: dict[str, Any] = {}
    for one, case in family.alone(wanted, seed, False):
        of = "plain" if one is None else one.name
        cases[of if of not in cases else f"{of}-gradient"] = case
    for n, case in enumerate(family.paired(wanted, seed, pairs)):
        cases[f"together-{n + 1}"] = case

    @pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))
    def test(case: Any) -> None:
        result = run(case)
        if result.verdict == "refused":
            pytest.skip(result.what)
        if result.verdict == "wrong":
            examination = Examination(subject, family, run)
            examination.record(case, result)
            smallest = examination.wrong_cases[0]
            pytest.fail(f"{smallest.what}: {', '.join(smallest.features)}\n\n{smallest.script}", pytrace=False)

    test.__doc__ = f"{name}, called as {declared.name}."
    return test
