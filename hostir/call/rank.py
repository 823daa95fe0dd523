"""Run host programs on this process's rank: bind calls, agree with other ranks, plan, issue, and recover."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from hostir.call.arguments import (
    TensorsKey,
    addresses,
    cache_key,
    check_apart,
    check_out,
    refuse_gradients,
    sequence_of,
    unwritable,
    warn_of_copies,
)
from hostir.call.bound import MAX_BOUND, BoundCall, Plan, untraced
from hostir.call.executor import Executor
from hostir.call.sizes import bind_sizes
from hostir.call.started import SideStreams, Started
from hostir.check import Proof, proof_of
from hostir.ir.program import Program, shares_memory, stated_hosts
from hostir.ir.source import HostIRError, error, logger, warn_once
from hostir.job.agreement import Agreement, RefusedError
from hostir.job.groups import Groups
from hostir.job.guest import session_of
from hostir.job.hosts import equal_hosts, ranks_text
from hostir.job.links import AlikeError, MisalignedError, headline
from hostir.job.offers import KindOfSizes
from hostir.job.session import Session, forked_from
from hostir.job.threads import CURRENT
from hostir.job.watchdog import LAST_WORDS
from hostir.kernels.pools import outside_pools
from hostir.kernels.table import kernel_table
from hostir.knobs import PROFILE
from hostir.machines.binding import MAX_PLANS, Part, places
from hostir.machines.cuda.cublas import captured_for_a_trial
from hostir.machines.cuda.graphs import Graphs
from hostir.machines.cuda.machine import CudaMachine, CudaPlan
from hostir.machines.cuda.streams import CallOrder, communication_order, current, queues
from hostir.machines.cuda.timeline import Timeline
from hostir.machines.cuda.uses import LATE, hold, release
from hostir.machines.gloo.machine import GlooMachine, GlooPlan
from hostir.machines.trace import Trace
from hostir.plan.unroll import message_teams_of, teams_of, unroll
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOG = logger(__name__)
NO_GRAPH = "@%s: no CUDA graph is captured: %s"
DEVICES = {"gloo": "cpu", "cuda": "cuda"}
RECENT = 4  # bound calls that are tried before the tensors of a call are looked up


class RankExecutor(Executor):
    """An executor on one rank: this process. The rank belongs to a job or to a process group, or it is alone."""

    @untraced
    def __init__(
        self,
        program: Program,
        *,
        machine: str | None = None,
        group: ProcessGroup | DeviceMesh | str | None = None,
        trace: Trace | None = None,
        timeout: float | None = None,
        graphs: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(program, machine=machine, group=group, trace=trace, timeout=timeout, graphs=graphs, **options)
        self.bound: OrderedDict[tuple[Any, ...], BoundCall] = OrderedDict()  # the most recently used last
        self._graphs: Graphs | None = None
        self._order: CallOrder | None = None  # orders the calls of this executor on different streams
        self._communicates = bool(teams_of(program) or message_teams_of(program)) or shares_memory(program)
        self._side: SideStreams | None = None
        # A function of the sizes. It returns the executor whose program captures run, and a reason to issue each call
        # anew, or an empty text. It returns None if that is not known yet.
        self.decided: Callable[[Mapping[str, int]], tuple[Executor, str] | None] | None = None
        self._uncaptured: dict[Hashable, HostIRError] = {}  # by sizes: why a rank has refused the program of captures
        self._ended = ""  # the reason why this executor refuses calls; empty while it accepts them
        self._agreement = Agreement(None, program, self.kernels, False)  # without other ranks; `_join` may replace it
        self._machine = self._join(machine, group, timeout)
        self.calls = self._agreement.calls
        self._compare = self._agreement.compare
        self.machine = self._machine.name
        self._process = os.getpid()
        _with_threads.add(self)
        if self.machine == "cuda":
            self._side = SideStreams(self._machine.device)
            if self._communicates:
                self._order = communication_order(self._machine.device)
            if graphs and trace is None and not PROFILE.get():
                self._graphs = self._make_graphs()

    def _join(self, machine: str | None, group: object, timeout: float | None) -> CudaMachine | GlooMachine:
        """Join the group or the job if there is one, and return this rank's machine.

        Raises HostIRError if there are fewer ranks than the program needs.
        """
        size = 1
        device = torch.device("cpu" if machine == "gloo" else "cuda")
        self.session = session_of(group, DEVICES[machine] if machine else None)
        if self.session is not None:
            self.session.members.add(self)
            if group is not None and timeout is None:
                self.timeout = self.session.timeout
            self.watchdog, self.rank, size = self.session.watchdog, self.session.rank, self.session.size
            device = self.session.device
        elif device.type == "cuda":
            if not torch.cuda.is_available():
                hint = "machine='gloo' and machine='local' need none"
                raise error(
                    "machine='cuda', and there is no CUDA GPU here", expected="a GPU that torch sees", hint=hint
                )
            device = torch.device("cuda", torch.cuda.current_device())
        if size < self.program.ranks:
            hint = (
                f"torchrun --nproc-per-node {self.program.ranks} starts as many; without torchrun, ranks are simulated"
            )
            raise error(
                f"rank {self.rank}: @{self.program.name} runs on {self.program.ranks} ranks, and there are {size}",
                hint=hint if group is None else "the ranks of a program are those of its group",
            )
        table = kernel_table(self.kernels, device.type)
        groups = self.session.groups if self.session else Groups(0, device)
        # The agreement must not refer to the executor. Then the last reference to an executor destroys it, and not the
        # garbage collector, which could destroy its CUDA graphs during a capture.
        compare = self.compare_calls or device.type == "cpu"
        self._agreement = Agreement(self.session, self.program, self.kernels, compare)
        if device.type == "cuda":
            return outside_pools(device, lambda: CudaMachine(device, self.program, table, groups))
        return GlooMachine(self.program.streams, table, groups)

    @property
    def may_differ_in_captures(self) -> bool:
        """True if captures by the caller may run another program: on CUDA, if the ranks do not compare all calls.

        A program that writes its inputs is not replaced either.
        """
        return self.machine == "cuda" and not self._compare and not self._written

    def _make_graphs(self) -> Graphs:
        name = self.program.name
        if self.session is None:
            return Graphs(self._machine.device, name, self.bound)
        return Graphs(self._machine.device, name, self.bound, partial(self.session.first, f"no graphs of @{name}"))

    @untraced
    def __call__(self, *inputs: Any, out: Any = None) -> tuple[Any, ...]:
        # The path of a warm call on CUDA is __call__, _call, BoundCall.fits, _issue. `_issue` reads the words to which
        # kernels report timeouts, orders the call after the previous call, and calls Graphs.replay or CudaPlan.run.
        # A function call takes 0.1 us: tests count how many a warm call makes. These lines begin a call as `turn` does.
        calls, thread = self.calls, CURRENT.it
        entered = calls.entered
        if (other := calls.inside) is not None:
            calls.refuse_overlap(self.program.name, other)
        with calls.lock:
            if thread is not calls.latest or entered != calls.entered:
                calls.hand_over(thread, entered, self.program.name)
            calls.inside, calls.visible, calls.entered = thread, False, calls.entered + 1
            try:
                return self._call(inputs, out)
            except HostIRError:
                raise
            except BaseException as problem:
                self._interrupted(problem)
                raise
            finally:
                calls.inside = None

    @untraced
    def start(self, *inputs: Any, out: Any = None) -> Started:
        if self._side is None:
            return Started(self(*inputs, out=out))
        self._refuse_elsewhere()
        return self._side.start(self, inputs, out)

    def _call(self, inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """Run the program once on this rank's machine, and return the outputs.

        The caller of this method holds `calls.lock`.
        """
        if self.watchdog is not None and self.watchdog.disturbed:
            self._resume()
        outs = None if out is None else tuple(out) if isinstance(out, list | tuple) else (out,)
        call = self.latest
        if call is not None and not call.fits(inputs, outs):
            call = self._recalled(inputs, outs)
        if call is None:
            call = self._bind(inputs, outs, out)
        elif self._compare:
            self._agreement.begin(call.plan.unrolled.sizes, planned=True)
        try:  # no input requires gradients here if they are enabled, so torch records nothing
            outputs = self._issue(call, inputs, outs)
        except HostIRError as failure:
            raise self._blamed(failure) from failure.__cause__
        except BaseException:
            self.calls.visible = self.calls.visible or bool(self._machine.groups.abandoned)
            raise
        self._agreement.made += 1
        if not self._compare:
            self.calls.went(call.checksum)
        return outputs

    def _issue(self, call: BoundCall, inputs: tuple[Part, ...], outs: tuple[Part, ...] | None) -> tuple[Part, ...]:
        """Run a call on a CPU, or issue it on CUDA; return the outputs.

        On CUDA the call is issued either as one CUDA graph or statement by statement. While the caller captures a
        graph, it is always issued statement by statement. Then the call may run another program, which replays faster.
        """
        plan, watchdog = call.plan, self.watchdog
        if type(plan) is not CudaPlan:
            if watchdog is not None:
                watchdog.observe(plan)
            return plan.run(inputs, outs)
        for words, zeros in plan.reports:
            if words != zeros and (problem := plan.problem()) is not None:
                raise self._noted(problem)
        graphs, capturing = self._graphs, torch._C._cuda_isCurrentStreamCapturing()
        if capturing and plan.for_captures is not None:
            if isinstance(plan.for_captures, HostIRError):  # a stored exception would keep the frames that it passes
                raise HostIRError(*plan.for_captures.diagnostics)
            plan = plan.for_captures
        if LATE and not capturing:
            release()
        stream = current(self._machine.device)
        if watchdog is not None and (plan is not watchdog.plan or watchdog.replaced):
            watchdog.observe(plan, capturing)
        if capturing:
            hold(plan, stream)
            graphs = None
            if call.plan.memory is not None:  # even if another plan is issued: inputs may lie in this memory
                call.plan.memory.captured.add(call.plan)
                hold(call.plan, stream)
            if self._communicates:
                communication_order(self._machine.device).follow_in_capture()
        elif self._order is not None and self._order.stream is not stream:
            self._order.follow(stream)
        if call.graph is not None and graphs is not None and outs is not None and graphs.replay(call):
            return outs
        if graphs is not None and outs is not None and graphs.capture_when_due(call, inputs, outs):
            return outs
        outputs = plan.run(inputs, outs, capturing, stream)
        if plan.timeline is not None:
            plan.timeline.collect()
        return outputs

    @untraced
    def places(self, *inputs: Any) -> tuple[Part, ...]:
        with self.calls.turn(self.program.name):
            if self.watchdog is not None and self.watchdog.disturbed:
                self._resume()
            try:
                plan = self._choose(cache_key(inputs), inputs, places=True)
                self._apply_decision(plan, inputs)
            except HostIRError:
                raise
            except BaseException as problem:
                self._interrupted(problem)
                raise
            if plan.memory is not None:
                plan.memory.used = time.monotonic()  # the caller will use it: do not release it next to make room
            # A new plan has issued copies to the current stream. The caller may make its call on another stream.
            if self.machine == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self._machine.device).synchronize()
        homes = places(plan.unrolled, plan.memory, plan.registers)
        for home in homes:
            if home is not None and plan.memory is not None:
                plan.memory.give(home)
        return homes

    def recover(self) -> None:
        """Do what the first call after a failure does before it runs: raise the failure, or renew the shared state.

        Also raise HostIRError in a forked child process, and after the end of the session.
        """
        self._refuse_elsewhere()
        with self.calls.turn(self.program.name):
            if self.watchdog is not None and self.watchdog.disturbed:
                self._resume()

    def abandon(self, problem: BaseException) -> None:
        """Report to the other ranks that an exception has ended work between calls that all ranks do together."""
        if isinstance(problem, MisalignedError) or self._machine.groups.abandoned:
            return  # all ranks know it
        self.calls.visible = True
        self._interrupted(problem)

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which this rank's GPU is the current device. On a CPU it does nothing."""
        return torch.cuda.device(self._machine.device) if self.machine == "cuda" else contextlib.nullcontext()

    def prepare(self, inputs: Sequence[Any], out: Any) -> None:
        """Make the plan for calls with these tensors, and run nothing. All ranks call this.

        Raises HostIRError if this rank or another rank cannot make the plan. The watchdog does not end the job then.
        """
        watchdog, self.watchdog = self.watchdog, None
        try:
            with self.calls.turn(self.program.name):
                self._choose(cache_key(inputs), inputs, out, places=True)
        finally:
            self.watchdog = watchdog

    def rest(self, concerns: Callable[[Mapping[str, int]], bool] = lambda sizes: True) -> None:
        """Drop the plans for sizes for which `concerns` returns True, and their memory, unless the caller uses them.

        CUDA graphs of the caller may use them.
        """
        release()
        gone = [plan for plan in self.plans.values() if concerns(plan.unrolled.sizes)]
        if not gone:
            return
        for plan in gone:
            if self.watchdog is not None and self.watchdog.plan is plan:
                self.watchdog.unwatch()
            if isinstance(plan, GlooPlan):
                plan.end()
        self._drop(lambda each: each in gone)
        if isinstance(self._machine, GlooMachine) and not self.plans:
            self._machine.end()

    def has_plan(self, inputs: Sequence[Any]) -> bool:
        """Return True if there is a plan for calls with these inputs, or if plans for such inputs are not kept."""
        key = cache_key(inputs)
        return key is None or key in self.plans

    def record(self, inputs: Sequence[Any], outs: Sequence[Any]) -> torch.cuda.CUDAGraph:
        """Capture the latest call anew in a CUDA graph that the executor does not keep, and return the graph.

        All ranks call this on CUDA after the same call, and they replay the graphs together. The graph must be
        destroyed before `rest`, and before the tensors are freed. The graphs of a thread share cuBLAS workspaces, so
        only one of them may run at a time. Raises HostIRError or RuntimeError if the call cannot be captured.

        Args:
            inputs: the inputs of the call.
            outs: the tensors for the outputs.
        """
        assert self.latest is not None
        plan = self.latest.plan
        assert isinstance(plan, CudaPlan)
        if not any(op.in_graph for op in plan.unrolled.ops):
            raise error(f"nothing of @{self.program.name} runs with these sizes")
        with captured_for_a_trial():
            return Graphs(self._machine.device, self.program.name, {}).record(plan, inputs, outs)

    def unbind(self, inputs: Sequence[Any]) -> None:
        """Forget the tensors of earlier calls with such inputs, and drop these calls' CUDA graphs. Keep the plan."""
        key = cache_key(inputs)
        plan = self.plans.get(key) if key is not None else None
        self.latest = None
        for name in [name for name, call in self.bound.items() if call.plan is plan]:
            del self.bound[name]

    def issue_plainly(self, reason: str) -> None:
        """Capture no graph of calls with tensors like those of the latest call, until `decided` decides otherwise."""
        if self.latest is not None and isinstance(self.latest.plan, CudaPlan):
            self.latest.plan.plain = reason

    @property
    def tape(self) -> str:
        plan = self.latest.plan if self.latest is not None else None
        tapes = plan.tapes if isinstance(plan, CudaPlan) else None
        return tapes.latest.text if tapes is not None and tapes.latest is not None else ""

    @property
    def graph_refusal(self) -> str | None:
        if self._graphs is not None:
            plan = self.latest.plan if self.latest is not None else None
            return self._graphs.refusal or (isinstance(plan, CudaPlan) and plan.eager_only) or None
        if self.machine != "cuda":
            return f"machine '{self.machine}' has no CUDA graphs"
        if self.trace is not None:
            return "its statements are traced"
        return "HOSTIR_PROFILE=1" if PROFILE.get() else "graphs=False"

    @untraced
    def synchronize(self) -> None:
        if self.machine != "cuda":
            return
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(self._machine.device))
        started = self._side.last if self._side is not None else None
        deadline = time.monotonic() + self.timeout
        while not (reached.query() and (started is None or started.query())):
            self._raise_problem()  # a kernel may have timed out, and work after it may wait for ever
            dog = self.watchdog
            if dog is not None and (
                dog.died is not None or dog.misaligned
            ):  # work that needs nothing more from a rank ends soon
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
            if time.monotonic() > deadline:
                if dog is not None and dog.misaligned:
                    raise MisalignedError(dog.misaligned, f"on rank {self.rank}, the device is in @{self.program.name}")
                raise self._blamed(self._noted(self._stuck()))
            time.sleep(1e-4)
        self._raise_problem()

    def _raise_problem(self) -> None:
        """Raise HostIRError if a kernel has reported a problem, or if a call was abandoned.

        After an abandoned call the device may wait for a peer for ever.
        """
        if self.session is not None and self.session.has_lost_call:
            raise self.session.lost_call()
        if abandoned := self._machine.groups.abandoned:
            what = f"@{self.program.name} cannot be waited for: {abandoned}"
            raise error(what, hint="make the next call on all ranks: it begins anew")
        plan = self.latest.plan if self.latest is not None else None
        if isinstance(plan, CudaPlan) and (problem := plan.problem()) is not None:
            raise self._blamed(self._noted(problem))

    def _noted(self, late: HostIRError) -> HostIRError:
        """Return the error `late` of a wait that took too long, with notes on other possible causes."""
        first, *others = late.diagnostics
        notes = self.session.crossing() if self.session is not None else ()
        return HostIRError(replace(first, notes=(*first.notes, *notes)), *others)

    def _blamed(self, failure: HostIRError) -> HostIRError:
        """Report a failure of a call to the other ranks, and return the error to raise.

        Without a watchdog, nothing is reported. If the call was abandoned, the memory is then renewed at once.
        """
        groups = self._machine.groups
        if self.watchdog is not None:
            return self.watchdog.blame(failure, bool(groups.abandoned))
        if groups.abandoned:
            groups.renew(self.timeout)
            self._renew()
        return failure

    def _interrupted(self, problem: BaseException) -> None:
        """Report to the other ranks that an exception other than HostIRError has ended the call on this rank.

        If no other rank can know of the call, nothing is reported.
        """
        calls, groups = self.calls, self._machine.groups
        if calls.broken or not calls.visible:
            return
        what = f"rank {self.rank} was interrupted in @{self.program.name} by {headline(problem)}"
        if groups.broken:  # threads of the call may still run
            calls.end(what)
            return
        groups.abandoned = groups.abandoned or what
        self._blamed(error(what))

    def _resume(self) -> None:
        """Recover before a call: raise the error that a rank or an earlier call has left, or renew the shared state.

        The watchdog has set its field `disturbed`, so that the call runs this method. If the method raises, it sets the
        field again.
        """
        assert self.session is not None
        assert self.watchdog is not None
        self.calls.broken = self.calls.broken or self.watchdog.misaligned
        self.calls.check_order()
        self.watchdog.resume()
        try:
            self._begin_anew(self.session)
        except BaseException:
            self.watchdog.disturbed = True  # the next call calls this method again
            raise

    def _begin_anew(self, session: Session) -> None:
        """Raise HostIRError for a call that a rank has abandoned.

        Once all ranks have raised it, renew the shared state instead.
        """
        if session.has_lost_call:
            raise session.lost_call()
        if not (abandoned := self._machine.groups.abandoned):
            return
        if self.machine == "cuda" and torch.cuda.is_current_stream_capturing():
            what = f"@{self.program.name} is captured after a call that ended midway: {abandoned}"
            raise error(what, hint="make a call outside the capture first, on all ranks")
        try:
            session.renew()
        except HostIRError as refused:
            raise self._blamed(refused) from refused.__cause__

    def _stuck(self) -> HostIRError:
        """Return the error for a device that has not finished within the timeout.

        It names the unfinished communications.
        """
        plan = next(reversed(self.plans.values()), None)
        late = f"the device has not finished @{self.program.name} after {self.timeout:g} s"
        hint = "HOSTIR_TIMEOUT sets how many seconds it may take"
        busy = []
        if isinstance(plan, CudaPlan):
            busy = [(op.place.statement.span, f"{plan.unrolled.describe(op)}: {what}") for op, what in plan.busy()]
        if not busy:
            return error(f"rank {self.rank}: {late}", hint=hint)
        (span, first), *others = busy
        return error(f"rank {self.rank}, {first}; {late}", span, hint=hint, notes=tuple(others))

    def _recalled(self, inputs: tuple[Any, ...], outs: tuple[Any, ...] | None) -> BoundCall | None:
        """Return one of the latest bound calls that fits these tensors, or None."""
        for name, call in [*islice(reversed(self.bound.items()), RECENT)]:
            if call is not self.latest and call.fits(inputs, outs):
                return self._use(name, call)
        return None

    def _bind(self, inputs: tuple[Any, ...], outs: tuple[Any, ...] | None, out: Any) -> BoundCall:
        """Begin a call with these tensors on this rank, and return its bound call.

        If there is no bound call yet, make it. `outs` is the argument `out` of the call as a tuple.
        """
        written = () if outs is None else outs
        tensors_key, outs_key = cache_key(inputs), cache_key(written)
        where = addresses((*inputs, *written)) if outs is not None or self._written else None
        unsupported = tensors_key is None or outs_key is None
        gradients = tuple([isinstance(x, torch.Tensor) and x.requires_grad for x in inputs])
        name = None if unsupported else (tensors_key, gradients, outs is None, outs_key, *(where or ()))
        call = None if name is None or unwritable(written) else self.bound.get(name)
        if call is None:
            plan = self._choose(tensors_key, inputs, out)
            self._apply_decision(plan, inputs)
            call = BoundCall(plan, inputs, outs, where, self._agreement.call.digest)
        else:
            self._refuse_elsewhere()
            if not call.fits(inputs, outs):  # it was bound in other modes, as when torch.compile made its first call
                call.guard(inputs, outs)
            self._agreement.begin(call.plan.unrolled.sizes, planned=True)
        if outs is not None and self._graphs is not None and self._order is None:
            self._order = CallOrder(self._machine.device)  # graphs share their workspaces
        return self._use(name, call)

    def _apply_decision(self, plan: Plan, inputs: Sequence[Part]) -> None:
        """Settle whether calls of a plan are replayed, and make the plan that captures by the caller issue.

        A rank does this once for each plan, and for the first plan with some sizes in the same call as the other ranks.
        """
        if self.decided is None or type(plan) is not CudaPlan or plan.settled:
            return
        if (decision := self.decided(plan.unrolled.sizes)) is None:
            return
        before, (other, plan.plain) = plan.plain, decision
        if plan.plain and plan.plain != before and self._graphs is not None:
            LOG.info(NO_GRAPH, self.program.name, plan.plain)
        if other is self or not isinstance(other, RankExecutor):
            plan.settled = True
        else:
            self._plan_for_captures(plan, other, inputs)

    def _plan_for_captures(self, plan: CudaPlan, other: RankExecutor, inputs: Sequence[Part]) -> None:
        """Make the plan that captures issue instead of `plan`, because they run the program of another executor.

        Nothing can be compiled or loaded in a capture, and ranks cannot connect. In their first such call, the ranks
        meet and connect for the other program, as before the first call of any executor. After that no rank waits for
        another one. If a rank refuses the program, no rank meets again for calls with these sizes. If this rank cannot
        make the plan, the next call with other tensors tries again. In both cases only captures raise the reason. They
        must not issue `plan`, because the other ranks may not wait for its program.
        """
        if plan.for_captures is None:
            self._refuse_in_capture()
        elif torch.cuda.is_current_stream_capturing():
            return  # the capture raises why there is no plan
        key = tuple(sorted(plan.unrolled.sizes.items()))
        try:
            if (known := self._uncaptured.get(key)) is not None:
                raise RefusedError(*known.diagnostics)
            unrolled = other._agreed_for_captures(inputs)
        except RefusedError as refusal:
            self._uncaptured.setdefault(key, refusal)
            plan.for_captures, plan.settled = self._no_capture(refusal), True
            return
        try:
            torch.cuda.current_blas_handle()  # cuBLAS allocates memory when a thread uses it first
            made = other._plan(unrolled, None, inputs)
            assert isinstance(made, CudaPlan)
            plan.for_captures, plan.settled = made, True
        except (AlikeError, MisalignedError):
            raise
        except Exception as problem:  # any failure, for example of a compiler
            plan.for_captures = self._no_capture(problem)

    def _agreed_for_captures(self, inputs: Sequence[Part]) -> UnrolledProgram:
        """Agree with all ranks that captures run this program, and return it unrolled.

        Raise RefusedError if a rank refuses these inputs.
        """
        try:
            sizes, proof, unrolled = self._unrolled(inputs)
        except HostIRError as refusal:
            self._agreement.refuse(refusal)
            raise RefusedError(*refusal.diagnostics) from None
        if (kind := _kind(sizes, proof)) not in self._agreement.agreed:
            self._agreement.reach(sizes, kind)
        return unrolled

    def _no_capture(self, problem: Exception) -> HostIRError:
        """Return the error of captures for which this rank could not make a plan."""
        what = f"@{self.program.name} cannot be captured in a CUDA graph: {headline(problem)}"
        return error(what, hint="with HOSTIR_TUNE=0 on rank 0, captures run the same program as plain calls")

    def _use(self, name: tuple[Any, ...] | None, call: BoundCall) -> BoundCall:
        """Make `call` the latest bound call, and return it. If `name` is None, the call and its plan are not kept."""
        if name is not None:
            self.bound[name] = call
            self.bound.move_to_end(name)
            self.plans.pop(name[0], None)
            self.plans[name[0]] = call.plan
        if len(self.bound) > MAX_BOUND:
            self.bound.popitem(last=False)
        if call.plan.memory is not None:
            call.plan.memory.used = time.monotonic()
        self.latest = call
        return call

    def _choose(
        self, tensors_key: TensorsKey | None, inputs: Sequence[Part], out: Any = None, places: bool = False
    ) -> Plan:
        """Begin a call with these inputs on this rank, and return its plan. If there is no plan yet, make it.

        Args:
            tensors_key: the key of the inputs. If it is None, because no key exists, the plan is not kept.
            inputs: the inputs.
            out: the argument `out` of the call.
            places: True if this is a call of the method `places`.
        """
        self._refuse_elsewhere()
        plan = self.plans.get(tensors_key) if tensors_key is not None else None
        if plan is None:
            self._refuse_in_capture()
            release()
            began, symmetric = time.perf_counter(), self._machine.symmetric
            released = symmetric.released
            try:
                plan = self._make(inputs, out, places)
            finally:
                if symmetric.released != released:
                    for member in [self] if self.session is None else list(self.session.members):
                        member._drop_stale()
            self._log(plan, time.perf_counter() - began)
        else:
            try:
                self._check(plan.unrolled, inputs, out)
            except HostIRError as refusal:
                if self._compare:
                    self._agreement.refuse(refusal)
                raise
            self._agreement.begin(plan.unrolled.sizes, planned=True, places=places)
        if tensors_key is not None:
            self.plans.pop(tensors_key, None)
            self.plans[tensors_key] = plan
        if len(self.plans) > MAX_PLANS:
            oldest = next(iter(self.plans.values()))
            self._drop(lambda plan: plan is oldest)
        return plan

    def _drop(self, gone: Callable[[Plan], bool]) -> None:
        """Drop the plans for which `gone` returns True, and the calls that are bound to them."""
        if self.latest is not None and gone(self.latest.plan):
            self.latest = None
        for key in [key for key, plan in self.plans.items() if gone(plan)]:
            del self.plans[key]
        for name in [name for name, call in self.bound.items() if gone(call.plan)]:
            del self.bound[name]

    def _drop_stale(self) -> None:
        """Drop the plans whose symmetric memory was released. A rendezvous of any executor may release it."""
        self._drop(is_stale)

    def _renew(self) -> None:
        """Drop all plans, and forget which calls the ranks have agreed on. After a failure the ranks begin anew."""
        self._end_plans()
        self._uncaptured.clear()
        self._agreement.restart()

    def _leave(self, reason: str) -> None:
        """Refuse all later calls for the reason `reason`, and drop the plans, because plans hold process groups."""
        self._ended = reason
        if self._graphs is not None:
            self._graphs.release(reason)
        self._end_plans()

    def _end_plans(self) -> None:
        """Drop all plans. On a CPU, also end the threads that run them."""
        for plan in self.plans.values():
            if isinstance(plan, GlooPlan):
                plan.end()
        self._drop(lambda plan: True)
        if isinstance(self._machine, GlooMachine):
            self._machine.end()

    def _refuse_elsewhere(self) -> None:
        """Raise HostIRError in a child process that was forked from this rank.

        Also raise it after the end of the session.
        """
        if self._process != os.getpid():
            raise forked_from(self.rank)
        if self._ended:
            raise error(
                f"@{self.program.name} is called after the end of its session",
                expected="calls within the session in which its executor was made",
                hint="make another executor: it joins the open session, or opens a new one",
            )

    def _refuse_in_capture(self) -> None:
        """Raise HostIRError during a CUDA graph capture, because no plan can be made then."""
        if self.machine == "cuda" and torch.cuda.is_current_stream_capturing():
            raise error(
                f"@{self.program.name} runs with these shapes for the first time inside a CUDA graph capture",
                hint="call it once with tensors of the same shapes before the capture",
            )

    def _check(self, unrolled: UnrolledProgram, inputs: Sequence[Part], out: Any) -> None:
        """Raise HostIRError if inputs share memory, or if the tensors of `out` cannot hold the outputs.

        This check is made before any rank begins the call.
        """
        check_apart(self.program, self._written, inputs)
        if out is not None:
            check_out(unrolled, sequence_of(out), inputs, self._machine.device)

    def _make(self, inputs: Sequence[Part], out: Any, places: bool) -> Plan:
        """Begin the first call with inputs of these layouts, and return a new plan for calls with such inputs."""
        machine = self._machine
        try:
            sizes, proof, unrolled = self._unrolled(inputs)
            self._check(unrolled, inputs, out)
        except HostIRError as refusal:
            self._agreement.refuse(refusal)
            raise
        sizes_class = _kind(sizes, proof)
        planned = sizes_class in self._agreement.agreed
        self._agreement.begin(sizes, planned=planned, places=places)
        self._agreement.reach(sizes, sizes_class)
        if not planned:
            self._compare_hosts()
        warn_of_copies(unrolled)
        # Ranks that measure candidates have no watchdog during a first call: they report refusals to each other.
        together = self.session is not None and self.watchdog is not None and self.session.size > 1
        if waited_for := self._communicates and together:
            self.calls.visible = True  # the other ranks may now run the call, and wait for this rank
        try:
            return self._plan(unrolled, sizes_class if proof is not None and proof.resizable else None, inputs)
        except (AlikeError, MisalignedError):
            raise
        except HostIRError as failure:
            groups = machine.groups
            if not waited_for or groups.abandoned:  # no rank waits, or the other ranks already know this failure
                raise
            groups.abandoned = headline(failure)
            raise self._blamed(failure) from failure.__cause__

    def _unrolled(self, inputs: Sequence[Part]) -> tuple[dict[str, int], Proof | None, UnrolledProgram]:
        """Return the sizes of a call with these inputs, the proof of the program for them, and the unrolled program.

        Raise HostIRError if the program cannot run with these inputs.
        """
        sizes = bind_sizes(self.program, inputs, self.sizes, rank=self.rank, device=self._machine.device)
        proof = proof_of(self.program, sizes) if self.check else None
        if proof is not None:
            self._refuse_shared_queues(sizes)
        refuse_gradients(self.program, inputs)
        unrolled = unroll(self.program, self.rank, sizes, inputs)
        self._check_limit(unrolled.memory[1], sizes)
        return sizes, proof, unrolled

    def _compare_hosts(self) -> None:
        """Warn once if the program's meshes state other hosts than the job has. All ranks call this together."""
        stated, session, ranks = stated_hosts(self.program), self.session, self.program.ranks
        if not stated or session is None:
            return
        hosts = [here for host in session.hosts() if (here := tuple(rank for rank in host if rank < ranks))]
        if hosts != list(equal_hosts(ranks, stated)):
            there = "; ".join(map(ranks_text, hosts))
            message = f"The meshes of @{self.program.name} state {stated} hosts for {ranks} ranks, and the job has"
            number = f"{len(hosts)} host{'s' * (len(hosts) > 1)}: {there}."
            hint = (
                "state the hosts that the job has, by hi.DeviceMesh(..., hosts=N): the program was planned for others"
            )
            first = session.rank == 0
            warn_once((self.program.digest, "hosts"), f"{message} {number}", hint, RuntimeWarning, first)

    def _plan(self, unrolled: UnrolledProgram, sizes_class: KindOfSizes, inputs: Sequence[Part]) -> Plan:
        """Bind an unrolled program to this rank's machine; return the plan.

        Programs with sizes of the class `sizes_class` share symmetric memory. If it is None, these sizes share no
        symmetric memory with other sizes.
        """
        if self._order is not None:
            self._order.follow()  # the plan's tables may reuse memory of dropped plans, which earlier calls still read
        with torch.inference_mode(False):  # tensors that a plan holds are used by calls in any mode
            machine = self._machine
            if isinstance(machine, GlooMachine):
                return machine.plan(unrolled, self.trace, sizes_class, self.symmetric_limit)
            timeline = Timeline(unrolled, self.trace) if self.trace is not None else None
            limit = self.symmetric_limit
            return outside_pools(machine.device, lambda: machine.plan(unrolled, timeline, sizes_class, limit, inputs))

    def _log(self, plan: Plan, seconds: float) -> None:
        """Log a new plan and the number of seconds that it took to make.

        If no CUDA graph of it is captured, log the reason.
        """
        if not LOG.isEnabledFor(logging.INFO):
            return
        unrolled, name = plan.unrolled, self.program.name
        sizes = "".join(f" {size}={value}" for size, value in sorted(unrolled.sizes.items()))
        allocated, symmetric = unrolled.memory
        message = (
            "@%s: planned%s in %.1f ms; a call allocates %d bytes, and %d bytes of symmetric memory stay, of %d in all"
        )
        total = self._machine.symmetric.bytes
        LOG.info(message, name, f" for{sizes}" if sizes else "", seconds * 1e3, allocated, symmetric, total)
        if isinstance(plan, CudaPlan) and (self._graphs is None or plan.eager_only):
            LOG.info(NO_GRAPH, name, plan.eager_only or self.graph_refusal)

    def _refuse_shared_queues(self, sizes: Mapping[str, int]) -> None:
        """Raise HostIRError if the program would deadlock because it has more streams than the device has queues."""
        if self.machine == "cuda" and self.program.streams >= queues():  # the caller's stream needs one as well
            from hostir.check.proof import shared_queues

            if stuck := shared_queues(self.program, sizes):
                raise HostIRError(*stuck)


def _kind(sizes: Mapping[str, int], proof: Proof | None) -> Hashable:
    """Return a key that is the same for all sizes that need only one meeting of the ranks."""
    return tuple(sorted(sizes.items())) if proof is None else proof.sizes_key


def is_stale(plan: Plan) -> bool:
    """Return True if the symmetric memory of a plan was released to make room for other memory."""
    return plan.memory is not None and plan.memory.gone


_with_threads: weakref.WeakSet[RankExecutor] = (
    weakref.WeakSet()
)  # executors with threads, connections or a GPU, which a forked child lacks


def _forked() -> None:
    """Drop the latest bound call of each executor in a forked child process.

    So the next call runs the check that refuses calls in a forked process.
    """
    for executor in _with_threads:
        executor.latest = None
    for calls in {executor.calls for executor in _with_threads}:
        calls.unlock()


os.register_at_fork(after_in_child=_forked)
