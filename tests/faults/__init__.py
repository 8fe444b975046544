"""Faults of one place each, planted to see that the tests find them: `python -m tests.faults`."""
