"""Executors run host programs.

Under torchrun, an executor runs on this process's rank; elsewhere, on simulated ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hostir.call.arguments import check_apart, written_inputs
from hostir.call.bound import Plan, untraced
from hostir.call.parts import assemble, shard
from hostir.call.sizes import bind_sizes
from hostir.call.started import Started
from hostir.check import prove, verify
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import amount, check_known, described, error, user_span
from hostir.job.session import Session, launched
from hostir.job.watchdog import Watchdog
from hostir.knobs import COMPARE_CALLS, KERNELS, SYMMETRIC_LIMIT, TIMEOUT, check_environment
from hostir.machines.binding import Part
from hostir.machines.simulated.scheduler import check_seed
from hostir.machines.trace import Trace
from hostir.plan.unroll import unroll

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hostir.call.bound import BoundCall
    from hostir.job.calls import Calls

LOWERED = "what hi.lower or hi.parse gives"
LOWER = "a fusion: lower it first, hi.lower(fusion)"
MACHINES = "local", "gloo", "cuda"


def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method as its callers see it, without `self`."""
    signature = inspect.signature(function)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


class Executor:
    """Runs a host program, as often as it is called.

        executor = Executor(program)
        outputs = executor(a, b)

    Under torchrun, `a` and `b` are this rank's parts of the inputs, and `outputs` has its parts of the outputs. A part
    is None if the rank holds no part. On the local machine, each input and output is a list with the part of every
    simulated rank.

    On a CPU a call returns when all its work is done. On CUDA it returns when all its work is issued. After a first
    call with tensors of the same shapes, you may capture calls on CUDA into a CUDA graph. Only one thread at a time may
    make calls of the same ranks.

    The caller owns the outputs. With `out=`, a tensor or a sequence of tensors, the call writes into the caller's
    tensors. They must be contiguous, and must not share memory with the inputs or with each other. On CUDA, the third
    and later calls with `out=` at the same addresses are replayed from a CUDA graph; docs/calls.md has the details.

    Symmetric buffers and flags last from call to call. Calls with sizes of one kind share buffers and flags;
    docs/memory-model.md defines the kinds of sizes. The buffers have room for the largest sizes so far, so smaller
    sizes need no rendezvous. Executors of equal programs also share buffers and flags. The calls of these executors run
    one after another, on any streams.

    Executors compute no gradients. Inputs that require gradients are refused, unless the call is under
    `torch.no_grad()`. An input may have any strides if the program only computes with it. If the program communicates
    an input, this input must be contiguous.

    Args:
        program: a host program, which fixes the number of ranks. Ranks of the job beyond this number pass None for
            every input, and get None for every output.
        sizes: values for symbols that do not follow from the shapes of the inputs.
        kernels: the kernels that compute: `auto`, `triton`, `cublas` or `aten`; see the knob HOSTIR_KERNELS.
        machine: `local`, `gloo` or `cuda`. The default is `gloo` or `cuda` under torchrun, by the session's device, and
            `local` elsewhere. Outside torchrun `gloo` and `cuda` run programs of one rank.
        group: the ranks that run the program, numbered as in the group: a torch process group, its name, or a
            DeviceMesh of one dimension. The default is all ranks of the job. Only members make the executor and calls.
        seed: on the local machine, selects one of the orders that the memory model allows; 0 is program order.
        trace: receives an event for each statement of each run. On CUDA each call then waits for the device.
        check: True to refuse a program that is not proved free of races, deadlocks and misuse of memory. The proof is
            made at once if all sizes are known, else before the first call with new sizes.
        timeout: the maximum number of seconds that `synchronize` waits. The default is the timeout of `group`; without
            a group, the knob HOSTIR_TIMEOUT.
        graphs: True if calls with `out=` may be replayed from CUDA graphs. An executor with a trace captures no graphs.
        compare_calls: True if the ranks compare their calls before each call runs, and also compare the threads that
            make these calls. On gloo they always do. See the knob HOSTIR_COMPARE_CALLS.
        symmetric_limit: the maximum number of bytes of symmetric memory that the program may take on a rank; see the
            knob HOSTIR_SYMMETRIC_LIMIT.

    Fields:
        machine: the name of the machine.
        plans: the 16 most recently used plans, by the shapes, strides and dtypes of their inputs.
        choice: the strategy that was chosen for this program, and the reason; None for a program of the caller.

    Raises HostIRError on every rank if ranks run different programs, or if the job or the group has too few ranks.
    """

    on_simulated_ranks: ClassVar[type[Executor]]  # these two are set by `hostir.call`: their modules import this one
    on_this_rank: ClassVar[type[Executor]]
    machine: str
    calls: Calls  # the calls of these ranks; missing for simulated ranks

    @untraced
    def __new__(cls, *arguments: Any, **options: Any) -> Executor:
        """Make a `LocalExecutor` or a `RankExecutor`, depending on the machine."""
        executor_class: type[Executor] = cls
        if cls is Executor:
            machine, group = options.get("machine"), options.get("group")
            here = machine is None and group is None and not launched()
            simulated = here or (isinstance(machine, str) and machine == "local")
            executor_class = cls.on_simulated_ranks if simulated else cls.on_this_rank
        return object.__new__(executor_class)

    @untraced
    def __init__(
        self,
        program: Program,
        *,
        sizes: Mapping[str, int] | None = None,
        kernels: str | None = None,
        machine: str | None = None,
        group: ProcessGroup | DeviceMesh | str | None = None,
        seed: int = 0,
        trace: Trace | None = None,
        check: bool = True,
        timeout: float | None = None,
        graphs: bool = True,
        compare_calls: bool | None = None,
        symmetric_limit: int | None = None,
    ) -> None:
        check_environment()
        if not isinstance(program, Program):
            raise error(f"not a host program: {described(program)}", user_span(), expected=LOWERED, hint=LOWER)
        if program.phase is not Phase.HOST:
            raise error(f"@{program.name} is a fusion", user_span(), expected="a host program", hint=LOWER)
        if machine is not None:
            check_known("machine", machine, MACHINES)
        if trace is not None and not isinstance(trace, Trace):
            raise error(f"trace is {described(trace)}", user_span(), expected="a hostir.Trace, or None")
        if machine == "local" and group is not None:
            raise error("machine='local' simulates all ranks, and has no group", user_span(), expected="one of the two")
        self.program = program
        self.check = check
        self.rank = 0
        self.latest: BoundCall | None = None
        self.sizes = program.given_sizes(sizes)
        if check and verify(program).size_names <= self.sizes.keys():
            prove(program, self.sizes)
        self.symmetric_limit = SYMMETRIC_LIMIT.get(symmetric_limit)
        if self.symmetric_limit is not None and (needed := self.symmetric_bytes) is not None:
            self._check_limit(needed, self.sizes)
        self.kernels = KERNELS.get(kernels)
        self.seed = check_seed(seed)
        self.trace = trace
        self.timeout = TIMEOUT.get(timeout)
        self.compare_calls = COMPARE_CALLS.get(compare_calls)
        self.plans: dict[tuple[Any, ...], Plan] = {}  # by tensors key, the most recently used last
        self.session: Session | None = None
        self.watchdog: Watchdog | None = None
        self.choice: Any = None  # a hostir.choice.Choice, set by hostir.choice, which this module must not import
        self._written = written_inputs(program)

    __signature__ = _without_self(__init__)  # inspect would show the signature of `__new__`

    @untraced
    def __call__(self, *inputs: Any, out: Any = None) -> tuple[Any, ...]:
        """Run the program once.

        Raises HostIRError before anything runs if tensors do not fit. Raises it later if a statement fails.

        Args:
            inputs: this rank's part of each input, in order; None for an input that this rank holds no part of. On the
                local machine, a list of all ranks' parts for each input.
            out: the tensor to write to, or one tensor for each output; by default new tensors are allocated.

        Returns:
            This rank's part of each output. On the local machine, a list of all ranks' parts for each output.
        """
        raise NotImplementedError

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        """Start a call that runs at the same time as the caller's other work.

        `wait()` of the returned handle gives the outputs.

            started = executor.start(x)
            y = w @ v  # meanwhile
            (z,) = started.wait()

        Arguments and errors are the same as for a plain call. On CUDA the call runs on a separate stream of the
        executor, after all earlier work of the current stream. You may start it and wait for it while you capture a
        CUDA graph. On a CPU and on simulated ranks, the call has ended when `start` returns.

        All ranks must make the same plain and started calls in the same order. The calls run in that order. Before the
        wait, do not write to the inputs and do not use the tensors of `out`. A handle may be dropped without a wait.
        """
        raise NotImplementedError

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        """Return, for each input, the symmetric buffer to which the program copies it; None if it makes no copy.

        If you pass the returned tensor itself as the input, a call makes no copy. So compute the input in this tensor.
        The memory belongs to the executor. It keeps your data until a call of the program gets another input. All ranks
        must call this method.
        """
        raise NotImplementedError

    @property
    def symmetric_bytes(self) -> int | None:
        """The number of bytes of symmetric memory that the program takes on this rank.

        It is the number for the sizes of the latest call. Before the first call, and on simulated ranks, it is the
        number for the sizes that were passed to the executor. The value is None if one of these sizes was not passed.
        """
        if self.latest is not None:
            return self.latest.plan.unrolled.memory[1]
        if not self.program.size_names <= self.sizes.keys():
            return None
        return unroll(self.program, self.rank, self.sizes).memory[1]

    @property
    def tape(self) -> str:
        """The driver calls that native code makes for calls like the latest one, as text with one driver call a line.

        Steps that Python makes are lines "by Python". The text is empty before the third such call. It is always empty
        where Python issues all calls.
        """
        return ""

    @property
    def graph_refusal(self) -> str | None:
        """The reason why calls like the latest one, with `out=`, are not replayed from CUDA graphs.

        It is None if they are replayed. A reason may be that they have few driver calls.
        """
        raise NotImplementedError

    @untraced
    def synchronize(self) -> None:
        """Wait until everything that was issued so far has ended. On CUDA, wait at most `timeout` seconds.

        Raises HostIRError if a kernel reports a problem. After `timeout` seconds, raises a HostIRError that names the
        unfinished communications.
        """
        raise NotImplementedError

    def _check_limit(self, needed: int, sizes: Mapping[str, int]) -> None:
        """Raise HostIRError if `needed` bytes of symmetric memory exceed the limit. The message contains the sizes."""
        if self.symmetric_limit is None or needed <= self.symmetric_limit:
            return
        bound = "".join(f", {name}={size}" for name, size in sorted(sizes.items()))
        raise error(
            f"@{self.program.name} takes {amount(needed)} ({needed} bytes) of symmetric memory on a rank{bound}",
            expected=f"at most {self.symmetric_limit} bytes: the limit that symmetric_limit= or HOSTIR_SYMMETRIC_LIMIT "
            "sets",
            hint="hi.compile with the strategy 'auto' picks a program that fits; 'sequential' uses no symmetric memory",
        )


