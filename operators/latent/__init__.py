"""Multi-head latent attention: keys and values that are projections of one latent per token."""

from __future__ import annotations

from .form_arguments import form_arguments
from .latent_attention import LatentAttention
from .latent_operands import LATENT, dim_sizes, names_of
from .latent_plan import LatentPlan
from .latent_traffic import form_notes, projection_needs
from .work import Choice, FormWork, choose_form, form_note, projection_flops

__all__ = [
    "LATENT",
    "Choice",
    "FormWork",
    "LatentAttention",
    "LatentPlan",
    "choose_form",
    "dim_sizes",
    "form_arguments",
    "form_note",
    "form_notes",
    "names_of",
    "projection_flops",
    "projection_needs",
]
