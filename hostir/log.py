"""Records of what is decided, made and let go, in standard `logging` below the logger `hostir`.

They are silent until a program asks for them: `logging.getLogger("hostir").setLevel(logging.INFO)`, with a handler.
No call of an executor that runs a plan or replays a graph which is there already makes any.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from hostir.knobs import rank

logging.getLogger("hostir").addHandler(logging.NullHandler())


class Logger(logging.LoggerAdapter[logging.Logger]):
    """The logger of a module; its records begin with the rank in a job of several."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        number = rank()
        return (msg if number is None else f"rank {number}: {msg}"), kwargs


def logger(module: str) -> Logger:
    """The logger of a module, given its `__name__`."""
    return Logger(logging.getLogger(module), {})
