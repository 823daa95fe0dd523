"""The native launcher issues a tape's entries as recorded, on a fake driver; addresses and streams change."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tape_entries
from hostir.kernels import parameters
from hostir.kernels.parameters import KernelLaunch, packed, parameter_types
from hostir.machines.cuda.driver import Memcpy2D, wait_at_least, write
from hostir.machines.cuda.native import SOURCE, DriverError, build, native
from hostir.machines.cuda.nccl import COUNTS
from hostir.machines.cuda.tape import (
    CLUSTER,
    CLUSTER_SCHEDULING,
    COLLECTIVE,
    COUNT,
    DEPENDENT,
    LAUNCH,
    MEMORY,
    MEMSET,
    RECORD,
    ROWS,
    Memory,
    Segment,
    TapeEntry,
    TapeWriter,
    attribute,
)

NO_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="for lack of a C compiler")
pytestmark = NO_COMPILER
HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
WARNINGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
STREAMS = {0x100: 0, 0x200: 1}
HANDLES = (0x100, 0x200)
A, B, FIXED = Memory("%a", 0x10000, 256, 0), Memory("%b", 0x20000, 256, 1), Memory("%flags of rank 1", 0x30000, 64)


SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZED = "SANITIZED_LAUNCHER"  # set in the environment: the launcher is built with sanitizers


def headers() -> list[str]:
    import triton.backends.nvidia

    return ["-I" + str(Path(triton.backends.nvidia.__file__).parent / "include")]


class FakeDriver:
    """The fake driver's library, as ctypes sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_take.restype = ctypes.c_char_p

    def take(self) -> list[str]:
        """Return the driver calls since the previous `take`, one call a line."""
        return self.library.fake_take().decode().splitlines()

    def fail(self, call: int) -> None:
        """Make one driver call fail. `call` counts from the last `take`."""
        self.library.fake_fail(call)


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if SANITIZED not in os.environ:
        return build()
    path = tmp_path_factory.mktemp("sanitized") / "hostir_launcher.so"
    include = "-I" + sysconfig.get_paths()["include"]
    subprocess.run(["cc", *WARNINGS, *SANITIZERS, include, *headers(), str(SOURCE), "-o", path], check=True)
    spec = importlib.util.spec_from_file_location("hostir_launcher", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@pytest.fixture
def driver(module: Any, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    path = tmp_path_factory.getbasetemp() / "libfakecuda.so"
    if not path.exists():
        source = str(HERE / "fake_driver.c")
        subprocess.run(["cc", *WARNINGS, *headers(), source, "-o", path], check=True)
    fake = FakeDriver(path)
    fake.fail(-1)
    fake.take()
    module.open(str(path), DriverError)
    return fake


def recorded() -> TapeWriter:
    return TapeWriter(lambda: [A, B, FIXED], STREAMS)


def test_it_builds_without_warnings(tmp_path: Path) -> None:
    include = "-I" + sysconfig.get_paths()["include"]
    subprocess.run(["cc", *WARNINGS, include, *headers(), str(SOURCE), "-o", tmp_path / "launcher.so"], check=True)


KERNEL = ctypes.create_string_buffer(b"ppilbfpp")  # a letter for each parameter; the last two are scratch memory


def test_the_benchmarks_loop_in_c_makes_the_calls_of_a_tape(module: Any, driver: FakeDriver) -> None:
    segment = every_entry(dependent=False)
    loop, library = tape_entries.build().loop, ctypes.CDLL(str(driver.path))
    for entry, handle in zip(segment.entries, (0x100, 0x200, 0x200, 0x100, 0x100, 0x200), strict=True):
        alone = replace(entry, stream=0, addresses=())
        by_tape, by_loop = tape_entries.both(alone, handle, module, loop, library, 3)
        assert by_tape() > 0
        issued = driver.take()
        assert len(issued) == 3
        assert by_loop() > 0
        assert driver.take() == issued


@dataclass
class Compiled:
    """A compiled kernel."""

    kernel_launch: KernelLaunch


def kernel(**changed: Any) -> KernelLaunch:
    """A launch of the fake kernel."""
    types = "*bf16", "*i64", "constexpr", ("i32", "i64"), "i1", "fp32"
    usual = KernelLaunch("matmul", ctypes.addressof(KERNEL), 4, 1, 1024, True, False, types)
    return replace(usual, **changed)


def every_entry(**changed: Any) -> Segment:
    writer = recorded()
    writer.launch(Compiled(kernel(**changed)), 132, 0x100, (A.begin + 32, FIXED.begin, None, (7, 1 << 40), True, 0.5))
    writer.memory_ops([wait_at_least(FIXED.begin + 8, 3), write(0x99999, 4)], 0x200)
    writer.copy(B.begin, A.begin + 16, 64, 0x200)
    rows = Memcpy2D(x_address=A.begin, out_address=FIXED.begin, x_pitch=32, out_pitch=64, width=16, height=2)
    writer.copy_rows(rows, 0x100)
    writer.record(0x77, 0x100)
    writer.wait(0x77, 0x200)
    return Segment.of(writer.entries)


FIRST = [
    "0x100: launch 132x128 shared 1024 attributes 6 ( 10020 30000 7 1099511627776 1 0.5 0 0 )",
    "0x200: memory 0 4 30008 3 5 99999 4",
    "0x200: copy 10010 -> 20000 64",
    "0x100: rows 10000/32 -> 30000/64 2x16",
    "0x100: record 0x77",
    "0x200: wait 0x77 0",
]


def test_entries_are_issued_as_they_were_recorded(module: Any, driver: FakeDriver) -> None:
    run = native(module, every_entry(), HANDLES)
    for _ in range(2):
        run([A.begin, B.begin])
        assert driver.take() == FIRST


def test_addresses_are_those_of_the_call_and_streams_those_of_the_tape(module: Any, driver: FakeDriver) -> None:
    runs = {caller: native(module, every_entry(), (caller, 0x200)) for caller in (0x100, 0x300)}
    for a, b, caller in ((0x50000, 0x60000, 0x100), (0x50000, 0x70000, 0x300), (A.begin, 0x70000, 0x300)):
        runs[caller]([a, b])
        replaced = {"10020": f"{a + 32:x}", "10010": f"{a + 16:x}", "10000/": f"{a:x}/", "20000": f"{b:x}"}
        expected = [line.replace("0x100:", f"{caller:#x}:") for line in FIRST]
        for old, new in replaced.items():
            expected = [line.replace(old, new) for line in expected]
        assert driver.take() == expected


@pytest.mark.parametrize(
    ("changed", "attributes"),
    [({"dependent": False}, ""), ({"cooperative": True}, " 6 2"), ({"ctas": 2, "dependent": False}, " 4 5")],
)
def test_a_launch_has_the_attributes_that_it_was_compiled_for(
    changed: dict[str, Any], attributes: str, module: Any, driver: FakeDriver
) -> None:
    writer, launch = recorded(), kernel(**changed)
    writer.launch(Compiled(launch), 3, 0x100, (A.begin, 0, None, (7, 8), False, 1.0))
    native(module, Segment.of(writer.entries), HANDLES)([A.begin])
    grid = 3 * launch.ctas
    assert driver.take() == [f"0x100: launch {grid}x128 shared 1024 attributes{attributes} ( 10000 0 7 8 0 1 0 0 )"]


def test_other_threads_run_while_the_driver_waits_for_a_full_queue(module: Any, driver: FakeDriver) -> None:
    run, library = native(module, every_entry(), HANDLES), driver.library
    library.fake_block(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, [A.begin, B.begin])
        while not library.fake_waits() and not waiting.done():
            time.sleep(0)
        assert not waiting.done()
        library.fake_block(0)
    assert waiting.exception() is None
    assert driver.take() == FIRST, "it did not give up waiting"


@pytest.mark.parametrize("at", range(6))
def test_a_call_of_the_driver_that_fails_names_its_operation(at: int, module: Any, driver: FakeDriver) -> None:
    entries = [replace(entry, place=10 + number) for number, entry in enumerate(every_entry().entries)]
    run = native(module, Segment.of(entries), HANDLES)
    driver.fail(at)
    with pytest.raises(DriverError, match=r"an illegal memory access was encountered \(CUDA error 700\)") as failed:
        run([A.begin, B.begin])
    assert failed.value.place == 10 + at
    assert driver.take() == FIRST[: at + 1]
    driver.fail(-1)
    run([A.begin, B.begin])
    assert driver.take() == FIRST


def collectives() -> Segment:
    writer = recorded()
    writer.collective("allgather", B.begin, A.begin + 16, (64, 1, "bytes"), 0xC0, 0x100)
    writer.collective("reduce_scatter", A.begin, B.begin, (32, 9, "bf16"), 0xC0, 0x200)
    writer.collective("allreduce", FIXED.begin, FIXED.begin, (8, 7, "f32"), 0xC1, 0x100)
    return Segment.of([replace(entry, place=10 + n) for n, entry in enumerate(writer.entries)])


def by_nccl(a: int, b: int) -> list[str]:
    """Return the lines that `collectives` issues for two tensors with these addresses."""
    return [
        f"0x100: allgather {a + 16:x} -> {b:x} 64 of 1 by 0xc0",
        f"0x200: reduce_scatter 0 {b:x} -> {a:x} 32 of 9 by 0xc0",
        "0x100: allreduce 0 30000 -> 30000 8 of 7 by 0xc1",
    ]


@pytest.fixture
def nccl(module: Any, driver: FakeDriver) -> Callable[[int, int], None]:
    """A function that sets how often NCCL says that a call is in progress, and the code with which it ends."""
    module.open_nccl(str(driver.path))
    driver.library.fake_nccl(0, 0)
    set_nccl: Callable[[int, int], None] = driver.library.fake_nccl
    return set_nccl


def test_collectives_of_nccl_are_issued_for_any_addresses(
    module: Any, driver: FakeDriver, nccl: Callable[[int, int], None]
) -> None:
    run = native(module, segment := collectives(), HANDLES)
    for a, b in ((A.begin, B.begin), (A.begin, B.begin), (0x50000, 0x60000)):
        run([a, b])
        assert driver.take() == by_nccl(a, b)
    assert str(segment).splitlines() == [
        "stream 0: allgather %a+16 -> %b by NCCL, 64 bytes",
        "stream 1: reduce_scatter %b -> %a by NCCL, 32 bf16",
        "stream 0: allreduce %flags of rank 1 -> %flags of rank 1 by NCCL, 8 f32",
    ]


def test_a_collective_that_is_in_progress_is_awaited_and_its_error_names_its_operation(
    module: Any, driver: FakeDriver, nccl: Callable[[int, int], None]
) -> None:
    run = native(module, collectives(), HANDLES)
    nccl(5, 0)
    run([A.begin, B.begin])
    assert driver.take() == by_nccl(A.begin, B.begin)
    for in_progress in (0, 3):
        nccl(in_progress, 6)
        with pytest.raises(DriverError, match=r"remote process exited \(NCCL error 6\)") as failed:
            run([A.begin, B.begin])
        assert failed.value.place == 10
        assert driver.take() == by_nccl(A.begin, B.begin)[:1]


def test_nccl_is_taken_only_from_a_library_that_is_loaded_and_has_it(module: Any, driver: FakeDriver) -> None:
    for name, reason in (("libnone.so", "libnone.so is not loaded"), ("libc.so.6", "libc.so.6 has no ncclAllGather")):
        with pytest.raises(OSError, match=reason):
            module.open_nccl(name)


def test_runs_with_collectives_are_numbered_by_the_host_and_at_their_end_by_a_stream_beside_theirs(
    module: Any, driver: FakeDriver
) -> None:
    counts = (ctypes.c_int64 * COUNTS)()
    at, runs = ctypes.addressof(counts), []
    for text in (7, 9):
        count = TapeEntry(COUNT, 3, 1, (at, text, 0x300, 0x88), (), "")
        runs.append(native(module, Segment((every_entry().entries[4], count), ()), HANDLES))
    for number, which in enumerate((0, 1, 1, 0), 1):
        runs[which]([])
        ends = ["0x200: record 0x88", "0x300: wait 0x88 0", f"0x300: memory 0 5 {at + 8:x} {number}"]
        assert driver.take() == ["0x100: record 0x77", *ends]
        assert counts[:2] == [number, 0]
        assert counts[2 + number] == (7, 9)[which]
    for call in (1, 2, 3):
        driver.take()
        driver.fail(call)
        with pytest.raises(DriverError) as failed:
            runs[0]([])
        assert failed.value.place == 3
        assert counts[0] == 4, "the run that failed does not count"
        driver.fail(-1)
    counts[0] = COUNTS - 3
    runs[1]([])
    assert counts[2] == 9, "the texts are a ring"


def test_entries_are_issued_in_the_context_in_which_the_tape_was_made(module: Any, driver: FakeDriver) -> None:
    run, other, now = native(module, every_entry(), HANDLES), ctypes.c_void_p(2), ctypes.c_void_p()
    for current in (other, ctypes.c_void_p()):  # a new thread has no context yet
        driver.library.cuCtxSetCurrent(current)
        run([A.begin, B.begin])
        assert driver.take() == FIRST
        driver.fail(2)
        with pytest.raises(DriverError):
            run([A.begin, B.begin])
        driver.fail(-1)
        driver.take()
        driver.library.cuCtxGetCurrent(ctypes.byref(now))
        assert now.value == current.value
    driver.library.cuCtxSetCurrent(ctypes.c_void_p(1))


def test_a_key_has_alignments_and_the_addresses_of_a_range(module: Any) -> None:
    x = torch.empty(64, dtype=torch.uint8)
    at = x.data_ptr()
    registers = [x[3:], None, 0x1008, x, 0x2000]
    assert module.key(7, registers, (0, 1, 2, 3, 4), 0x2000, 0x2001, 16) == (7, (at + 3) % 16, 0, 8, at % 16, 0x2000)
    assert module.key(7, registers, (2, 4), 0x1008, 0x2000, 256) == (7, 0x1008, 0)
    for numbers in ((5,), (-9,), ("x",)):
        with pytest.raises((IndexError, TypeError)):
            module.key(7, registers, numbers, 0, 0, 16)
    with pytest.raises(AttributeError):
        module.key(7, ["x"], (0,), 0, 0, 16)


def test_nothing_is_copied_to_where_it_is(module: Any, driver: FakeDriver) -> None:
    writer = recorded()
    writer.copy(B.begin, A.begin, 64, 0x100)
    rows = Memcpy2D(x_address=A.begin, out_address=B.begin, x_pitch=32, out_pitch=32, width=16, height=2)
    writer.copy_rows(rows, 0x100)
    native(module, Segment.of(writer.entries), HANDLES)([A.begin, A.begin])
    assert driver.take() == []


def test_tensor_maps_get_the_address_of_each_call_once(
    module: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "tensor_map", lambda address: struct.pack("<16Q", address, *range(1, 16)))
    function = ctypes.create_string_buffer(b"ipmililpp")
    types = "i32", "*bf16", *parameter_types(["tensordesc<bf16[128]>"], [{}]), "i32", "i64"
    writer = recorded()
    launch = kernel(function=ctypes.addressof(function), types=types, dependent=False)
    writer.launch(Compiled(launch), 1, 0x100, (5, B.begin, A.begin + 16, 64, 1, 2, 3))
    assert writer.complete
    run = native(module, Segment.of(writer.entries), HANDLES)
    for a, times in ((0x50000, 16), (0x50000, 16), (0x60000, 17)):  # the fake driver counts in the map's last word
        run([a, B.begin])
        (line,) = driver.take()
        assert f"map {a + 16:x}/{times:x} " in line
    writer.launch(Compiled(launch), 1, 0x100, (5, B.begin, 0x123450, 64, 1, 2, 3))
    assert not writer.complete, "the address of an unknown tensor cannot be replaced"


def test_what_does_not_fit_a_tape_is_refused(module: Any, driver: FakeDriver, nccl: Callable[[int, int], None]) -> None:
    run = native(module, every_entry(), HANDLES)
    for registers in ((1, 2), None, {0: 1, 1: 2}):
        with pytest.raises(TypeError, match="expected a list of registers"):
            run(registers)
    for registers in ([1], []):
        with pytest.raises(ValueError, match="a slot of a register that is not there"):
            run(registers)
    for registers in ([1, "x"], [1, None], [-1, 2], [1, 2.5]):
        with pytest.raises((AttributeError, OverflowError)):
            run(registers)
    for slots, streams in (((0, -1), HANDLES), ((0, "x"), HANDLES), ((0, 1), (1, 2.5)), ((0, 1), (1, -2))):
        with pytest.raises((TypeError, OverflowError, ValueError)):
            module.Tape(every_entry().rows, every_entry().patches, slots, streams)
    sizes = (1, 1, 1, 1, 1, 1)
    launch = ((0, 0, 0, (0, sizes, 1, b"", bytes(8), (0,))),)
    event = ((RECORD, 0, 0, (0x77,)),)
    for entries, patches in [
        (((COUNT + 1, 0, 0, ()),), ()),  # no such kind
        (((RECORD, 0, 7, (0x77,)),), ()),  # no such stream
        (((LAUNCH, 0, 0, (0, sizes, 1, b"", bytes(8), (8,))),), ()),  # a parameter outside
        (((LAUNCH, 0, 0, (0, sizes, 1, bytes(71), bytes(8), (0,))),), ()),  # part of an attribute
        (((LAUNCH, 0, 0, (0, sizes, 1, bytes(6 * 72), bytes(8), (0,))),), ()),  # too many attributes
        (((MEMORY, 0, 0, (bytes(47),)),), ()),
        (((ROWS, 0, 0, (bytes(47),)),), ()),
        (((MEMSET, 0, 0, (0x10, 0, 3, 8)),), ()),  # values of three bytes
        (((MEMSET, 0, 0, (0x10, 0, 4, -1)),), ()),
        (((MEMSET, 0, 0, (0x10, 0, 4, 8)),), ((0, 0, 8, 0, False),)),  # only one address
        (((COLLECTIVE, 0, 0, (0, 0, 8, 1, 3, 1)),), ()),  # no such collective
        (((COLLECTIVE, 0, 0, (0, 0, 8, 0, 0, 1)),), ()),  # no communicator
        (((COLLECTIVE, 0, 0, (0, 0, 8, 1, 0, 1)),), ((0, 0, 16, 0, False),)),  # only two addresses
        (((COUNT, 0, 0, (0, 1, 3, 4)),), ()),  # no memory
        (((COUNT, 0, 0, (8, 1, 3, 4)), (COUNT, 0, 0, (8, 1, 3, 4))), ()),  # two numbers of a run
        (launch, ((0, 0, 1, 0, False),)),  # the address would not end within the parameters
        (launch, ((0, 1, 0, 0, False),)),  # no such entry
        (launch, ((2, 0, 0, 0, False),)),  # no such slot
        (launch, ((1, 0, 0, 0, False), (0, 0, 0, 0, False))),  # not sorted
        (event, ((0, 0, 0, 0, False),)),  # an event holds no address
    ]:
        with pytest.raises(
            ValueError, match=r"a stream|a parameter|not an array|not a CUDA_MEMCPY2D|a memset|patch|collective|count"
        ):
            module.Tape(entries, patches, (0, 1), HANDLES)
    assert driver.take() == []


class Set(ctypes.Structure):
    """The driver's struct CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        *(("target", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("unit", ctypes.c_uint)),
        *(("width", ctypes.c_size_t), ("height", ctypes.c_size_t)),
    )


class Graph(ctypes.Structure):
    """A graph of the fake driver, which is its only node unless it has a list of nodes."""

    _fields_ = (
        *(("nodes", ctypes.c_size_t), ("list", ctypes.c_void_p), ("before", ctypes.c_void_p * 2)),
        *(("programmatic", ctypes.c_int), ("type", ctypes.c_int), ("function", ctypes.c_void_p)),
        *(("kernel", ctypes.c_void_p), ("sizes", ctypes.c_uint * 7)),
        *(("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("attributes", ctypes.c_char * 144)),
        ("set", Set),
    )

    @staticmethod
    def of(image: bytes, offsets: Sequence[int], function: int, attributes: bytes = b"", **others: Any) -> Graph:
        """Return a graph whose kernel has these parameters. The graph keeps them."""
        memory = ctypes.create_string_buffer(image, len(image))
        where = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(memory) + offset for offset in offsets))
        graph = Graph(nodes=1, type=0, function=function, sizes=(4, 2, 3, 32, 1, 2, 512), **others)
        graph.parameters, graph.kept = ctypes.addressof(where), (memory, where)
        ctypes.memmove(ctypes.addressof(graph) + Graph.attributes.offset, attributes, len(attributes))
        return graph

    @staticmethod
    def chain(*nodes: Graph) -> Graph:
        """Return a graph in which each node depends on the node before it. The list of the nodes has another order."""
        for one, after in pairwise(nodes):
            after.before[0] = one.handle
        handles = (ctypes.c_void_p * len(nodes))(*(node.handle for node in reversed(nodes)))
        graph = Graph(nodes=len(nodes), list=ctypes.addressof(handles))
        graph.kept = handles, nodes
        return graph

    def in_buffer(self, size: int) -> Graph:
        """Pass the parameters in one buffer of this size, as cuBLAS does for many kernels."""
        memory, _ = self.kept
        length = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(memory), 2, ctypes.addressof(length), 0)
        self.parameters, self.extra, self.kept = None, ctypes.addressof(extra), (memory, length, extra)
        return self

    @property
    def handle(self) -> int:
        return ctypes.addressof(self)


GEMM = ctypes.create_string_buffer(b"ipmb")  # a number, an address, a tensor map and a byte
AT = 0, 8, 64, 192
PARAMETERS = struct.pack("<i4xQ48x16Qb", 7, 0x10020, 0x20000, *range(15), 1)


def captured(module: Any, driver: FakeDriver, graph: Graph, work: Callable[[], object] = list) -> Any:
    """Return the result of the launcher for a capture whose graph is `graph`."""
    driver.library.fake_graph(ctypes.c_void_p(graph.handle))
    return module.calls_of(0x100, work)


@pytest.mark.parametrize("attributes", [b"", attribute(CLUSTER, 2, 1, 1) + attribute(CLUSTER_SCHEDULING, 1)])
@pytest.mark.parametrize("by", ["function", "kernel"])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_captured_kernel_is_launched_as_it_was_captured(
    buffer: bool, by: str, attributes: bytes, module: Any, driver: FakeDriver
) -> None:
    graph, log = Graph.of(PARAMETERS, AT, 0, attributes), list[str]()
    setattr(graph, by, ctypes.addressof(GEMM))
    if buffer:
        graph.in_buffer(len(PARAMETERS))
    ((kind, name, fields),) = captured(module, driver, graph, lambda: log.extend(driver.take()))
    assert (log, driver.take()) == (["0x100: begin capture 2"], ["0x100: end capture"])
    assert (kind, name) == (LAUNCH, "gemm")
    assert fields == (ctypes.addressof(GEMM), (4, 2, 3, 32, 1, 2), 512, attributes, PARAMETERS, AT)
    native(module, Segment((TapeEntry(LAUNCH, 0, 1, fields, (), ""),), ()), HANDLES)([])
    numbers = " 4 5" if attributes else ""
    assert driver.take() == [f"0x200: launch 4x32 shared 512 attributes{numbers} ( 7 10020 map 20000/e 1 )"]
    assert not driver.library.fake_graphs()


def test_memsets_and_kernels_of_a_capture_are_issued_in_their_order(module: Any, driver: FakeDriver) -> None:
    kernels = [Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM)) for _ in range(2)]
    kernels[1].programmatic = 1
    fills = [Graph(type=2, set=Set(0x5000 + n, 0, 7, unit, 30, 1)) for n, unit in enumerate((1, 2, 4))]
    calls = captured(module, driver, Graph.chain(*fills, *kernels))
    assert [kind for kind, _, _ in calls] == [MEMSET] * 3 + [LAUNCH] * 2
    assert [fields[3] for kind, _, fields in calls if kind == LAUNCH] == [b"", attribute(DEPENDENT, 1)]
    entries = tuple(TapeEntry(kind, n, 1, fields, (), "") for n, (kind, _, fields) in enumerate(calls))
    driver.take()
    native(module, Segment(entries, ()), HANDLES)([])
    fills_of_log = [f"0x200: set {0x5000 + n:x} to 7 30x{8 << n}" for n in range(3)]
    launches = [f"0x200: launch 4x32 shared 512 attributes{d} ( 7 10020 map 20000/e 1 )" for d in ("", " 6")]
    assert driver.take() == fills_of_log + launches
    for call in range(len(entries)):
        driver.fail(call)
        with pytest.raises(DriverError) as problem:
            native(module, Segment(entries, ()), HANDLES)([])
        assert problem.value.place == call
        driver.take()


def test_a_capture_that_a_tape_cannot_repeat_is_refused(module: Any, driver: FakeDriver) -> None:
    letters = [ctypes.create_string_buffer(text) for text in (b"", b"?", b"ip?")]
    for changed, reason in (
        ({"nodes": 0}, "its graph has 0 nodes"),
        ({"nodes": 33}, "its graph has 33 nodes"),
        ({"type": 1}, "its graph has other nodes than kernels and memsets"),
        ({"type": 2, "set": Set(0, 64, 0, 4, 8, 2)}, "a memset of several rows"),
        ({"type": -1}, "its attributes cannot be read"),
        ({"parameters": None}, "its parameters cannot be read"),
        *(({"function": ctypes.addressof(each)}, "the sizes of its parameters are not known") for each in letters),
    ):
        graph = Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM))
        for name, value in changed.items():
            setattr(graph, name, value)
        with pytest.raises(ValueError, match=reason):
            captured(module, driver, graph)
    with pytest.raises(ValueError, match="its parameters cannot be read"):
        captured(module, driver, Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM)).in_buffer(len(PARAMETERS) - 1))
    unknown = Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM)).in_buffer(len(PARAMETERS))
    ctypes.c_void_p.from_address(unknown.extra).value = 3  # a kind of entry that CUDA may add
    with pytest.raises(ValueError, match="its parameters cannot be read"):
        captured(module, driver, unknown)
    assert not driver.library.fake_graphs()


@pytest.mark.parametrize("edges", [(), ((0, 1), (0, 2)), ((0, 2), (1, 2)), ((0, 1),), ((0, 1), (1, 2), (0, 2))])
def test_a_graph_that_is_no_chain_is_refused(edges: Sequence[tuple[int, int]], module: Any, driver: FakeDriver) -> None:
    nodes = [Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM)) for _ in range(3)]
    graph = Graph.chain(*nodes)
    for node in nodes:
        node.before[0] = None
    for one, after in edges:
        node = nodes[after]
        node.before[1 if node.before[0] else 0] = nodes[one].handle
    with pytest.raises(ValueError, match="its graph is no chain of nodes"):
        captured(module, driver, graph)
    assert not driver.library.fake_graphs()


@pytest.mark.parametrize("call", range(12))
def test_a_capture_that_fails_is_an_error_of_the_driver(call: int, module: Any, driver: FakeDriver) -> None:
    fill = Graph(type=2, set=Set(0x5000, 0, 0, 4, 30, 1))
    graph = Graph.chain(fill, Graph.of(PARAMETERS, AT, 0, kernel=ctypes.addressof(GEMM)))
    driver.take()
    driver.fail(call)
    with pytest.raises(DriverError, match="an illegal memory access was encountered"):
        captured(module, driver, graph)
    assert not driver.library.fake_graphs()


@pytest.mark.parametrize("spoiled", [False, True])
def test_an_exception_ends_the_capture(spoiled: bool, module: Any, driver: FakeDriver) -> None:
    driver.take()
    driver.fail(1 if spoiled else -1)
    with pytest.raises(KeyError):
        captured(module, driver, Graph.of(PARAMETERS, AT, ctypes.addressof(GEMM)), lambda: {}["no kernel"])
    assert driver.take() == ["0x100: begin capture 2", "0x100: end capture"]
    assert not driver.library.fake_graphs()


def test_types_of_parameters_are_those_that_triton_passes() -> None:
    signature = {"a": "tensordesc<bf16[128, 64]>", "b": "*bf16", "c": ("*i64", "constexpr", ("i32",)), "D": "constexpr"}
    map_of_a = ("nvTmaDesc", "i32", "i32", "i64", "i64")
    assert parameter_types(signature.values(), [{"swizzle": 3}]) == (*map_of_a, "*bf16", signature["c"], "constexpr")
    with pytest.raises(TypeError, match="without a tensor map"):
        parameter_types(signature.values(), [None])
    image, offsets, addresses = packed((*signature.values(),)[1:], (0x10, (0x20, 5, (6,)), 9))
    assert (offsets, addresses) == ([0, 8, 16, 24, 32], [(0, 0x10, False), (8, 0x20, False)])
    assert image == struct.pack("<QQi4xQQ", 0x10, 0x20, 6, 0, 0)
    with pytest.raises(TypeError, match="1 arguments for 3 parameters"):
        packed((*signature.values(),)[1:], (0x10,))


def test_a_tape_prints_as_text() -> None:
    assert str(every_entry()).splitlines() == [
        "stream 0: launch matmul x 132(%a+32, %flags of rank 1)",
        "stream 1: wait %flags of rank 1+8 >= 3, write 0x99999 = 4",
        "stream 1: copy %a+16 -> %b, 64 bytes",
        "stream 0: copy %a -> %flags of rank 1, 2 rows of 16 bytes",
        "stream 0: record event 0x77",
        "stream 1: wait for event 0x77",
    ]


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED in os.environ, reason="it would start itself")
def test_sanitizers_have_nothing_to_say() -> None:
    """All tests of this file once more, with AddressSanitizer and UndefinedBehaviorSanitizer in the launcher."""
    library = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    if not Path(library.strip()).is_absolute():
        pytest.skip("the C compiler has no AddressSanitizer")
    quiet = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": library.strip(), SANITIZED: "1"}  # Python itself leaks
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", __file__]
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stdout + done.stderr
