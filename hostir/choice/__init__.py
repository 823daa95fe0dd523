"""Choosing how a fusion is lowered and what computes it: by measurement where there is one, else by estimate."""

from hostir.choice.compiled import chosen_for, compile, lower_auto
from hostir.choice.decision import choose
from hostir.choice.verdict import Candidate, Choice, Impossible, Timing
from hostir.ir.notices import FallbackWarning

__all__ = [
    "Candidate",
    "Choice",
    "FallbackWarning",
    "Impossible",
    "Timing",
    "choose",
    "chosen_for",
    "compile",
    "lower_auto",
]
