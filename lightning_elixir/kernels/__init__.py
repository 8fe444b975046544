"""Adam's written sequence (`sequence`), and compiled code that gives the same bits faster: C++ on the host (`cpu`),
Triton on the device (`gpu`, imported only where there is one).

Where a kernel cannot be had there is one line in the log, and the sequence in torch's operations takes over, not
torch's fused AdamW: with its casts that has about the sequence's rate on an H200's host (1.9 against 1.8 to 2.7
Gparam/s) and other bits, so that a run would depend on whether a compiler was installed. An update may go to other
memory (`FlatUpdate.outputs`): the C++ then writes past the cache, which else would read first all that is written (1.44
instead of 0.84 Gparam/s on two cores; in place 1.88). bf16 is converted by its bits, because Triton's interpreter, with
which the kernels are tested without a GPU, truncates and mishandles denormals.
"""
