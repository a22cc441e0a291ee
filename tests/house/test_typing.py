"""The names that a type checker knows are those that Attention accepts, and both checkers accept what the manual begins with."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from attnops import Attention, OperationMetadata, Plan, dot_product_attention
from attnops.call_arguments import CALL_ARGUMENTS, CALL_OPTIONS, CallArguments, PlainArguments
from attnops.operators.api.attention_types import ArrayOperation, AttentionKeywords
from attnops.registry import OperationRegistry
from attnops.registry.metadata import METADATA_ARGUMENTS

OWN = {name: OperationRegistry.get(name) for name in get_args(ArrayOperation)}


def test_the_operations_are_those_over_arrays() -> None:
    every = {name: OperationRegistry.get(name) for name in OperationRegistry.names()}
    own = {name for name, op in every.items() if op.__module__.startswith("attnops.")}
    assert set(OWN) == {n for n in own if every[n].family == "attention" and every[n].keys_in == "arrays"}


def test_the_keywords_are_those_that_are_accepted() -> None:
    configs = {field for op in OWN.values() for field in op.config.model_fields} - {"operation", "schema_version"}
    accepted = {"mask", "score", *CALL_OPTIONS, *METADATA_ARGUMENTS, "metadata", *configs}
    assert set(AttentionKeywords.__annotations__) == accepted
    assert Attention("splash", block_q=256).declaration.operation == "splash"


def test_plain_arguments_lack_only_what_says_what_is_returned() -> None:
    assert {*CallArguments.__annotations__} - {*PlainArguments.__annotations__} == {"return_weights", "return_lse"}
    assert {*CALL_ARGUMENTS} == {"query", "key", "value", *CallArguments.__annotations__}


PUBLIC = [
    *(getattr(Attention, name) for name in ("__init__", "__call__", "plan", "explain", "declared")),
    *(getattr(Plan, name) for name in ("draw", "placement_picture", "explain", "to_dict")),
    dot_product_attention,
]  # fmt: skip


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__qualname__)
def test_annotations_can_be_read_in_a_running_program(function: Any) -> None:
    assert "return" in get_type_hints(function)
    assert not [x for x in get_type_hints(function).values() if isinstance(x, str)]


def test_fields_of_a_declaration_can_be_read_in_a_running_program() -> None:
    hints = get_type_hints(OperationMetadata)
    assert hints.keys() >= {"partition_axis", "partition_manager", "mesh", "runtime_dtype"}
    assert not [x for x in hints.values() if isinstance(x, str)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_mypy_and_pyright_accept_the_readme_and_the_start_page_in_strict_mode() -> None:
    tool = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_types.py"))
    tool["link"]()
    assert tool["check_written"]() == 0
