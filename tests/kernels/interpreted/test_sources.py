"""Sums of a few sources, which may still arrive, with completion flags for blocks of the output."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.kernels import reduce as module
from hostir.kernels.devices import Limits
from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.ready import ReadyFlags, no_timeouts, timeout_error
from hostir.kernels.matmul import workspaces
from hostir.kernels.reduce import DTYPES, reduce_sum
from tests.kernels.checking import assert_only_view_written, embedded, filled
from tests.kernels.interpreted.test_done import Watched

KERNEL_ARGUMENTS = list(module.sum_kernel.arg_names)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Use several pieces in a block, and several programs."""
    monkeypatch.setattr(module, "_IN_FLIGHT", 512)
    monkeypatch.setattr(module, "_launches", {})


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over axis 0 in the order of sources, rounded as in the kernel."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    total = x[0].to(wide)
    for source in x[1:]:
        total = total + source.to(wide)
    return total.float().to(x.dtype)


def counts_are_zero() -> bool:
    return not any(tickets.any() for _, tickets in workspaces._by_stream.values())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blocks_of_all_sources_are_added_in_order_in_any_layout(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    sources, results = draw(st.integers(1, 5) | st.just(18)), draw(st.integers(1, 4))
    lead = draw(st.sampled_from([(results * 3,), (results, 2), (2, 3 * results), (results, 2, 2)]))
    shape = [*lead, draw(st.sampled_from([8, 5, 48, 130]))]
    torch.manual_seed(draw(st.integers(0, 1 << 30)))

    def layout() -> dict[str, object]:
        order = draw(st.sampled_from([[*range(len(shape))], [*draw(st.permutations(range(len(lead)))), len(lead)]]))
        return {"order": order, "pad": [0] * len(lead) + [draw(st.sampled_from([0, 0, 3, 8]))]}

    x = filled([sources, *shape], dtype, pad=[0] * len(lead) + [draw(st.sampled_from([0, 8]))] + [0])
    out, buffer = embedded(shape, dtype, **layout())
    flags, own_rows, source = torch.ones(sources * results, dtype=torch.int64), None, draw(st.integers(0, sources - 1))
    exact = in_order(x)
    if draw(st.booleans()):
        own_rows = filled(shape, dtype, **layout()).copy_(x[source])
        own_rows = own_rows.unsqueeze(draw(st.integers(0, len(lead))))
        x[source] = math.nan
        flags.view(sources, results)[source] = 0
    ready = ReadyFlags(flags, 1, no_timeouts(len(flags), "cpu"), source=source, polls=3)
    rows = math.prod(lead)
    raises = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    raised = torch.zeros(raises, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch, raised, out)
        assert reduce_sum(x, out, 0, ready=ready, own_rows=own_rows, done=DoneFlags(raised, 4)) is out
    assert_only_view_written(out, buffer)
    assert torch.equal(out, exact)
    assert raised.tolist() == [4] * raises
    for block, seen in watched.seen.items():
        assert torch.equal(seen, exact.reshape(rows, -1).chunk(raises)[block])
    assert timeout_error(ready.timeouts, 0, "%f") is None
    assert counts_are_zero()
    if own_rows is None:
        assert torch.equal(out, reduce_sum(x, torch.empty_like(out), 0)), "without flags the bits are the same"


@pytest.mark.parametrize("missing", range(6))
def test_a_missing_source_is_named_and_its_block_is_neither_written_nor_flagged(missing):
    x = filled([3, 8, 48], torch.bfloat16)  # two blocks of 4 rows
    ready = ReadyFlags(torch.ones(6, dtype=torch.int64), 1, no_timeouts(6, "cpu"), source=1, polls=3)
    ready.flags[missing] = 0
    out, raised = torch.full((8, 48), math.nan, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    reduce_sum(x, out, 0, ready=ready, done=DoneFlags(raised, 1))
    for block, part in enumerate(out.chunk(2)):
        here = block == missing % 2
        assert part.isnan().all() if here else torch.equal(part, in_order(x).chunk(2)[block])
        assert raised.chunk(2)[block].tolist() == ([0, 0] if here else [1, 1])
    assert ready.timeouts.tolist() == [[1, 0] if slot == missing else [0, 0] for slot in range(6)]
    message = f"flag %f[{missing}], for block {missing % 2} of source {missing // 2}, did not reach epoch 1"
    assert message in str(timeout_error(ready.timeouts, 0, "%f", results=2))
    assert counts_are_zero()


def test_blocks_are_computed_from_the_first_on(monkeypatch):
    monkeypatch.setattr(module, "limits", lambda device: Limits(1, 1 << 20, tma=True, fp8=True))
    x, out = filled([2, 8, 24], torch.float32), torch.empty(8, 24)
    raised = torch.zeros(4, dtype=torch.int64)
    watched = Watched(monkeypatch, raised, out)
    reduce_sum(x, out, 0, done=DoneFlags(raised, 1, first=2))
    assert watched.order == [2, 3, 0, 1]
    assert torch.equal(out, in_order(x))


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu"])
@pytest.mark.parametrize("shape", [(8, 48), (48,), (8, 1), (1, 48)])
@pytest.mark.parametrize(("dtype", "sources"), [(torch.bfloat16, 3), (torch.float32, 3), (torch.float16, 70)])
def test_an_addend_and_an_activation_come_before_the_only_rounding(dtype, sources, shape, activation):
    x, addend = filled([sources, 8, 48], dtype), filled(shape, dtype)
    exact = x.double().sum(0) + addend.double()
    if activation:
        exact = {"silu": torch.nn.functional.silu, "relu": torch.relu, "gelu": torch.nn.functional.gelu}[activation](
            exact
        )
    ready = ReadyFlags(torch.ones(sources * 2, dtype=torch.int64), 1, no_timeouts(sources * 2, "cpu"))
    for flags in (None, ready):
        out = torch.full((8, 48), math.nan, dtype=dtype)
        reduce_sum(x, out, 0, addend=addend, activation=activation, ready=flags)
        torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6 * sources)


def test_an_activation_of_no_sources_and_of_nan():
    bias = torch.tensor([-1.0, math.nan, 2.0])
    for sources in (0, 2):
        out = reduce_sum(torch.zeros(sources, 3), torch.empty(3), 0, addend=bias, activation="relu")
        torch.testing.assert_close(out, torch.relu(bias), equal_nan=True)


class Recorder:
    """Replaces a compiled kernel and records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, tuple[object, ...]]] = []
        self.current = 0

    def stream(self, index: object) -> int:
        return self.current

    def launch(self, programs: int, stream: int, arguments: tuple[object, ...]) -> None:
        self.launches.append((programs, stream, arguments))


def addresses(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(addresses, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("with_addend", [True, False])
def test_a_repeated_launch_gets_the_arguments_of_the_first(with_addend, flags, monkeypatch):
    """Launches that bypass Triton cannot run here, and a wrong argument would give garbage on a GPU."""
    seen: list[tuple[int, tuple[object, ...]]] = []
    recorder = Recorder()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, num_warps: seen.append((grid[0], arguments))

    monkeypatch.setattr(module, "sum_kernel", Kernel())
    monkeypatch.setattr(module, "bind_thread", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    x, out, own_rows = (
        filled([3, 8, 48], torch.bfloat16),
        torch.empty(8, 48).bfloat16(),
        filled([8, 48], torch.bfloat16),
    )
    options = {"addend": own_rows[0].clone()} if with_addend else {}
    if flags:
        ready = ReadyFlags(torch.ones(6, dtype=torch.int64), 1, no_timeouts(6, "cpu"), source=1)
        options |= {"ready": ready, "own_rows": own_rows, "done": DoneFlags(torch.zeros(4, dtype=torch.int64), 5)}
    assert module.add_up(x, out, 0, **options) is None, "the first one is interpreted"
    (call,) = module._launches.values()
    call.compiled = recorder
    again = module.add_up(x, out, 0, **options)
    recorder.current = 7
    again()
    (programs, arguments), *rest = seen
    assert not rest
    assert [launch[:2] for launch in recorder.launches] == [(programs, 0), (programs, 7)]
    assert recorder.launches[0][2] == addresses(arguments)
    assert len(arguments) == len(KERNEL_ARGUMENTS)
    assert KERNEL_ARGUMENTS[-3:] == ["counts", "blocks", "C"]


def test_completion_flags_of_sums_over_any_axis_and_of_no_sources():
    x, raised = filled([6, 5, 8], torch.float32), torch.zeros(3, dtype=torch.int64)
    assert torch.equal(reduce_sum(x, torch.empty(6, 8), 1, done=DoneFlags(raised, 2)), in_order(x.transpose(0, 1)))
    assert raised.tolist() == [2, 2, 2]
    out = torch.full((6, 8), math.nan)
    assert not reduce_sum(torch.empty(0, 6, 8), out, 0, done=DoneFlags(raised, 3)).any()
    assert raised.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("12 rows do not make 5 equal blocks", {"ready": 5}),
        ("as many flags for each of 3 sources along axis 0, got 4", {"ready": 4}),
        (r"expected own rows \[4, 8\] of torch.float32, got \[3, 8\]", {"ready": 3, "own_rows": torch.zeros(3, 8)}),
        ("there is no source 3: expected 0 to 2", {"ready": 3, "own_rows": torch.zeros(4, 8), "source": 3}),
        (r"own rows replace a source: expected flags of sources \(ready\) as well", {"own_rows": torch.zeros(4, 8)}),
        ("4 rows do not make 3 equal blocks", {"done": 3}),
    ],
)
def test_operands_that_do_not_fit_are_reported(message, fields):
    ready = done = None
    if blocks := fields.get("ready"):
        flags = torch.ones(blocks, dtype=torch.int64)
        ready = ReadyFlags(flags, 1, no_timeouts(blocks, "cpu"), source=fields.get("source", 0))
    if "done" in fields:
        done = DoneFlags(torch.zeros(fields["done"], dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=message):
        reduce_sum(torch.zeros(3, 4, 8), torch.zeros(4, 8), 0, ready=ready, done=done, own_rows=fields.get("own_rows"))
