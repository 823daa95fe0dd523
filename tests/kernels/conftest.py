"""Tests in Triton's interpreter run in a separate process: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
