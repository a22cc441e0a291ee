"""splash: block-sparse flash attention on TPU; elsewhere it is vanilla."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import StrictBool, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from ..errors import ConfigError
from ..registry import STATIC_MASKS, AttentionProblem, OperationConfig, Padding, Placement, Rule, implementation
from .base import Operation
from .local import LocalCall, LocalOutput
from .vanilla import Vanilla

if TYPE_CHECKING:
    from .kernels.jax_splash import SplashBlocks

__all__ = ["Splash", "SplashConfig"]

_LANES = 128
_KV_BLOCKS = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
_Q_BLOCKS = ("block_q", "block_q_dkv", "block_q_dq")


class SplashConfig(OperationConfig):
    """Block sizes and layouts of jax's splash kernel.

    Sizes count rows. A size that is unset is chosen by attnops from the local lengths. None takes the kernel's own
    default: 128, or, for a compute block, the block that it lies in.

    block_q, block_kv: what the forward pass holds in VMEM at once. block_kv_compute: the keys that it works on at a
    time. *_dkv: the same for the gradient of k and v, *_dq for that of q (not with use_fused_bwd_kernel, which makes all
    three in one pass). *_layout: 'seq_minor' hands the tensor over transposed. residual_checkpoint_name: the name of the
    output and its log-sum-exp for jax.checkpoint policies. interpret: run the kernel in Pallas' interpreter, on any
    platform; for tests.
    """

    feeds: ClassVar = {"blocksize_q": "block_q", "blocksize_k": "block_kv"}

    operation: Literal["splash"] = "splash"
    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    use_fused_bwd_kernel: StrictBool = False
    q_layout: Literal["head_dim_minor", "seq_minor"] = "head_dim_minor"
    k_layout: Literal["head_dim_minor", "seq_minor"] = "head_dim_minor"
    v_layout: Literal["head_dim_minor", "seq_minor"] = "head_dim_minor"
    residual_checkpoint_name: str | None = None
    interpret: StrictBool = False

    @field_validator(*_KV_BLOCKS, *_Q_BLOCKS, mode="before")
    @classmethod
    def _multiple(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        # The backward kernels have queries in lanes; the forward kernel has them in sublanes.
        unit = 8 if info.field_name == "block_q" else _LANES
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{info.field_name}={value!r} is not a positive integer (a multiple of {unit})")
        if value % unit:
            near = sorted({max(unit, value // unit * unit), (value // unit + 1) * unit})
            raise ValueError(
                f"{info.field_name}={value} is not a multiple of {unit}; nearest: {', '.join(map(str, near))}"
            )
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        for inner, outer in (("block_kv_compute", "block_kv"), ("block_kv_dkv_compute", "block_kv_dkv")):
            size, block = getattr(self, inner), getattr(self, outer)
            block = _LANES if block is None and outer in self.model_fields_set else block
            if size is not None and block is not None and block % size:
                raise ValueError(f"{outer}={block} is not a multiple of {inner}={size}")
        if self.q_layout == "seq_minor" and (self.block_q or _LANES) % _LANES:
            raise ValueError(f"block_q={self.block_q} is not a multiple of {_LANES}, which q_layout='seq_minor' wants")
        if self.use_fused_bwd_kernel:
            for name in ("block_q_dq", "block_kv_dq"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} would be read by nobody: the fused backward has no dq pass"
                    )
        return self


_RULES = (
    Rule(
        "splash.one_query",
        "q_len",
        lambda p, c: p.q_len > 1,
        "q_len={p.q_len}: the kernel's passes share query blocks of 128 rows, so 127 of them would be padding",
        "Nothing to mend: one query against a cache runs faster elsewhere.",
    ),
    Rule(
        "splash.dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in ("float32", "bfloat16"),
        "runtime dtype {p.runtime_dtype}: Mosaic has no such vector loads",
        "Declare runtime_dtype bfloat16 or float32.",
    ),
    Rule(
        "splash.softmax_dtype",
        "runtime_softmax_dtype",
        lambda p, c: p.softmax_dtype == "float32",
        "softmax dtype {p.softmax_dtype}: the kernel's softmax is float32",
        "Leave runtime_softmax_dtype at float32.",
    ),
    Rule(
        "splash.one_of_each",
        "mask",
        lambda p, c: (
            len({leaf.name for leaf in p.leaves}) == len({leaf.name.rstrip("0123456789_") for leaf in p.leaves})
        ),
        "the mask {p.mask} holds segment ids or lengths more than once",
        "Join them into one before the call.",
    ),
    Rule(
        "splash.id_dtype",
        "mask",
        lambda p, c: all(leaf.dtype not in ("int64", "uint64") for leaf in p.leaves),
        "segment ids or lengths of 64 bits: the kernel has 32",
        "Cast them to int32.",
    ),
    Rule(
        "splash.check_vma",
        "mesh",
        lambda p, c: not p.vma,
        "called inside a shard_map with check_vma=True, which jax's splash kernel can't be traced under",
        "Pass check_vma=False to that shard_map, or let attnops make the shard_map.",
    ),
)


class Splash(Operation):
    """jax's Pallas TPU kernel behind one declaration: padding, masks, offsets and sharding are taken care of."""

    name = "splash"
    config = SplashConfig

    @implementation(
        consumes=STATIC_MASKS | {"segment_ids", "kv_lengths", "logits_soft_cap", "sinks", "gqa", "value_dim"},
        rules=_RULES,
        # In the interpreter on CPU. On a TPU float32 products go through bfloat16 at jax's default precision.
        tolerance={"float32": (1e-5, 3e-5), "bfloat16": (2e-2, 4e-2)},
        check_vma=False,
    )
    def forward_tpu(self, call: LocalCall) -> LocalOutput:
        """Run jax's splash kernel, forward and backward."""
        from .kernels.jax_splash import jax_splash_attention

        config = call.config
        assert isinstance(config, SplashConfig)
        static, dynamic = call.mask.mask.split_static()
        arrays = {leaf.name: leaf.array for mask in dynamic for leaf in mask.split()[1]}
        swap = call.layout == "bthd"
        query, key, value = (x.swapaxes(1, 2) if swap else x for x in (call.query, call.key, call.value))
        output = jax_splash_attention(
            query,
            key,
            value,
            mask=static,
            scale=call.softmax_scale,
            soft_cap=call.logits_soft_cap,
            sinks=call.sinks,
            q_segment_ids=arrays.get("q_segment_ids"),
            kv_segment_ids=arrays.get("kv_segment_ids"),
            kv_lengths=arrays.get("kv_lengths"),
            may_have_dead_rows=call.problem.mask.may_have_dead_rows(call.problem.q_len, call.problem.kv_len),
            blocks=_blocks(config),
            shard=call.q_shard,
            shards=call.q_shards,
            residual_checkpoint_name=config.residual_checkpoint_name,
            interpret=config.interpret,
        )
        return LocalOutput(output.swapaxes(1, 2) if swap else output)

    forward_native = Vanilla.forward_native

    @classmethod
    def kernel_platform(cls, problem: AttentionProblem) -> str:
        """The TPU kernel also runs interpreted, where the config says so."""
        config = problem.config
        return "tpu" if isinstance(config, SplashConfig) and config.interpret else problem.platform

    @classmethod
    def resolve_config(cls, method: str, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Fill in every block size from the local lengths."""
        config = problem.config
        if method != "forward_tpu" or not isinstance(config, SplashConfig):
            return config
        q_len, kv_len = placement.local.q_len, placement.local.kv_len
        cap = 512 if max(problem.head_dim, problem.value_dim) <= 256 else 256
        sizes: dict[str, int] = {}

        def size(name: str, default: int) -> None:
            given = getattr(config, name)
            sizes[name] = given if given is not None else _LANES if config.is_set(name) else default

        size("block_q", _choose(q_len, cap))
        # One unit for both passes, so that their blocks can be the same.
        unit = math.lcm(_LANES, config.block_kv_compute or 1, config.block_kv_dkv_compute or 1)
        size("block_kv", _choose(kv_len, cap, unit))
        # Other passes take the forward's blocks, so that one padded length serves all.
        backward_q = sizes["block_q"] if sizes["block_q"] % _LANES == 0 else _choose(q_len, cap)
        for suffix in ("dkv",) if config.use_fused_bwd_kernel else ("dkv", "dq"):
            size(f"block_q_{suffix}", backward_q)
            compute = config.block_kv_dkv_compute if suffix == "dkv" else None
            fits = sizes["block_kv"] % (compute or _LANES) == 0
            size(f"block_kv_{suffix}", sizes["block_kv"] if fits else _choose(kv_len, cap, compute or _LANES))
        for inner, outer in (("block_kv_compute", "block_kv"), ("block_kv_dkv_compute", "block_kv_dkv")):
            block = sizes[outer]
            given = getattr(config, inner)
            sizes[inner] = given if given is not None else block if config.is_set(inner) else _divisor(block, cap)
        resolved = config.with_fields(sizes)
        assert isinstance(resolved, SplashConfig)
        padded = _blocks(resolved).padded(q_len, kv_len)
        for name, length, got in (("q", q_len, padded[0]), ("kv", kv_len, padded[1])):
            blocks = {n: s for n, s in sizes.items() if n.startswith(f"block_{name}") and not n.endswith("compute")}
            if got >= 2 * max(max(blocks.values()), math.ceil(length / _LANES) * _LANES):
                raise ConfigError(
                    f"SplashConfig: {', '.join(f'{n}={s}' for n, s in blocks.items())} share no small multiple, so {length} "
                    f"rows would be padded to {got}; wanted sizes that divide one another."
                )
        return resolved

    @classmethod
    def padding(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Padding | None:
        """Rows added to reach whole blocks."""
        if method != "forward_tpu" or not isinstance(config, SplashConfig):
            return None
        q_len, kv_len = placement.local.q_len, placement.local.kv_len
        q_padded, kv_padded = _blocks(config).padded(q_len, kv_len)
        return Padding(q_padded - q_len, kv_padded - kv_len, 1 - q_len * kv_len / (q_padded * kv_padded))


def _blocks(config: SplashConfig) -> SplashBlocks:
    from .kernels.jax_splash import SplashBlocks  # imports Pallas, so only where the kernel is planned

    return SplashBlocks(**{name: getattr(config, name) for name in SplashBlocks.__dataclass_fields__})


def _choose(length: int, cap: int, unit: int = _LANES) -> int:
    """The largest multiple of `unit` up to `cap` that pads at most a fiftieth more than blocks of `unit` would."""
    least = math.ceil(length / unit) * unit
    candidates = range(unit, max(unit, min(cap, least)) + 1, unit)
    return max(b for b in candidates if math.ceil(length / b) * b <= 1.02 * least)


def _divisor(block: int, cap: int) -> int:
    """The largest multiple of 128 up to `cap` that divides a block."""
    return max(b for b in range(_LANES, min(block, cap) + 1, _LANES) if block % b == 0)
