"""The systems that `compare.py` sets side by side, and what they have in common."""
