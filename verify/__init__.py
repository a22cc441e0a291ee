"""Checks that need no target device."""

from .reference import ReferenceOutput, reference_attention, reference_gradients

__all__ = ["ReferenceOutput", "reference_attention", "reference_gradients"]
