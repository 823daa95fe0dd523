"""Use hostir from torch: its operators by name, taken over or hostir's own, with process groups and gradients."""

from __future__ import annotations

from torch import Tensor  # annotations of `hostir` say torch.Tensor, and find this module under that name

from hostir.torch.installing import install, report, uninstall

__all__ = ["Tensor", "install", "report", "uninstall"]
