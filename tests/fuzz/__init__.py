"""A differential fuzzer: random programs, run by plain PyTorch and by the engine. `python -m tests.fuzz --help`."""
