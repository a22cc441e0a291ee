"""plan(): pure and cached, every reason kept, the policies, and the same decision as text and as JSON."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_operations as toy
from eformer.escale import PartitionAxis
from jax.sharding import AbstractMesh, AxisType

from attnops.compat import abstract_device
from attnops.errors import ConfigError, FallbackWarning, RefusedError, ShardingError
from attnops.masks import Causal, SlidingWindow
from attnops.operators.splash import Splash
from attnops.planning import ALL_FEATURES, FEATURES, METHODS, Policy, plan
from attnops.registry import OperationMetadata
from attnops.sharding import AttnShardingRules

TPU = abstract_device(kind="TPU v5p", cores=None, platform="tpu")


def pod(sizes=(4, 8), names=("fsdp", "tp")):
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=TPU)


def arrays(batch=2, q_len=8, heads=4, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((batch, q_len, heads, dim)), jnp.float32) for _ in range(3))


THREE_REASONS = {
    "consumes": ALL_FEATURES - {"bias", "sinks"},
    "rules": (
        toy.rule("toy.length", lambda p, c: p.q_len % 3 == 0, "q_len={p.q_len} is not a multiple of 3", "Pad to 9."),
        toy.rule("toy.fine", lambda p, c: True),
        toy.rule("toy.block", lambda p, c: c.block == 16, "block={c.block}", "Declare block=16, not {c.block}."),
    ),
}


def test_all_reasons_are_kept_with_the_values_met():
    attend = toy.make({"forward_cpu"}, **THREE_REASONS)(OperationMetadata(operation_configs={}, fallback="allow"))
    extras = {
        "bias": jax.ShapeDtypeStruct((1, 1, 8, 8), jnp.float32),
        "softmax_aux": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    decided = attend.plan(*toy.shapes(), **extras)
    assert decided.kind == "fallback"
    (rejected,) = decided.rejected
    assert rejected.implementation == "toy.forward_cpu"
    assert {r.code for r in rejected.reasons} == {"feature.bias", "feature.sinks", "toy.length", "toy.block"}
    by_code = {r.code: r for r in rejected.reasons}
    assert by_code["toy.length"].message == "q_len=8 is not a multiple of 3"
    assert by_code["toy.length"].hint == "Pad to 9."
    assert by_code["toy.block"].hint == "Declare block=16, not None."
    for text in (decided.refusal(), decided.explain()):
        for reason in rejected.reasons:
            assert f"[{reason.code}]" in text
            assert reason.message in text
            assert reason.hint in text


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_a_feature_that_is_not_consumed_is_refused_in_words(feature):
    capability = toy.make({"forward_cpu"}, consumes=ALL_FEATURES - {feature}).capability("forward_cpu")

    class Problem:
        features = frozenset({feature})
        symbolic = frozenset()
        operands = ()

    (reason,) = capability.reasons(Problem(), toy.ToyConfig())
    assert reason.code == f"feature.{feature}"
    assert FEATURES[feature] in reason.message
    assert reason.hint


def test_nothing_can_run():
    native = (toy.rule("toy.native", lambda p, c: False, "never", "Give up."),)
    attend = toy.make({"forward_cpu"}, refusing={"forward_cpu"}, native_rules=native)()
    decided = attend.plan(*toy.shapes())
    assert decided.kind == "refused"
    assert [r.implementation for r in decided.rejected] == ["toy.forward_cpu", "toy.forward_native"]
    assert "REFUSED" in decided.explain()
    with pytest.raises(RefusedError) as error:
        attend(*arrays())
    assert "forward_cpu.never" in str(error.value)
    assert "toy.native" in str(error.value)
    assert isinstance(error.value, NotImplementedError)


# -- policies and warnings -------------------------------------------------------------------------------------------


def test_fallback_warns_once_per_distinct_problem():
    refused = {"refusing": {"forward_cpu"}}
    operation = toy.make({"forward_cpu"}, **refused)
    attend = operation()
    with pytest.warns(FallbackWarning) as caught:
        first = attend(*arrays())
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "toy.forward_native runs instead" in text
    assert "forward_cpu.never" in text
    assert "fallback='allow'" in text
    assert caught[0].filename == __file__  # it points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*arrays(seed=1))
        operation()(*arrays())  # another instance, the same problem
        jax.jit(lambda *qkv: attend(*qkv).attention_outputs)(*arrays())
        attend.plan(*arrays(q_len=16))  # planning doesn't warn
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(*arrays(q_len=16))  # another problem
        attend(*arrays(q_len=16))
        attend(*arrays(q_len=16), mask=SlidingWindow(1, 0))  # and another
    assert [w.category for w in caught] == [FallbackWarning] * 2
    with pytest.warns(FallbackWarning):
        toy.make({"forward_cpu"}, **refused)()(*arrays())  # another operation
    assert first.plan.kind == "fallback"


def test_fallback_allow_says_nothing_and_error_forbids():
    operation = toy.make({"forward_cpu"}, refusing={"forward_cpu"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = operation(OperationMetadata(fallback="allow"))(*arrays())
    assert out.plan.method == "forward_native"
    attend = operation(OperationMetadata(fallback="error"))
    with pytest.raises(RefusedError, match=r"toy.forward_cpu: .*\[forward_cpu.never\]"):
        attend(*arrays())
    assert attend.plan(*toy.shapes()).kind == "refused"


def test_native_and_platform_dispatch_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toy.make()()(*arrays()).plan.kind == "native"
        assert toy.make({"forward_cpu"})()(*arrays()).plan.kind == "platform"


@pytest.mark.parametrize("wrong", [{"fallback": "warm"}, {"kv_heads": None}, {"strict": 1}, {"strict": "no"}])
def test_a_policy_is_checked(wrong):
    with pytest.raises(ConfigError, match="wanted one of"):
        Policy(**wrong)


def test_kv_heads_policy():
    operation, shapes = toy.make({"forward_tpu"}), toy.shapes(heads=16, kv_heads=2)
    decided = operation(OperationMetadata(mesh=pod())).plan(*shapes)
    assert decided.placement.kv_repeat == 4
    assert decided.placement.local.kv_heads == 1
    assert "each kv head repeated 4 times" in decided.explain()
    with pytest.raises(ShardingError, match="2 kv heads"):
        operation(OperationMetadata(mesh=pod(), kv_heads="error")).plan(*shapes)


def test_strict_policy():
    operation = toy.make()
    axis = PartitionAxis(batch_axis="fsdp", query_sequence_axis=None, key_sequence_axis=None)
    fits = toy.shapes(batch=4, heads=8)
    strict = OperationMetadata(mesh=pod(), partition_axis=axis, strict=True)
    assert operation(strict).plan(*fits).placement.fitted.dropped == ()
    with pytest.raises(ShardingError, match="query, dimension batch, axis 'fsdp'"):
        operation(strict).plan(*toy.shapes(batch=3, heads=8))
    loose = operation(strict.replace(strict=False)).plan(*toy.shapes(batch=3, heads=8))
    assert "dropped: axis 'fsdp' of batch" in loose.explain(verbose=True)


# -- purity ----------------------------------------------------------------------------------------------------------


def test_planned_from_shapes_as_from_arrays():
    attend = toy.make({"forward_cpu"})()
    qkv = arrays()
    assert attend.plan(*toy.shapes()) == attend.plan(*qkv) == attend(*qkv).plan


def test_cached():
    attend = toy.make({"forward_cpu"})()
    first = attend.plan(*toy.shapes())
    assert attend.plan(*toy.shapes()) is first
    assert plan(first.operation, first.problem, first.policy) is first
    assert plan(first.operation, first.problem, Policy(fallback="error")) is not first
    assert attend.plan(*toy.shapes(q_len=16)) is not first
    assert hash(first.problem) == hash(attend.plan(*toy.shapes()).problem)


def test_rules_are_asked_once_per_problem():
    asked = []

    def test(problem, config):
        asked.append(problem.q_len)
        return True

    attend = toy.make({"forward_cpu"}, rules=(toy.rule("toy.asked", test),))()
    for _ in range(3):
        attend.plan(*toy.shapes())
    attend(*arrays())
    assert asked == [8]


def test_planning_for_a_pod_runs_nothing_here():
    attend = toy.make({"forward_tpu"})(OperationMetadata(mesh=pod((64, 64))))
    decided = attend.plan(*toy.shapes(batch=64, q_len=131072, heads=128, dim=128, dtype=jnp.bfloat16), mask=Causal())
    assert decided.method == "forward_tpu"
    assert decided.placement.local == (1, 131072, 131072, 2, 2)
    assert decided.placement.fitted["query"].local_bytes == 131072 * 2 * 128 * 2


# -- as text and as JSON ---------------------------------------------------------------------------------------------


def sharded_plan(**metadata):
    configs = {"splash": {"block_q": 128}}
    attend = Splash(OperationMetadata(mesh=pod((2, 4, 2), ("fsdp", "tp", "sp")), operation_configs=configs, **metadata))
    query = jax.ShapeDtypeStruct((2, 1000, 8, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 1000, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 1000), jnp.int32)
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    return attend.plan(query, key, key, logits_soft_cap=30.0, softmax_aux=sinks, q_segment_ids=ids, kv_segment_ids=ids)


def test_explain_says_everything():
    decided = sharded_plan()
    text = decided.explain(verbose=True)
    assert str(decided) == decided.explain()
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert text.splitlines()[0].startswith("splash on tpu (TPU v5p): batch 2, q 1000, kv 1000, 8 heads (2 kv)")
    assert "mesh fsdp=2,tp=4,sp=2" in text
    assert "splash.forward_tpu (the platform's own implementation)" in lines["runs"]
    assert "tpu, from the mesh's devices" in lines["platform"]
    assert "0.125" in lines["scale"]  # 1 / sqrt(64)
    assert "30" in lines["soft"]
    assert "block_q=128 (declared)" in lines["config"]
    assert "(default)" in lines["config"]
    # every one of the ten tensors has its line, present or not
    for tensor in AttnShardingRules._fields:
        assert tensor in lines
    assert "P(fsdp+dp, sp, tp, -) -> P(fsdp, sp, tp, -)  2x1000x8x64 -> 1x500x2x64  125.0 KiB" in lines["query"]
    assert "not in this call" not in lines["query"]
    assert "P(tp)" in lines["softmax_aux"]
    assert "dropped: axis 'dp' of batch" in text
    assert "each kv head repeated 2 times" in text
    assert "gathered along kv_len over sp" in text
    assert "padding" in text


def test_one_screen_says_what_was_chosen_what_is_split_and_what_is_left_out():
    decided = sharded_plan()
    lines = decided.explain().splitlines()
    assert len(lines) < 24
    told = {line.split()[0]: line for line in lines}
    assert told["config"] == "config    block_q=128 (declared)"
    assert "specs     key, value: P(fsdp, sp, tp, -)  2x1000x4x64 -> 1x500x1x64, 62.5 KiB" in lines
    assert "dropped" not in told  # the mesh has no dp: nobody meant it to split anything
    more = told["more"]
    every = len(type(decided.config).model_fields) - 2  # operation and schema_version are no sizes
    assert f"{every - 1} defaults of the config" in more
    assert "scale" in more
    told_notes = sum(line.startswith("note") for line in lines)
    hidden = len(decided.notes) - told_notes
    assert hidden > 0
    assert f"{hidden} note" in more
    loose = toy.make()(OperationMetadata(mesh=pod())).plan(*toy.shapes(batch=3, heads=8))
    assert "dropped   axis 'fsdp' of batch" in loose.explain()  # asked for, and not to be had
    refused = Splash(OperationMetadata(backend="tpu", fallback="error")).plan(*toy.shapes(), return_weights=True)
    assert all(str(reason) in refused.explain() for r in refused.rejected for reason in r.reasons)


def test_to_dict_is_json_and_agrees_with_the_plan():
    decided = sharded_plan()
    data = json.loads(json.dumps(decided.to_dict(), allow_nan=False))
    assert data["operation"] == "splash"
    assert data["implementation"] == "splash.forward_tpu"
    assert data["kind"] == "platform"
    assert (data["platform"], data["device_kind"]) == ("tpu", "TPU v5p")
    assert data["mesh"][1] == {"name": "tp", "size": 4, "kind": "auto"}
    assert set(data["tensors"]) == set(AttnShardingRules._fields)
    query = data["tensors"]["query"]
    assert query["declared"] == "P(fsdp+dp, sp, tp, -)"
    assert query["fitted"] == "P(fsdp, sp, tp, -)"
    assert query["device_shape"] == [1, 500, 2, 64]
    assert query["device_bytes"] == 1 * 500 * 2 * 64 * 2
    assert query["dropped"][0]["axis"] == "dp"
    assert data["kv_repeat"] == 2
    assert data["config"]["block_q"] == 128
    assert data["device_problem"]["q_len"] == 500
    assert {"causal", "segment_ids", "logits_soft_cap", "sinks", "gqa"} <= set(data["features"])
    assert data["rejected"] == []


def test_to_dict_of_a_refusal():
    attend = toy.make({"forward_cpu"}, **THREE_REASONS)(OperationMetadata(fallback="error"))
    data = json.loads(json.dumps(attend.plan(*toy.shapes()).to_dict()))
    assert data["implementation"] is None
    assert data["kind"] == "refused"
    assert [r["implementation"] for r in data["rejected"]] == ["toy.forward_cpu", "toy.forward_native"]
    assert {r["code"] for r in data["rejected"][0]["reasons"]} == {"toy.length", "toy.block"}
    assert data["rejected"][1]["reasons"][0]["code"] == "policy.fallback"


def test_block_sizes_of_the_metadata_feed_the_config_or_are_told():
    operation = toy.make({"forward_cpu"})
    fed = operation(OperationMetadata(blocksize_q=64, blocksize_k=32)).plan(*toy.shapes())
    assert fed.config.block == 64
    assert "blocksize_k=32 is not read by toy" in fed.notes
    toy_metadata = OperationMetadata(blocksize_q=64)
    assert operation(toy_metadata).plan(*toy.shapes()).problem.config == toy.ToyConfig(block=64)


def test_the_methods_of_a_platform_are_named_in_one_place():
    assert {m for own in METHODS.values() for m in own} == set(toy.PLATFORM_METHODS)
