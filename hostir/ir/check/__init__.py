"""Checks of whole programs."""

from hostir.ir.check.structure import check, verify

__all__ = ["check", "verify"]
