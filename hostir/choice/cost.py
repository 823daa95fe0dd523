"""The tasks of a host program for the cost model. A task has its work, and the tasks that it waits for.

Each rank's program is unrolled as for a run, and every operation becomes a task. So the cost model sees exactly the
operations that machines run, and knows nothing about strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from hostir.choice.one_rank import unroll_for_all
from hostir.ir.comm_ops import LOW_LATENCY, ONE_SHOT, TWO_SHOT
from hostir.ir.machine import Done, Ready, uncollected
from hostir.ir.program import Program
from hostir.ir.types import FP8
from hostir.kernels.matmul.estimate import IN_L2, right_bytes
from hostir.kernels.matmul.tiles import MIN_OWN_ROWS, Gemm, collecting_pays, grouped_tile
from hostir.machines.normed import NormedSum
from hostir.machines.pushes import PushedProduct, Pushes
from hostir.plan.endings import ENDING, CallEnding
from hostir.plan.lifetimes import workspace_buffers
from hostir.plan.operations import (
    CALLER,
    NONE,
    AllocateOp,
    BarrierOp,
    CollectiveOp,
    ComputeOp,
    CopyOp,
    DelayOp,
    FreeOp,
    MarkOp,
    MessagesOp,
    Op,
    SignalOp,
    SymmetricOp,
    SynchronizeOp,
    ViewOp,
    WaitOp,
    WaitSignalOp,
)
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram

F32 = 4  # bytes
SEVERAL = ("batched_matmul", "grouped_matmul", "grouped_outer")  # computations with several right sides


@dataclass(frozen=True)
class Nothing:
    """No work. The task only waits for other tasks."""


@dataclass(frozen=True)
class Pause:
    """A fixed time on a stream: a `delay`, or a signal if `sender` is not empty.

    `sender` says what sends the signal. `stream`: the stream itself, or a computation. `kernel`: a kernel that does
    nothing else. `copies`: the kernel that makes the copies before the signal; the signal then takes no extra time.
    """

    microseconds: float = 0.0
    sender: str = ""


@dataclass(frozen=True)
class Traffic:
    """A computation that is bound by memory.

    Fields:
        bytes: the number of bytes that one kernel for the complete computation reads and writes.
        aten_kernels: the number of kernels that ATen launches for the computation.
        aten_bytes: the number of bytes that ATen's kernels together read and write; 0 if it is equal to `bytes`.
        in_sum: the number of bytes that are left if the kernel of a sum over ranks carries out the computation; None if
            it cannot. See `NormedSum`.
    """

    bytes: int
    aten_kernels: int = 1
    aten_bytes: int = 0
    in_sum: int | None = None


@dataclass(frozen=True)
class Crossing:
    """The part of a team's communication that goes between hosts.

    Fields:
        bytes: the largest number of bytes that leave one host.
        hosts: the number of hosts of the team.
        senders: the number of the team's ranks on each host; the smallest number, if the hosts differ.
        sharers: the number of ranks of the program on each host, which share its NICs; the largest number.
    """

    bytes: int
    hosts: int
    senders: int
    sharers: int


@dataclass(frozen=True)
class CostTransfer:
    """A collective of a team, or messages of a team.

    Fields:
        collective: the keyword of the collective, with its implementation if NCCL does not run it, or `messages`.
        bytes: the number of bytes of the gathered, summed or exchanged tensor.
        ranks: the number of ranks of the team.
        in_workspace: True if the operand already lies in the workspace that the implementation reads.
        crossing: the part that goes between hosts; None if the ranks of the team share a host.
    """

    collective: str
    bytes: int
    ranks: int
    in_workspace: bool = False
    crossing: Crossing | None = None

    @property
    def by_nccl(self) -> bool:
        """True if NCCL runs it."""
        return " by " not in self.collective

    @property
    def steps(self) -> int:
        """The number of rounds of a ring: 2 for an all-reduce, which is a reduce-scatter and an all-gather."""
        return 2 if self.collective == "allreduce" else 1


@dataclass(frozen=True)
class CostCopy:
    """A copy to a peer, or from a peer.

    Fields:
        bytes: the number of bytes of the copy.
        peer: the rank at the other end.
        to_peer: True for a copy to `peer`, False for a copy from it.
        sms: the number of SMs of the kernel that copies; 0 for a copy engine.
        first: True for the first copy of a kernel.
        in_matmul: True if a Triton matmul can store its result directly to the peer.
    """

    bytes: int
    peer: int
    to_peer: bool
    sms: int = 0
    first: bool = False
    in_matmul: bool = False


@dataclass(frozen=True)
class CostBarrier:
    """A barrier among `ranks` ranks."""

    ranks: int


@dataclass(frozen=True)
class EndOfCall:
    """The reset of a rank's flags at the end of a call.

    `within` is what the last kernel that waits for flags computes, if it may reset them: `sum`, `matmul` or nothing.
    """

    within: str = ""


TaskWork = Nothing | Pause | Gemm | Traffic | CostTransfer | CostCopy | CostBarrier | EndOfCall


@dataclass(frozen=True)
class Loads:
    """The data that a matmul finds in L2, and so need not load.

    Fields:
        cached: True if its right operand is in L2, because an earlier matmul of the rank has read it.
        before: the number of bytes of right operands that earlier matmuls of the rank have loaded. They have replaced
            data that must be written back to memory: see `Hardware.dirty`.
    """

    cached: bool = False
    before: int = 0


@dataclass(eq=False)
class CostTask:
    """An operation that a rank issues to a lane.

    A lane is a stream of the rank, or the sequence of a team's communications.

    Fields:
        after: the tasks on its lane that end before it begins.
        joins: the tasks on other lanes that end before it begins.
        partners: the tasks of all ranks for the same collective or barrier, including this task. They begin together.
        blocks: the signals of each block that the task waits for, in the order of computation. Only a computation that
            waits for flags has blocks.
        raises: the signals of the flags that the task raises, in the order in which it computes their blocks.
        overlapped_sms: the number of SMs that copies take while it runs.
        reserved_sms: the number of SMs that it leaves to signals.
        loads: what it finds in L2, if it is a matmul.
        added: the number of bytes of the tensor that it adds to its product, if it is a matmul.
        op: the operation of the unrolled program; None for the reset of the flags at the end of a call.
        launches: how often the host issues each operation for this task, by a key of `Hardware.launch`. It counts all
            operations since the previous task, and the launch of this task.
    """

    rank: int
    work: TaskWork
    after: list[CostTask] = field(default_factory=list)
    joins: list[CostTask] = field(default_factory=list)
    partners: list[CostTask] = field(default_factory=list)
    blocks: list[list[CostTask]] = field(default_factory=list)
    raises: list[CostTask] = field(default_factory=list)
    overlapped_sms: int = 0
    reserved_sms: int = 0
    loads: Loads = Loads()
    added: int = 0
    op: Op | None = None
    launches: Mapping[str, int] = field(default_factory=dict)


FlagKey = tuple[int, Any, int]  # (rank, symmetric buffer, element)


@dataclass
class Shared:
    """State that the ranks share while their tasks are built: flags, waits for flags, and tasks that begin together."""

    # (epoch, signal, True if the rank of the flag itself sends it)
    flags: dict[FlagKey, list[tuple[int, CostTask, bool]]] = field(default_factory=dict)
    waits: list[tuple[CostTask, int | None, FlagKey, int]] = field(default_factory=list)  # (task, block, flag, epoch)
    meetings: dict[tuple[Any, ...], list[CostTask]] = field(default_factory=dict)
    hosts: Sequence[Sequence[int]] = ()  # the ranks of each host; empty if all ranks share a host

    def crossing(self, transfer: CostTransfer, team: Sequence[int]) -> Crossing | None:
        """Return the part of a collective that goes between hosts; None if the ranks of the team share a host.

        An all-to-all sends the bytes for ranks on other hosts. All other collectives are rings of the ranks, in which
        each host receives from one host and sends to one host.
        """
        senders = [count for host in self.hosts if (count := len(set(team) & set(host)))]
        if len(senders) < 2:
            return None
        n, local = transfer.ranks, max(senders)
        exchanged = local * transfer.bytes * (n - local) // n
        size = exchanged if transfer.collective == "alltoall" else transfer.steps * transfer.bytes * (n - 1) // n
        return Crossing(size, len(senders), min(senders), max(map(len, self.hosts)))

    def same_host(self, rank: int, other: int) -> bool:
        """Return True if two ranks are on one host."""
        return not self.hosts or any(rank in host and other in host for host in self.hosts)


class Registers:
    """The registers of one rank's unrolled program: their bytes, their flags, and the work of computations on them."""

    def __init__(self, unrolled: UnrolledProgram) -> None:
        self.unrolled = unrolled
        self.bytes = {NONE: 0} | {
            register: prod(x.shape) * unrolled.dtypes[x.buffer].bytes for register, x in unrolled.layouts.items()
        }

    def total(self, registers: Sequence[int]) -> int:
        """Return the total number of bytes of some registers."""
        return sum([self.bytes[register] for register in registers])

    def flag(self, flags: int, slot: int) -> FlagKey:
        """Return the key of flag `slot` in the register `flags`. All ranks use the same key for it."""
        row = self.unrolled.layouts[flags]
        home = self.unrolled.symmetric[row.buffer]
        return home.rank, home.home, row.offset + slot * row.strides[0]

    def matrices(self, op: ComputeOp) -> Gemm:
        """Return an operation with several right sides in the form that the cost model uses.

        It takes all rows to be in groups of equal sizes.
        """
        layouts, (x, other, *_), out = self.unrolled.layouts, op.operands, self.unrolled.layouts[op.out].shape
        k, dtype = layouts[x].shape[-1], self.gemm_dtype(op)
        if op.computation == "grouped_outer":
            rows = prod(layouts[x].shape[:-1])
            return Gemm(out[1], out[2], -(-rows // out[0]), dtype, batches=out[0], matrices=out[0])
        count, batches = prod(layouts[other].shape[:-2]), prod(out[:-2])
        if op.computation == "batched_matmul":
            return Gemm(out[-2], out[-1], k, dtype, batches=batches, matrices=count)
        rows = batches * out[-2]
        height = grouped_tile(rows // count, self.unrolled.dtypes[layouts[x].buffer].bytes).m
        collects = any(index != NONE for index in op.operands[3:4])  # and if one kernel waits for rows: see `by_tiles`
        collects = collects or collecting_pays(batches, count, rows, out[-1], height)
        groups = count if collects else count * batches  # tiles span the sources of a group if its rows are collected
        mean = max(-(-rows // groups), 1)
        return Gemm(mean, out[-1], k, dtype, batches=groups, matrices=count, grouped=True, collects=collects)

    def gemm(self, op: ComputeOp, local_rows: int) -> Gemm:
        """Return the matmul of an operation in the form that the cost model uses.

        `local_rows` is the number of rows of this rank that are stored in a separate tensor, not with the gathered
        rows; 0 if there are no such rows.
        """
        if op.computation in SEVERAL:
            return self.matrices(op)
        out, ready = self.unrolled.layouts[op.out], op.ready
        rows, k = prod(out.shape[:-1]), self.unrolled.layouts[op.operands[0]].shape[-1]
        dtype, result = self.gemm_dtype(op), self.unrolled.dtypes[out.buffer].bytes
        plain = Gemm(rows, out.shape[-1], k, dtype, result=result if dtype.startswith("f8") else None)
        if ready is None:
            return plain
        block = max(rows // ready.results, 1)
        return replace(plain, block=block, separate=local_rows >= MIN_OWN_ROWS, overlapped=ready.overlapped_sms > 0)

    def traffic(self, op: ComputeOp) -> Traffic:
        """Return the traffic of a computation that is not a matmul.

        ATen computes three kinds of sums in f32, with one kernel for each addend: sums with an activation, sums with
        further operands, and sums that read this rank's rows from a separate tensor.
        """
        bytes_once = self.total((op.out, *op.operands))
        local_apart = op.ready is not None and op.ready.own_rows is not None
        addends = [register for register in op.operands[1:] if register != NONE]
        activation = bool(op.options.get("activation"))
        if op.computation != "sum" or not (local_apart or addends or activation):
            return Traffic(bytes_once)
        out, x = self.unrolled.layouts[op.out], self.unrolled.layouts[op.operands[0]]
        additions = max(x.shape[op.options["axis"]] - 1, 0) + len(addends)
        size = self.unrolled.dtypes[out.buffer].bytes
        widen, add, activate, narrow = size + F32, size + 2 * F32, 2 * F32, F32 + size  # bytes an element
        an_element = widen + additions * add + activation * activate + narrow
        return Traffic(bytes_once, 2 + additions + activation, prod(out.shape) * an_element)

    def bytes_in_sum(self, normed: NormedSum) -> Iterator[tuple[ComputeOp, int]]:
        """Yield the computations that follow a sum in its kernel, with the bytes that the kernel moves for each."""
        read = {id(normed.add): normed.residual, id(normed.norm): normed.weight}
        for op, result in zip(normed.computations, normed.stored[1:], strict=True):
            yield op, self.total((read.get(id(op), NONE), result))

    def gemm_dtype(self, op: ComputeOp) -> str:
        """Return the name that `Gemm` uses for the dtype of a matmul's operands."""
        layouts, (a, _, *scales) = self.unrolled.layouts, op.operands
        name = self.unrolled.dtypes[layouts[a].buffer].name
        if name not in FP8:
            return name
        return "f8" if op.options.get("fast") and layouts[scales[0]].shape[-1] == 1 else "f8s"


class RankTasks:
    """Builds the tasks of one rank from its unrolled program."""

    def __init__(self, unrolled: UnrolledProgram, shared: Shared) -> None:
        self.unrolled = unrolled
        self.registers = Registers(unrolled)
        self.shared = shared
        self.tasks: list[CostTask] = []
        self.last: dict[Any, CostTask] = {}  # the latest task of each lane
        self.communications: dict[int, CostTask] = {}  # by the handle of the communication
        self.counts: Counter[Any] = Counter()  # the number of collectives and barriers of each team so far
        self.in_workspace = workspace_buffers(unrolled)
        self.in_l2: dict[Any, int] = {}  # the bytes of the right operands that L2 holds, the latest read last
        self.loaded = 0  # the bytes of right operands that matmuls have loaded so far
        self.stream = CALLER
        self.launches: dict[str, int] = {}  # the operations that the host has issued since the latest task
        runs = Pushes.of(unrolled)
        self.pushes = {id(op): run for run in runs for op in run.ops}
        self.in_matmuls = {id(op) for product in PushedProduct.of(unrolled, runs) for op in product.pushes.ops}
        sums = NormedSum.of(unrolled)
        self.in_sums = {id(op): size for each in sums for op, size in self.registers.bytes_in_sum(each)}
        # The latest kernel that copies: the task before it on its stream, and the lane of its latest copy.
        self.before_push: CostTask | None = None
        self.push_lane: Any = CALLER
        self.pushed: dict[int, CostTask] = {}  # by stream: the first copy of the latest kernel that copies
        for op in unrolled.ops:
            count = len(self.tasks)
            TASKS[type(op)](self, op)
            for task in self.tasks[count:]:
                task.op = op
        if unrolled.symmetric:
            self.end_call()

    def end_call(self) -> None:
        """Add the task that resets this rank's flags.

        The CUDA machine has one more condition for an early end, which is left out here: every peer that a rank signals
        must signal it.
        """
        ending = CallEnding.of(self.unrolled)
        within = ""
        last = ending.last
        if isinstance(last, ComputeOp) and last.computation in ENDING and ending.within(last):
            within = "sum" if last.computation == "sum" else "matmul"
        self.issue(ending.stream, EndOfCall(within), *map(self.last.get, ending.others), launch="compute")

    def issue(self, lane: Any, work: TaskWork, *joins: CostTask | None, launch: str = "") -> CostTask:
        """Add a task that follows the latest task of its lane and the tasks `joins`; return it.

        `launch` is the key of the operation that the host issues for the task.
        """
        if isinstance(lane, int) and lane != self.stream:
            self.stream = lane
            self.launch("stream")
        self.launch(launch)
        after = [self.last[lane]] if lane in self.last else []
        others = [t for t in joins if t is not None and t not in after]
        task = CostTask(self.unrolled.rank, work, after, others, launches=self.launches)
        self.launches = {}
        self.tasks.append(task)
        self.last[lane] = task
        return task

    def meet(self, task: CostTask, *key: Any) -> None:
        """Make a task begin together with the tasks of other ranks for the same collective or barrier.

        `key` consists of the kind of task and the team.
        """
        self.counts[key] += 1
        partners = self.shared.meetings.setdefault((*key, self.counts[key]), [])
        partners.append(task)
        task.partners = partners

    def launch(self, operation: str) -> None:
        """Count an operation that the host issues after the latest task. The count becomes a part of the next task."""
        self.launches[operation] = self.launches.get(operation, 0) + 1

    def allocate(self, op: AllocateOp) -> None:
        self.launch("allocate")

    def view(self, op: ViewOp) -> None:
        if op.x not in self.unrolled.symmetric:  # views of symmetric buffers are made before the first call
            self.launch("view")

    def free(self, op: FreeOp) -> None:
        self.launch("view")

    def nothing(self, op: SymmetricOp) -> None:
        """Add no task, because symmetric buffers exist before a call."""

    def compute(self, op: ComputeOp) -> None:
        contracts, ready = op.place.statement.contracts, op.ready
        local = NONE if ready is None or ready.own_rows is None else ready.own_rows
        local_rows = 0 if local == NONE else prod(self.unrolled.layouts[local].shape[:-1])
        few = 0 < local_rows < MIN_OWN_ROWS and op.computation not in SEVERAL
        if contracts and few:  # Triton first copies so few rows next to the gathered rows
            self.issue(op.stream, Traffic(2 * self.registers.bytes[local]), launch="compute")
        work: TaskWork = self.registers.gemm(op, local_rows) if contracts else self.registers.traffic(op)
        if isinstance(work, Traffic):
            work = replace(work, in_sum=self.in_sums.get(id(op)))
        task = self.issue(op.stream, work, launch="matmul" if contracts else "compute")
        if isinstance(work, Gemm):
            layouts = self.unrolled.layouts
            others = [layouts[register] for register in op.operands[2:] if register != NONE]
            adds = layouts[op.out] in others
            task.added = adds * self.registers.bytes[op.out]
            task.loads = self.loads(layouts[op.operands[1]], right_bytes(work))
        if ready is not None:
            self.wait_for_blocks(task, op, ready)
        if op.done is not None:
            self.raise_flags(task, op, op.done)

    def loads(self, right: Any, size: int) -> Loads:
        """Look up a right operand of `size` bytes in L2, and record that L2 holds it from now on."""
        loads = Loads(self.in_l2.pop(right, None) is not None, self.loaded)
        self.loaded += size * (not loads.cached)
        self.in_l2[right] = size
        while sum(self.in_l2.values()) > IN_L2:
            del self.in_l2[next(iter(self.in_l2))]
        return loads

    def wait_for_blocks(self, task: CostTask, op: ComputeOp, ready: Ready) -> None:
        """Make a task wait, while it runs, for the flags of its blocks."""
        task.overlapped_sms, task.reserved_sms = ready.overlapped_sms, ready.reserved_sms
        if ready.overlapped_sms:
            first = self.pushed[op.stream]
            task.after, task.joins = [*first.after], [*first.joins]
        task.blocks = [[] for _ in ready.order]
        for turn, block in enumerate(ready.order):
            for slot in ready.needed(block):
                self.shared.waits.append((task, turn, self.registers.flag(ready.flags, slot), ready.epoch))

    def raise_flags(self, task: CostTask, op: ComputeOp, done: Done) -> None:
        """Make a task raise one flag after each block of its result."""
        order = done.order
        if op.ready is not None:  # it computes in the order of the blocks that it waits for
            first = -(-op.ready.first * done.blocks // op.ready.results)
            order = tuple((first + n) % done.blocks for n in range(done.blocks))
        for slot in order:
            flag = CostTask(task.rank, Pause(sender="block"))
            self.tasks.append(flag)
            task.raises.append(flag)
            self.shared.flags.setdefault(self.registers.flag(done.flags, slot), []).append((done.epoch, flag, True))

    def collective(self, op: CollectiveOp) -> None:
        name = f"{op.communication} by {op.by}" if op.by else op.communication
        largest = max(self.registers.bytes[op.x], self.registers.bytes[op.out])
        there = bool(op.by) and self.unrolled.buffers[op.x] in self.in_workspace
        if op.by in (ONE_SHOT, TWO_SHOT) and not there:  # two operators of torch: a copy and a kernel
            self.launch("compute")
        launch = "compute" if op.by in (LOW_LATENCY, ONE_SHOT, TWO_SHOT) else "communicate"
        transfer = CostTransfer(name, largest, len(op.team), there)
        transfer = replace(transfer, crossing=self.shared.crossing(transfer, op.team))
        task = self.communicate(op, transfer, launch=launch)
        self.meet(task, "communication", op.team)

    def messages(self, op: MessagesOp) -> None:
        largest = max(self.registers.total(op.reads), self.registers.total(op.writes))  # links are full duplex
        transfer = CostTransfer("messages", largest, len(op.team))
        self.communicate(op, replace(transfer, crossing=self.messages_crossing(op)), op.collective)

    def messages_crossing(self, op: MessagesOp) -> Crossing | None:
        """Return the part of this rank's messages that goes between hosts. All ranks of its host share the NICs."""
        rank, same = self.unrolled.rank, self.shared.same_host
        sent, received = ([x for x, peer in way if not same(rank, peer)] for way in (op.sends, op.receives))
        size = max(self.registers.total(sent), self.registers.total(received))
        return Crossing(size, 2, 1, max(map(len, self.shared.hosts))) if sent or received else None

    def communicate(
        self,
        op: CollectiveOp | MessagesOp,
        transfer: CostTransfer,
        collective: bool = True,
        launch: str = "communicate",
    ) -> CostTask:
        """Add a communication on the lane of its team, after the latest task of its stream; return its task."""
        before = self.last.get(op.stream)
        task = self.issue(("team", op.team, collective), transfer, before, launch=launch)
        self.communications[op.handle] = task
        return task

    def mark(self, op: MarkOp) -> None:
        if op.stream in self.last:
            self.communications[op.handle] = self.last[op.stream]

    def wait(self, op: WaitOp) -> None:
        self.issue(op.stream, Nothing(), self.communications.get(op.handle), launch="wait")

    def copy(self, op: CopyOp) -> None:
        source, target = self.unrolled.owner(op.x), self.unrolled.owner(op.out)
        to_peer = source == self.unrolled.rank
        if not op.sms and source == target:  # a kernel copies within the rank's memory
            self.issue(op.stream, Traffic(2 * self.registers.bytes[op.x]), launch="compute")
        elif not op.sms:
            copy = CostCopy(self.registers.bytes[op.x], target if to_peer else source, to_peer)
            self.issue(op.stream, copy, launch="copy")
        else:
            in_matmul = id(op) in self.in_matmuls
            self.push(op, CostCopy(self.registers.bytes[op.x], target, to_peer, op.sms, in_matmul=in_matmul))

    def push(self, op: CopyOp, copy: CostCopy) -> None:
        """Add a copy of a kernel that copies on some SMs.

        Two groups of SMs take turns with the copies. So copies within the rank's memory run beside the copies to peers,
        on a lane of their own.
        """
        first = op is self.pushes[id(op)].ops[0]
        if first:
            self.before_push = self.last.get(op.stream)
        self.push_lane = op.stream
        if copy.peer == self.unrolled.rank:
            self.push_lane = "own copies", op.stream
            if self.before_push is not None:
                self.last.setdefault(self.push_lane, self.before_push)
        begins = self.last.get(self.push_lane) is self.before_push
        task = self.issue(self.push_lane, replace(copy, first=begins), launch="push" if first else "")
        if first:
            self.pushed[op.stream] = task
        self.end_push(op)

    def end_push(self, op: CopyOp | SignalOp) -> None:
        """Make the stream wait for the copies within the rank's memory, if `op` is the last operation of its kernel."""
        if op is self.pushes[id(op)].ops[-1] and (own := self.last.pop(("own copies", op.stream), None)):
            self.issue(op.stream, Nothing()).after.append(own)

    def signal(self, op: SignalOp) -> None:
        if op.sms:
            task = self.issue(op.stream, Pause(sender="kernel"), launch="push")
            if task.after and isinstance(task.after[0].work, Nothing):
                # `kernel_signal` was measured from the end of the copy that the signal's stream waits for.
                task.after = [*task.after[0].after, *task.after[0].joins]
        elif id(op) in self.pushes:
            task = self.issue(self.push_lane, Pause(sender="copies"))
            self.end_push(op)
        else:
            task = self.issue(op.stream, Pause(sender="stream"), launch="signal")
        own = op.peer == self.unrolled.rank
        self.shared.flags.setdefault(self.registers.flag(op.flags, op.slot), []).append((op.epoch, task, own))

    def wait_signal(self, op: WaitSignalOp) -> None:
        task = self.issue(op.stream, Nothing(), launch="signal")
        self.shared.waits.append((task, None, self.registers.flag(op.flags, op.slot), op.epoch))

    def barrier(self, op: BarrierOp) -> None:
        self.meet(self.issue(op.stream, CostBarrier(len(op.team)), launch="barrier"), "barrier", op.team)

    def synchronize(self, op: SynchronizeOp) -> None:
        self.issue(op.stream, Nothing(), self.last.get(op.other), launch="synchronize")

    def delay(self, op: DelayOp) -> None:
        self.issue(op.stream, Pause(float(op.microseconds)), launch="delay")


# The method that adds the tasks of each class of operations. A test compares the keys with all classes.
TASKS: dict[type[Op], Callable[[RankTasks, Any], None]] = {
    AllocateOp: RankTasks.allocate,
    SymmetricOp: RankTasks.nothing,
    ViewOp: RankTasks.view,
    FreeOp: RankTasks.free,
    ComputeOp: RankTasks.compute,
    CopyOp: RankTasks.copy,
    SignalOp: RankTasks.signal,
    WaitSignalOp: RankTasks.wait_signal,
    BarrierOp: RankTasks.barrier,
    CollectiveOp: RankTasks.collective,
    MessagesOp: RankTasks.messages,
    MarkOp: RankTasks.mark,
    WaitOp: RankTasks.wait,
    SynchronizeOp: RankTasks.synchronize,
    DelayOp: RankTasks.delay,
}


def tasks_to_simulate(
    program: Program, sizes: Mapping[str, int], hosts: Sequence[Sequence[int]] = ()
) -> list[CostTask]:
    """Return the tasks of rank 0 if it stands for all ranks, else those of all ranks, as `tasks_of` does.

    The arguments and errors are those of `tasks_of`. If rank 0 stands for all ranks, a collective begins when rank 0
    comes, and a signal sets the flag of rank 0 that another rank sets by the same signal.
    """
    unrolled = unroll_for_all(program, sizes)
    if unrolled is None or not _same_crossings(unrolled, hosts):
        return tasks_of(program, sizes, hosts)
    return _joined([unrolled], hosts)


def _same_crossings(unrolled: UnrolledProgram, hosts: Sequence[Sequence[int]]) -> bool:
    """Return True if the teams of each collective have equally many ranks on their hosts."""
    if not hosts:
        return True
    teams = {op.place.statement.teams for op in unrolled.ops if isinstance(op, CollectiveOp)}
    counts = ([sorted(len({*team} & {*host}) for host in hosts) for team in each] for each in teams)
    return all(count == of_teams[0] for of_teams in counts for count in of_teams)


@uncollected()
def tasks_of(program: Program, sizes: Mapping[str, int], hosts: Sequence[Sequence[int]] = ()) -> list[CostTask]:
    """Return the tasks of all ranks, rank by rank, in the order in which each rank issues them.

    `hosts` has the ranks of each host. It is empty if all ranks share a host.

    Raises HostIRError if the sizes do not fit the program.
    """
    return _joined([unroll(program, rank, sizes) for rank in range(program.ranks)], hosts)


@uncollected()
def _joined(unrolled: Sequence[UnrolledProgram], hosts: Sequence[Sequence[int]]) -> list[CostTask]:
    """Return the tasks of some ranks, which wait for each other's signals."""
    count = unrolled[0].program.ranks
    shared = Shared(hosts=[[rank for rank in host if rank < count] for host in hosts])
    tasks = [task for each in unrolled for task in RankTasks(each, shared).tasks]
    for waiter, turn, flag, epoch in shared.waits:
        sent = [(task, own) for number, task, own in shared.flags.get(flag, ()) if number >= epoch]
        if not sent:
            continue
        (task, own), *_ = sent
        sent_before = own and not waiter.overlapped_sms  # before the waiter begins
        if turn is None or sent_before:
            waiter.after.append(task)
        else:
            waiter.blocks[turn].append(task)
    return tasks
