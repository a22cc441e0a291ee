"""Scores: what is done to a logit before the mask and the softmax, as a small closed algebra.

SoftCap, ALiBi, RelativeBias, RelativeBias2D, Forgetting, Temperature, PositionTemperature, Distance and ScoreFunction; `a >> b`
applies b after a. See Score for the methods.
"""

from __future__ import annotations

from .buckets import T5, Buckets, Clip
from .functions import ScoreFunction, register_score_function, score_function_names
from .leaves import ALiBi, Distance, Forgetting, PositionTemperature, SoftCap, Temperature, paper_slopes
from .node import Chain, Score
from .pydantic_field import score_json_schema
from .relative import RelativeBias, RelativeBias2D
from .serial import score_from_dict

__all__ = [
    "T5",
    "ALiBi",
    "Buckets",
    "Chain",
    "Clip",
    "Distance",
    "Forgetting",
    "PositionTemperature",
    "RelativeBias",
    "RelativeBias2D",
    "Score",
    "ScoreFunction",
    "SoftCap",
    "Temperature",
    "paper_slopes",
    "register_score_function",
    "score_from_dict",
    "score_function_names",
    "score_json_schema",
]
