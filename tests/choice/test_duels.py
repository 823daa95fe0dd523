"""The winner of a duel between two candidates of a trial."""

from __future__ import annotations

import pytest

from hostir.choice.choices import Candidate, TrialState
from hostir.choice.trials import Trial

CHAMPION, CHALLENGER = Candidate("ring", 1, "triton"), Candidate("push", 1, "triton")


@pytest.mark.parametrize(
    ("device", "host", "wins"),
    [
        ((20.0, 19.0), (10.0, 10.0), True),  # the host does not count: it is faster
        ((19.0, 20.0), (10.0, 10.0), False),
        ((20.0, 20.0), (10.0, 10.0), False),  # equal: the candidate with the shorter estimate stays
        ((20.0, 18.0), (30.0, 60.0), False),  # costs of 25 and 39 us
        ((18.0, 20.0), (60.0, 30.0), True),
        ((15.0, 20.0), (35.0, 29.0), False),  # 25 and 24.5: nearly equal, and the device decides
        ((20.0, 15.0), (29.0, 36.0), True),  # 24.5 and 25.5
        ((20.0, 19.4), (30.0, 32.85), False),  # 25 and 26.1: the device does not outweigh the cost
    ],
)
def test_the_cost_decides_and_if_costs_are_nearly_equal_the_device_counts_once_more(
    device: tuple[float, float], host: tuple[float, float], wins: bool
) -> None:
    trial = object.__new__(Trial)
    trial.progress = TrialState(CHAMPION)
    trial.host = dict(zip((CHAMPION, CHALLENGER), host, strict=True))
    trial._compare(CHAMPION, CHALLENGER, dict(zip((CHAMPION, CHALLENGER), device, strict=True)))
    assert trial.progress.best == (CHALLENGER if wins else CHAMPION)
