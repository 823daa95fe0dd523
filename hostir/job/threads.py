"""Match threads of different ranks: give threads names that are the same on all ranks, and record pairs of threads.

Python numbers all threads of a process together, and one rank may have more threads than another, such as a logger or a
progress bar. So the names that Python gives to threads differ between ranks. A *common name* is made of the class and
the name of a thread, without digits. Threads with the same class and the same name without digits are numbered in the
order of their start.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict


class CurrentThread(threading.local):
    """The current thread, as the attribute `it`. Reading it takes less time than `threading.current_thread()`."""

    def __init__(self) -> None:
        self.it = threading.current_thread()


CURRENT = CurrentThread()
MANY = " number "  # stands between the name and the number, from the second thread of a name on
_names: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_alike = Counter[str]()  # the number of threads so far, by the name that `_kind` returns
_naming = threading.Lock()


def common_name(thread: threading.Thread) -> str:
    """Return the common name of a thread.

    The common name is the same on all ranks if all ranks start their threads of this class and name in the same order.
    """
    with _naming:
        new = {each for each in (*threading.enumerate(), thread) if each not in _names}
        for each in sorted(new, key=lambda it: it.native_id or sys.maxsize):  # the system's numbers rise
            kind = _kind(each)
            _alike[kind] += 1
            _names[each] = kind if _alike[kind] == 1 else f"{kind}{MANY}{_alike[kind]}"
        return _names[thread]


def running(name: str) -> threading.Thread | None:
    """Return the running thread with this common name, or None."""
    return next((thread for thread in threading.enumerate() if common_name(thread) == name), None)


def is_foreign(thread: threading.Thread) -> bool:
    """Return True if a thread was not started by Python's `threading`. Threads of autograd are such threads."""
    return isinstance(thread, threading._DummyThread)


def _kind(thread: threading.Thread) -> str:
    """Return the name of a thread without digits. The name of its class comes first, except for `threading.Thread`.

    By default the name of a thread contains the name of the function that it runs.
    """
    name, its = re.sub(r"\d+", "*", thread.name), type(thread).__name__
    return name if type(thread).__module__ == threading.__name__ else f"{its} {name}"


def _split(name: str) -> tuple[str, int]:
    """Return the two parts of a common name: the name that `_kind` returns, and the number of the thread."""
    kind, _, number = name.partition(MANY)
    return kind, int(number or 1)


class ThreadPairs:
    """Records which thread of another rank corresponds to which thread of this rank.

    Two threads are paired if they have made the same call.

    Fields:
        callers: the names of the threads on this rank that have made calls, as returned by `common_name`.
    """

    def __init__(self) -> None:
        self.callers: set[str] = set()
        # Pairs of threads that differ only in their numbers: by peer and name, the two numbers (the peer's first).
        # Then pairs of threads with different names.
        self._numbers: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        self._kinds: set[tuple[int, str, str]] = set()

    def known(self, rank: int, theirs: str, mine: str) -> bool:
        """Return True if a thread of another rank is already paired with a thread of this rank.

        Args:
            rank: the other rank.
            theirs: the common name of the other rank's thread.
            mine: the common name of the thread on this rank.
        """
        (kind, number), (our_kind, ours) = _split(theirs), _split(mine)
        if kind != our_kind:
            return (rank, theirs, mine) in self._kinds
        pairs = self._numbers[rank, kind]
        place = bisect_left(pairs, (number, ours))
        return pairs[place : place + 1] == [(number, ours)]

    def add(self, rank: int, theirs: str, mine: str) -> bool:
        """Record that two threads make the same call; return False if they cannot correspond to each other.

        The arguments are the same as in `known`. If the two common names differ only in the number, threads must be
        paired in the order of these numbers. If they differ in more than the number, the threads cannot correspond if a
        thread named `theirs` has made calls on this rank.
        """
        (kind, number), (our_kind, ours) = _split(theirs), _split(mine)
        if kind != our_kind:
            self._kinds.add((rank, theirs, mine))
            return theirs not in self.callers
        if self.known(rank, theirs, mine):
            return True
        pairs = self._numbers[rank, kind]
        place = bisect_left(pairs, (number, ours))
        before, after = pairs[place - 1 : place] if place else [], pairs[place : place + 1]
        pairs.insert(place, (number, ours))
        return all(n < number and m < ours for n, m in before) and all(n > number and m > ours for n, m in after)
