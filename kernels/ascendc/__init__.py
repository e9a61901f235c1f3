"""Kernels for Ascend NPUs in AscendC, one folder for each op; `load.load` puts them to use. Not imported by default."""