def run(program: Program, *inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Run a host program once on unsharded tensors, on any machine, and return unsharded tensors.

    Under torchrun every rank passes the same inputs and gets the same outputs. Each rank cuts its parts out of the
    inputs, and at the end all ranks exchange their outputs. This function is meant for tests and small runs. `options`
    are passed to Executor.
    """
    executor = Executor(program, **options)
    sizes = bind_sizes(program, inputs, executor.sizes)
    executor.sizes = sizes
    if executor.machine == "local":
        outputs = executor(*inputs)
    else:
        check_apart(program, written_inputs(program), inputs)  # here: the parts are copies, which never overlap
        parts = executor(
            *[shard(x, v.tensor, executor.rank, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
        )
        outputs = tuple(zip(*everyones(parts, executor.session), strict=True))
    return tuple(assemble(parts, v.tensor, sizes) for v, parts in zip(program.outputs, outputs, strict=True))


def everyones(parts: Sequence[Part], joined: Session | None) -> list[Sequence[Part]]:
    """Return the parts of every rank, in the order of the ranks. All ranks call this.

    Without a session this process is the only rank, and the result is `[parts]`.
    """
    if joined is None:
        return [parts]
    gathered: list[Any] = [None] * joined.size
    dist.all_gather_object(gathered, [None if x is None else x.cpu() for x in parts], joined.groups.all_ranks())
    return [[None if x is None else x.to(joined.device) for x in theirs] for theirs in gathered]
