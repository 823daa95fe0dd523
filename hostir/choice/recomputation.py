"""Find the forward pass that torch's activation checkpointing recomputes.

Activation checkpointing (`torch.utils.checkpoint` with `use_reentrant=False`) runs a part of the forward pass a second
time during the backward pass. torch describes this part by an object, its frame. The hooks for saved tensors refer to
the frame, during the forward pass and during the recomputation.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

from hostir.job.calls import in_backward

T = TypeVar("T")


def frame() -> Any:
    """Return the frame of the checkpointed part that runs now; None outside such parts."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    pack = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    for cell in pack.__closure__ or ():
        content = cell.cell_contents
        content = content() if isinstance(content, weakref.ref) else content
        if type(content).__name__ == "_CheckpointFrame":
            return content
    return None


def recomputes() -> bool:
    """Return True if a checkpointed part of the forward pass is recomputed now."""
    return in_backward() and frame() is not None


class Checkpointed(Generic[T]):
    """Keeps one item for each call in a checkpointed part, so that its recomputation can look the items up in order."""

    def __init__(self) -> None:
        self._forward: weakref.WeakKeyDictionary[object, list[T]] = weakref.WeakKeyDictionary()
        self._next: weakref.WeakKeyDictionary[object, dict[int, int]] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Return True if a part has run that may still be recomputed."""
        return len(self._forward) > 0

    def append(self, item: T) -> None:
        """Keep an item for the current call, in the forward pass. Outside checkpointed parts, do nothing."""
        if (part := frame()) is not None:
            self._forward.setdefault(part, []).append(item)

    def repeated(self) -> T | None:
        """Return the item of the call that the current call recomputes; None if it is not known."""
        part = frame()
        if part is None or part not in self._forward:
            return None
        counts = self._next.setdefault(part, {})  # calls so far, by backward pass: a part may be recomputed again
        backward = torch._C._current_graph_task_id()
        number = counts.get(backward, 0)
        counts[backward] = number + 1
        items = self._forward[part]
        return items[number] if number < len(items) else None
