"""Edits that mend what the checker reports."""
