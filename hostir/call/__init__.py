"""Executors and their calls: checks of the caller's tensors, parts of sharded tensors, bound and started calls."""

from hostir.call.executor import Executor
from hostir.call.local import LocalExecutor
from hostir.call.rank import RankExecutor

Executor.on_simulated_ranks = LocalExecutor
Executor.on_this_rank = RankExecutor
