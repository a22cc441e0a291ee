"""What can be known without the target device."""

from .reference import ReferenceOutput, reference_attention, reference_gradients

__all__ = ["ReferenceOutput", "reference_attention", "reference_gradients"]
