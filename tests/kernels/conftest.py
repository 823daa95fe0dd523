"""Triton decides when it is imported whether it interprets, so those tests run in a process of their own."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
