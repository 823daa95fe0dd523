"""Choose the strategy and the kernels of a fusion by measurements. Without measurements, choose by estimates."""

from hostir.choice.choices import Candidate, Choice, Impossible, Timing
from hostir.choice.compiling import chosen_for, compile, lower_auto
from hostir.choice.decision import choose
from hostir.choice.ranges import Range, Ranges
from hostir.ir.source import FallbackWarning

__all__ = [
    "Candidate",
    "Choice",
    "FallbackWarning",
    "Impossible",
    "Range",
    "Ranges",
    "Timing",
    "choose",
    "chosen_for",
    "compile",
    "lower_auto",
]
