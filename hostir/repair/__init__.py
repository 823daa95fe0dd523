"""Repair host programs: edits that mend the findings of the checker."""
