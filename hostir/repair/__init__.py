"""Repair host programs: suggest edits that remove the findings of the checker, and choose the best edits."""
