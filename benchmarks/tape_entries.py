"""Compare the entries of a tape with the same calls of the CUDA driver in a C loop.

    python -m benchmarks.tape_entries --out benchmarks/results/tape_entries      on one GPU

The native launcher (`hostir/machines/cuda/launcher.c`) issues a segment of ENTRIES equal entries. The C loop makes as
many calls of the same driver function with the same arguments. Both are timed in turn; the table shows medians. The
time of the entries includes one call of the launcher from Python, which a call of a program pays once for each segment.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import table, write
from hostir.kernels.flags.signals import SignalKernel
from hostir.machines.cuda.driver import DEVICE, Memcpy2D, MemoryOp, wait_at_least
from hostir.machines.cuda.driver import write as set_to
from hostir.machines.cuda.native import DRIVER, launcher, native
from hostir.machines.cuda.tape import AWAIT, COPY, LAUNCH, MEMORY, RECORD, ROWS, Segment, TapeEntry, TapeWriter

ENTRIES = 16  # about as many as a call of a fused program has
RUNS = 300
NAMES = ("launch", "write", "wait and write", "copy", "copy of rows", "record event", "wait for event")

LOOP = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <time.h>

typedef int (*Call)(unsigned long long, unsigned long long, unsigned long long, unsigned long long);

/* Call a function `count` times with the same four words; return the seconds, and the last result. */
static PyObject *loop(PyObject *self, PyObject *arguments) {
  (void)self;
  unsigned long long function, a, b, c, d;
  long count;
  if (!PyArg_ParseTuple(arguments, "KKKKKl", &function, &a, &b, &c, &d, &count))
    return NULL;
  Call call = (Call)function;
  struct timespec begin, end;
  int code = 0;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (long i = 0; i < count && code == 0; i++)
    code = call(a, b, c, d);
  clock_gettime(CLOCK_MONOTONIC, &end);
  double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
  return Py_BuildValue("di", seconds, code);
}

static PyMethodDef methods[] = {{"loop", loop, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hostir_loop", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_hostir_loop(void) { return PyModule_Create(&module); }
"""


