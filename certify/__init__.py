"""What a function of attention gets right, feature by feature, and the smallest case of what it gets wrong."""

from .certificate import Certificate, FeatureVerdict, WrongCase
from .convention import Convention, built_in_conventions, convention_named
from .examine import certify
from .suite import suite

__all__ = [
    "Certificate",
    "Convention",
    "FeatureVerdict",
    "WrongCase",
    "built_in_conventions",
    "certify",
    "convention_named",
    "suite",
]
