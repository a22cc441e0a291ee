"""Multi-head latent attention: keys and values that are projections of one latent per token."""

from __future__ import annotations

from .declaration import LatentDeclaration
from .dims import LATENT, LatentDims
from .latent_attention import LatentAttention
from .latent_plan import LatentPlan
from .work import FormWork

__all__ = ["LATENT", "FormWork", "LatentAttention", "LatentDeclaration", "LatentDims", "LatentPlan"]
