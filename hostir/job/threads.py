"""Threads that make calls: names that are the same on all ranks, and pairs of threads of two ranks.

Python numbers all threads together, and a rank may have more threads than another (a logger, a progress bar). So a
common name consists of the thread's class and name, without digits, and its number among the threads alike, in the
order of their start.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict

MANY = " number "  # between the name and the number, from the second thread of a name on
_names: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_alike = Counter[str]()  # threads so far, by kind
_naming = threading.Lock()


def common_name(thread: threading.Thread) -> str:
    """Return the name of a thread that is the same on all ranks if they start threads of its kind in one order."""
    with _naming:
        new = {each for each in (*threading.enumerate(), thread) if each not in _names}
        for each in sorted(new, key=lambda it: it.native_id or sys.maxsize):  # numbers of the system's, that only rise
            kind = _kind(each)
            _alike[kind] += 1
            _names[each] = kind if _alike[kind] == 1 else f"{kind}{MANY}{_alike[kind]}"
        return _names[thread]


def running(name: str) -> threading.Thread | None:
    """Return the running thread of this common name."""
    return next((thread for thread in threading.enumerate() if common_name(thread) == name), None)


def is_foreign(thread: threading.Thread) -> bool:
    """Return whether a thread was not started by Python's `threading`, such as autograd's own."""
    return isinstance(thread, threading._DummyThread)


def _kind(thread: threading.Thread) -> str:
    """Return a thread's name without digits, and its class unless that is `threading.Thread`.

    By default Python puts the function that a thread runs into its name.
    """
    name, its = re.sub(r"\d+", "*", thread.name), type(thread).__name__
    return name if type(thread).__module__ == threading.__name__ else f"{its} {name}"


def _split(name: str) -> tuple[str, int]:
    """Return the kind and the number of a common name."""
    kind, _, number = name.partition(MANY)
    return kind, int(number or 1)


class ThreadPairs:
    """The pairs of a thread here and a thread of another rank that have made the same calls.

    Fields:
        callers: the common names of all threads here that have called.
    """

    def __init__(self) -> None:
        self.callers: set[str] = set()
        # By peer and name, the sorted pairs of the peer's and this rank's numbers; and pairs of different names.
        self._numbers: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        self._kinds: set[tuple[int, str, str]] = set()

    def known(self, rank: int, theirs: str, mine: str) -> bool:
        """Return whether a thread of another rank was paired with this one before."""
        (kind, number), (our_kind, ours) = _split(theirs), _split(mine)
        if kind != our_kind:
            return (rank, theirs, mine) in self._kinds
        pairs = self._numbers[rank, kind]
        place = bisect_left(pairs, (number, ours))
        return pairs[place : place + 1] == [(number, ours)]

    def add(self, rank: int, theirs: str, mine: str) -> bool:
        """Pair two threads; return False if an earlier pair says otherwise.

        Threads of one kind are paired in the order of their numbers. A name that has called here is no thread of
        another kind.
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
