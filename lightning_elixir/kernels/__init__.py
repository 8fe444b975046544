"""Adam's written sequence (`sequence`), and compiled code that gives the same bits faster: C++ on the host (`cpu`),
Triton on the device (`gpu`, imported only where there is one)."""
