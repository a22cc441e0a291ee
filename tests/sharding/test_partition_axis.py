"""attnops' PartitionAxis against eformer's: the same fields, values, specs and hashes, and eformer's own taken as well."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from eformer import common_types
from eformer.escale import PartitionAxis as EformerAxis
from eformer.escale import PartitionManager
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from attnops import ConfigError, OperationMetadata, PartitionAxis
from attnops.sharding import LAYOUTS, MODES, declared_axes, resolve_rules
from attnops.sharding.partition_axis import NOT_GIVEN
from attnops.sharding.rules import _SEMANTIC

NAMES = [field.name for field in dataclasses.fields(EformerAxis)]
ONE = st.sampled_from(["a", "b", "tp", "sp", "x.y"])
AXES = st.one_of(
    st.none(), ONE, st.lists(ONE, unique=True, max_size=3), st.lists(ONE, unique=True, max_size=3).map(tuple)
)
PARALLEL = [name for name in NAMES if name.endswith("_parallel_axis")]
FIELDS = st.fixed_dictionaries({}, optional={n: ONE if n in PARALLEL else AXES for n in NAMES})


@pytest.fixture
def _clean_eformer() -> Any:
    yield
    EformerAxis.clear_registered_axes()


def _values(axes: Any) -> dict[str, Any]:
    values = {name: getattr(axes, name) for name in NAMES}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def test_names_order_and_modes_are_eformers() -> None:
    assert [field.name for field in dataclasses.fields(PartitionAxis)] == NAMES
    assert _values(PartitionAxis()) == _values(EformerAxis())
    assert repr(PartitionAxis()) == repr(EformerAxis())
    modes = ("MODE_TRAIN", "MODE_PREFILL", "MODE_DECODE", "MODE_INSERT")
    assert tuple(getattr(common_types, name) for name in modes) == MODES


def test_semantic_axes_are_eformers_and_so_are_their_attributes() -> None:
    for semantic, attribute, generating in _SEMANTIC.values():
        assert EformerAxis._SEMANTIC_MAP[semantic] == attribute
        assert EformerAxis._STANDARD_TO_GENERATION_ATTR_MAP.get(attribute, attribute) == generating


@given(FIELDS, st.sampled_from(MODES), st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from([0, 1, 2]))
def test_fields_specs_and_hashes_are_those_of_eformer(
    fields: dict[str, Any], mode: str, layout: str, mni: bool, aux_ndim: int
) -> None:
    ours, theirs = PartitionAxis(**fields), EformerAxis(**fields)
    assert _values(ours) == _values(theirs)
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert pickle.loads(pickle.dumps(ours)) == ours
    got = resolve_rules(ours, mode, layout, qkv_mni_sharding=mni, aux_ndim=aux_ndim)
    assert got == resolve_rules(theirs, mode, layout, qkv_mni_sharding=mni, aux_ndim=aux_ndim)
    assert declared_axes(ours) == declared_axes(theirs)


@given(FIELDS, FIELDS)
def test_different_fields_are_different(some: dict[str, Any], others: dict[str, Any]) -> None:
    same = _values(EformerAxis(**some)) == _values(EformerAxis(**others))
    assert (PartitionAxis(**some) == EformerAxis(**others)) is same
    assert (EformerAxis(**some) == PartitionAxis(**others)) is same
    assert (PartitionAxis(**some) == PartitionAxis(**others)) is same


def test_it_equals_no_other_object() -> None:
    assert PartitionAxis() != "PartitionAxis()"
    assert PartitionAxis() != _values(PartitionAxis())
    assert PartitionAxis() != dataclasses.make_dataclass("PartitionAxis", [])()


@given(FIELDS)
def test_metadata_of_either_are_equal(fields: dict[str, Any]) -> None:
    ours = OperationMetadata(partition_axis=PartitionAxis(**fields))
    theirs = OperationMetadata(partition_axis=EformerAxis(**fields))
    from_dict = OperationMetadata(partition_axis=fields)
    by_manager = OperationMetadata(partition_manager=PartitionManager(EformerAxis(**fields)))
    assert ours == theirs == from_dict == by_manager
    assert len({ours, theirs, from_dict, by_manager}) == 1
    assert ours.to_json() == theirs.to_json() == from_dict.to_json()
    assert OperationMetadata.from_json(theirs.to_json()) == theirs
    assert OperationMetadata(partition_axis=PartitionAxis(**fields), partition_manager=theirs.partition_manager) == ours


def test_metadata_returns_what_was_given() -> None:
    theirs = EformerAxis(head_axis="model")
    for metadata in (
        OperationMetadata(partition_axis=theirs),
        OperationMetadata(partition_manager=PartitionManager(theirs)),
        OperationMetadata(base_config={"partition_axis": theirs}),
        OperationMetadata(partition_axis=theirs).replace(strict=True),
    ):
        assert metadata.partition_axis is theirs
    renamed = OperationMetadata(partition_axis=theirs).replace(sequence_axis_name="cp").partition_axis
    assert type(renamed) is EformerAxis
    assert renamed == EformerAxis(head_axis="model", sequence_parallel_axis="cp")
    ours = PartitionAxis(head_axis="model")
    assert OperationMetadata(partition_axis=ours).partition_axis is ours
    for metadata in (OperationMetadata(), OperationMetadata(partition_axis={"head_axis": "model"})):
        assert type(metadata.partition_axis) is PartitionAxis


def test_the_manager_of_any_metadata_is_eformers() -> None:
    manager = OperationMetadata(partition_axis={"head_axis": "model"}).partition_manager
    assert isinstance(manager, PartitionManager)
    assert manager.paxis == EformerAxis(head_axis="model")
    with pytest.raises(ConfigError, match=r"partition_manager='tp'; wanted an eformer PartitionManager"):
        OperationMetadata(partition_manager="tp")  # type: ignore[arg-type]


@pytest.mark.usefixtures("_clean_eformer")
@pytest.mark.parametrize(
    ("rule", "train", "decode"), [("cluster", "cluster", "cluster"), ("head_axis", "h", "H"), (None, None, None)]
)
def test_axes_registered_with_eformer_apply_to_both(rule: Any, train: Any, decode: Any) -> None:
    EformerAxis.register(common_types.KV_HEAD, rule, override=True)
    for kind in (PartitionAxis, EformerAxis):
        metadata = OperationMetadata(partition_axis=kind(head_axis="h", decode_head_axis="H"))
        assert metadata.get_shardings("train").key == P(("fsdp", "dp"), "sp", train, None)
        assert metadata.get_shardings("decode").key == P(("fsdp", "dp"), "sp", decode, None)


@pytest.mark.parametrize("marker", [NOT_GIVEN, common_types.NOT_GIVEN], ids=["attnops", "eformer"])
def test_not_given_is_the_default_where_a_field_follows_from_others(marker: Any) -> None:
    axes = PartitionAxis(batch_axis=marker, head_axis="h", decode_head_axis=marker)
    assert axes == EformerAxis(head_axis="h")
    assert OperationMetadata(partition_axis={"batch_axis": marker, "head_axis": "h"}).partition_axis == axes
    assert OperationMetadata(base_config={"partition_axis": marker}) == OperationMetadata()
    for name in ("expert_gate_axis", "decode_query_sequence_axis", "tensor_parallel_axis"):
        with pytest.raises(ConfigError, match=rf"partition_axis\.{name} is not given"):
            PartitionAxis(**{name: marker})


def test_it_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PartitionAxis().head_axis = "model"  # type: ignore[misc]
