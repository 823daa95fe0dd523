"""Calibration: times of four programs scale the constants of a machine; bad files are ignored with a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostir import knobs
from hostir.choice import cache, calibration, platforms
from hostir.choice.cache import CacheWarning
from hostir.choice.hardware import CPU, H100, H200
from hostir.ir import source as notices
from tests.choice.test_candidates import facts

GPU, NEW = "NVIDIA H100 80GB HBM3", "NVIDIA B200"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    notices._warned.clear()
    with knobs.scope(cache=tmp_path):
        yield tmp_path


def test_times_equal_to_the_estimates_change_no_constant() -> None:
    for hardware, device in ((H200, "cuda"), (H100, "cuda"), (CPU, "cpu")):
        times = calibration.estimates_of(hardware, device, 4)
        same = calibration.scaled(hardware, times, device, 4, known=False)
        assert calibration.estimates_of(same, device, 4) == pytest.approx(times)
        assert same.link == pytest.approx(hardware.link)


def test_each_time_scales_the_constants_that_it_stands_for() -> None:
    estimates = calibration.estimates_of(H200, "cuda", 2)
    assert estimates.keys() == {"memory", "matmul", "gather", "launch"}
    times = {"memory": 2.0, "matmul": 3.0, "gather": 4.0, "launch": 5.0}
    slow = calibration.scaled(H200, {n: us * times[n] for n, us in estimates.items()}, "cuda", 2, known=False)
    assert slow.memory == pytest.approx(H200.memory / 2)
    peaks = slow.kernels["aten"].rates.peak["bf16"], slow.kernels["triton"].rates.peak["f8"]
    known = H200.kernels["aten"].rates.peak["bf16"], H200.kernels["triton"].rates.peak["f8"]
    assert peaks == pytest.approx([peak / 3 for peak in known])
    assert (slow.link, slow.rates["allreduce"]) == pytest.approx((H200.link / 4, H200.rates["allreduce"] / 4))
    assert slow.launch["matmul"] == pytest.approx(5 * H200.launch["matmul"])
    alone = calibration.scaled(H200, {"matmul": estimates["matmul"]}, "cuda", 1, known=False)
    assert alone.link == H200.link  # a single rank has gathered nothing


def test_only_the_host_times_of_a_known_gpu_are_scaled() -> None:
    times = {name: 2 * us for name, us in calibration.estimates_of(H100, "cuda", 2).items()}
    calibration.write(GPU, times, 2)
    calibration.write(NEW, {**times, "memory": 1e6}, 2)
    of_h100 = platforms.platform_of([facts(name=GPU, calibration=calibration.read(GPU))] * 2)
    assert of_h100.hardware.memory == H100.memory
    assert of_h100.hardware.launch["call"] == pytest.approx(2 * H100.launch["call"])
    of_another = platforms.platform_of([facts(name=NEW, calibration=calibration.read(NEW))] * 2)
    assert of_another.hardware.memory < H200.memory
    assert of_another.note.endswith("the constants of h200, scaled")


def test_the_calibration_of_rank_0_counts_and_other_devices_have_their_own() -> None:
    calibration.write(NEW, {"memory": 1e6}, 2)
    calibrated, plain = facts(name=NEW, calibration=calibration.read(NEW)), facts(name=NEW)
    assert platforms.platform_of([calibrated, plain]).calibrated
    assert not platforms.platform_of([plain, calibrated]).calibrated
    assert calibration.read(GPU) == ({}, 1)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": %d, "key": {"calibration": "NVIDIA B200"}, "times": {"memory": -1}}']
)
def test_a_damaged_file_is_ignored_with_a_warning(text: str) -> None:
    path = calibration.write(NEW, {"memory": 5.0}, 2)
    path.write_text(text.replace("%d", str(cache.FORMAT)))
    with pytest.warns(CacheWarning, match="are ignored: it is damaged"):
        assert calibration.read(NEW) == ({}, 1)


def test_a_foreign_file_is_ignored_with_a_warning() -> None:
    path = calibration.write(NEW, {"memory": 5.0}, 2)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "key": {"calibration": GPU}}))
    with pytest.warns(CacheWarning, match="its measurements are for something else"):
        assert calibration.read(NEW) == ({}, 1)
    path.write_text(json.dumps({**data, "format": cache.FORMAT + 1}))
    with pytest.warns(CacheWarning, match="it has format"):
        assert calibration.read(NEW) == ({}, 1)