class LaunchConfig(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *(("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64), ("attribute_count", ctypes.c_uint)),
    )


@dataclass
class Call:
    """A call of the driver: the name of the function, its arguments as words, and the memory that they point to."""

    function: str
    arguments: list[int]
    kept: list[Any] = field(default_factory=list)

    def pointer(self, image: bytes) -> int:
        """Keep a copy of some bytes; return its address."""
        self.kept.append(ctypes.create_string_buffer(image, len(image)))
        return ctypes.addressof(self.kept[-1])


def call_of(entry: TapeEntry, stream: int) -> Call:
    """Return the driver call that the native launcher makes for an entry on a stream with this handle."""
    fields = entry.fields
    if entry.kind == MEMORY:
        call = Call("cuStreamBatchMemOp_v2", [stream, len(fields[0]) // ctypes.sizeof(MemoryOp)])
        call.arguments += [call.pointer(fields[0]), 0]
    elif entry.kind == COPY:
        call = Call("cuMemcpyAsync", [*fields, stream])
    elif entry.kind == ROWS:
        call = Call("cuMemcpy2DAsync_v2", [])
        call.arguments += [call.pointer(fields[0]), stream, 0, 0]
    elif entry.kind == RECORD:
        call = Call("cuEventRecord", [fields[0], stream, 0, 0])
    elif entry.kind == AWAIT:
        call = Call("cuStreamWaitEvent", [stream, fields[0], 0, 0])
    else:
        assert entry.kind == LAUNCH
        function, sizes, shared, attributes, image, offsets = fields
        assert not attributes, "a launch without attributes"
        call = Call("cuLaunchKernelEx", [])
        parameters = (ctypes.c_uint64 * (len(offsets) + 1))()
        start = call.pointer(image)
        for number, offset in enumerate(offsets):
            parameters[number] = start + offset
        config = LaunchConfig(*sizes, shared, stream, 0, 0)
        call.kept += [parameters, config]
        call.arguments = [ctypes.addressof(config), function, ctypes.addressof(parameters), 0]
    return call


def build() -> Any:
    """Return the module with the C loop. Triton builds it, or takes it from its cache."""
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(LOOP, "hostir_loop")


def both(
    entry: TapeEntry, stream: int, module: Any, loop: Callable[..., tuple[float, int]], driver: ctypes.CDLL, count: int
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that return seconds: one issues `count` equal entries, one makes the same calls in C."""
    run = native(module, Segment.of([entry] * count), (stream,))
    call = call_of(entry, stream)
    address = ctypes.cast(getattr(driver, call.function), ctypes.c_void_p).value

    def by_tape() -> float:
        begin = time.perf_counter()
        run([])
        return time.perf_counter() - begin

    def by_loop() -> float:
        seconds, code = loop(address, *call.arguments, count)
        assert code == 0, f"{call.function} returned {code}"
        return seconds

    return by_tape, by_loop


def entries(stream: torch.cuda.Stream, device: torch.device) -> tuple[list[TapeEntry], list[Any]]:
    """Return an entry of each kind, and what must live as long as they are used."""
    words = torch.zeros(4, dtype=torch.int64, device=device)
    x, y = (torch.zeros(64, 64, dtype=torch.uint8, device=device) for _ in range(2))
    event = torch.cuda.Event()
    event.record(stream)
    handle, word = stream.cuda_stream, words.data_ptr()
    writer = TapeWriter(list, {handle: 0})
    with writer:
        SignalKernel(device, word, 1)(stream)
    writer.memory_ops([set_to(word, 1)], handle)
    writer.memory_ops([wait_at_least(word, 0), set_to(word, 1)], handle)
    writer.copy(x.data_ptr(), y.data_ptr(), x.numel(), handle)
    rows = Memcpy2D(
        out_memory=DEVICE,
        out_address=x.data_ptr(),
        out_pitch=64,
        x_memory=DEVICE,
        x_address=y.data_ptr(),
        x_pitch=64,
        width=32,
        height=64,
    )
    writer.copy_rows(rows, handle)
    writer.record(event.cuda_event, handle)
    writer.wait(event.cuda_event, handle)
    assert writer.complete, "every entry could be recorded"
    return writer.entries, [words, x, y, event]


def measure(stream: torch.cuda.Stream, device: torch.device, runs: int) -> list[dict[str, Any]]:
    """Return a row for each kind of entry."""
    module, loop, driver = launcher(), build().loop, ctypes.CDLL(DRIVER)
    if module is None:
        raise SystemExit("the native launcher cannot be built, so there is nothing to compare")
    results = []
    every, _kept = entries(stream, device)
    for name, entry in zip(NAMES, every, strict=True):
        pair = both(entry, stream.cuda_stream, module, loop, driver, ENTRIES)
        times: list[list[float]] = [[], []]
        for _ in range(runs):
            for work, taken in zip(pair, times, strict=True):
                torch.cuda.synchronize()
                taken.append(work() * 1e6 / ENTRIES)
        tape, bare = map(statistics.median, times)
        results.append({"entry": name, "tape us": tape, "C us": bare, "ratio": tape / bare})
    return results


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = [[r["entry"], f"{r['tape us']:.2f}", f"{r['C us']:.2f}", f"{r['ratio']:.2f}"] for r in results]
    return table(["entry", "tape us", "C loop us", "ratio"], rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.md")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of each kind of entry ({RUNS})")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    results = measure(torch.cuda.Stream(device), device, options.runs)
    text = report(results)
    print(text, flush=True)
    if options.out:
        write(options.out, "Entries of a tape, and the same driver calls in a C loop", text, {"results": results})


if __name__ == "__main__":
    main()
