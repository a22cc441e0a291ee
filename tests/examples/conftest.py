"""The examples, imported from their folders under names of their own."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    """Load examples/NAME/main.py."""

    def load(name: str) -> ModuleType:
        known = f"example_{name}"
        if known not in sys.modules:
            spec = importlib.util.spec_from_file_location(known, EXAMPLES / name / "main.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[known] = module
        return sys.modules[known]

    return load
