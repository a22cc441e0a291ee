"""The attention layers of images in a model's config: windows of a grid, or the whole grid, with a bias by the two distances."""

from __future__ import annotations

from typing import Any

from ..errors import is_whole, shown
from ..masks import Full
from ..scores import RelativeBias2D, Score, Temperature
from .layers import LayerAttention, LayerSizes
from .model_config import ModelConfig
from .values import flag, whole

__all__ = ["image_layers"]

_LARGEST = 2**15


def image_layers(config: ModelConfig) -> tuple[LayerAttention, ...]:
    """One LayerAttention per layer. Errors: ConfigError for sizes that don't fit each other."""
    grid = _grid(config)
    if "depths" in config.fields:
        return _stages(config, grid)
    if config.rules.extra_tokens is not None:
        return _plain(config, grid, config.rules.extra_tokens)
    return _beit(config, grid) if "use_relative_position_bias" in config.fields else _windows(config, grid)


def _grid(config: ModelConfig) -> tuple[int, int]:
    """How many patches an image has, (height, width)."""
    image, patch = (_pair(config, key) for key in ("image_size", "patch_size"))
    if any(n % m for n, m in zip(image, patch, strict=True)):
        raise config.error(f"image_size={image} is not a multiple of patch_size={patch}; wanted whole patches.")
    return image[0] // patch[0], image[1] // patch[1]


def _pair(config: ModelConfig, key: str) -> tuple[int, int]:
    value = config.fields[key]
    both = (value, value) if is_whole(value) else value
    if not isinstance(both, list | tuple) or len(both) != 2 or not all(is_whole(n, 1, _LARGEST) for n in both):
        raise config.error(f"{key}={shown(value)}; wanted a whole number, or [height, width].")
    return both[0], both[1]


def _numbers(config: ModelConfig, key: str) -> list[int]:
    value = config.fields[key]
    if not isinstance(value, list | tuple) or not value or not all(is_whole(n, 1, _LARGEST) for n in value):
        raise config.error(f"{key}={shown(value)}; wanted a list of whole numbers, one per stage.")
    return list(value)


def _ceil(size: int, window: int) -> int:
    return -(-size // window)


def _stages(config: ModelConfig, grid: tuple[int, int]) -> tuple[LayerAttention, ...]:
    """Swin's: each stage has half as many patches on each side as the one before, and twice as wide ones."""
    depths, heads = _numbers(config, "depths"), _numbers(config, "num_attention_heads")
    width, most = whole(config, "hidden_size"), whole(config, "window_size")
    if len(depths) != len(heads) or sum(depths) > _LARGEST:
        raise config.error(f"depths={depths} and num_heads={heads}; wanted one number per stage in each.")
    layers = []
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        patches = tuple(_ceil(n, 2**stage) for n in grid)
        dim = width * 2**stage
        if dim % count:
            raise config.error(f"stage {stage} has {dim} channels, not a multiple of its {count} heads.")
        window = min(most, *patches)
        if window < most and (config.family == "swin" or patches[0] != patches[1]):
            raise config.error(
                f"window_size={most} is more than the {patches[0]}x{patches[1]} patches of stage {stage}; wanted at most "
                "that, as the table of its bias has the size of the window."
            )
        score: Score = RelativeBias2D(grid=(window, window))
        score = Temperature() >> score if config.family == "swinv2" else score
        windows = _ceil(patches[0], window) * _ceil(patches[1], window)
        sizes = LayerSizes(count, dim // count, window * window, windows)
        for layer in range(depth):
            shifted = layer % 2 == 1 and window < min(patches) and window > 1
            kind = f"{'shifted ' * shifted}window {window}x{window}"
            layers.append(LayerAttention(kind, Full(), None, score, sizes._replace(masked=shifted)))
    return tuple(layers)


def _plain(config: ModelConfig, grid: tuple[int, int], extra: int) -> tuple[LayerAttention, ...]:
    """ViT's: the whole grid, and tokens that belong to no patch."""
    heads, width = _heads(config)
    extra += sum(whole(config, key, minimum=0) for key in config.fields if "token" in key)
    sizes = LayerSizes(heads, width // heads, grid[0] * grid[1] + extra, 1)
    layer = LayerAttention(f"grid {grid[0]}x{grid[1]}" + f" + {extra}" * (extra > 0), Full(), None, None, sizes)
    return (layer,) * whole(config, "num_hidden_layers", maximum=10_000)


def _beit(config: ModelConfig, grid: tuple[int, int]) -> tuple[LayerAttention, ...]:
    """A class token and the whole grid, with a bias of the layer, one that all layers share, or both."""
    heads, width = _heads(config)
    keys = ("use_relative_position_bias", "use_shared_relative_position_bias")
    parts = [RelativeBias2D(grid=grid, class_token=True) for key in keys if flag(config, key)]
    if parts and grid[0] != grid[1]:
        raise config.error(
            f"a grid of {grid[0]}x{grid[1]} patches: transformers transposes the table of its bias if it isn't square; wanted a "
            "square image."
        )
    score: Score | None = None
    for part in parts:
        score = part if score is None else score >> part
    sizes = LayerSizes(heads, width // heads, grid[0] * grid[1] + 1, 1)
    layer = LayerAttention(f"grid {grid[0]}x{grid[1]}", Full(), None, score, sizes)
    return (layer,) * whole(config, "num_hidden_layers", maximum=10_000)


def _heads(config: ModelConfig) -> tuple[int, int]:
    """(heads, the width of all of them)."""
    heads, width = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    if width % heads:
        raise config.error(f"hidden_size={width} is not a multiple of num_attention_heads={heads}.")
    if config.fields.get("head_dim") not in (None, width // heads):
        raise config.error(
            f"head_dim={shown(config.fields['head_dim'])}, but hidden_size={width} of {heads} heads gives {width // heads}."
        )
    return heads, width


def _windows(config: ModelConfig, grid: tuple[int, int]) -> tuple[LayerAttention, ...]:
    """SAM's and ViTDet's: the whole grid, or windows, into which the grid is padded."""
    f, count = config.fields, whole(config, "num_hidden_layers", maximum=10_000)
    heads, width = _heads(config)
    window = whole(config, "window_size", minimum=0, maximum=_LARGEST)
    biased = flag(config, "use_rel_pos" if "use_rel_pos" in f else "use_relative_position_embeddings")
    key = "global_attn_indexes" if "global_attn_indexes" in f else "window_block_indices"
    listed: Any = f[key]
    if not isinstance(listed, list | tuple) or not all(is_whole(n, 0, count - 1) for n in listed):
        raise config.error(f"{key}={shown(listed)}; wanted a list of layers from 0 to {count - 1}.")
    layers = []
    for layer in range(count):
        cut = window > 0 and (layer in listed) == (key == "window_block_indices")
        size = (window, window) if cut else grid
        windows = _ceil(grid[0], window) * _ceil(grid[1], window) if cut else 1
        score = RelativeBias2D(grid=size, decomposed=True) if biased else None
        kind = f"{'window' if cut else 'grid'} {size[0]}x{size[1]}"
        sizes = LayerSizes(heads, width // heads, size[0] * size[1], windows)
        layers.append(LayerAttention(kind, Full(), None, score, sizes))
    return tuple(layers)
