"""C++ kernels for CPUs: built on first use, called through a plain C interface."""
