"""Builds turbogr_npu.so, which registers the AscendC ops with torch for the NPU:

    python setup.py build_ext [--build-lib DIR]

It goes into ../build/torch, where turbogr_compile.kernels.ascendc.load looks for it; in another folder, name it in
TURBOGR_NPU_LIBRARY. Needs torch_npu, which needs CANN. docs/ascend.md has the whole road.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
# Tiling functions, which say what a kernel takes; the twin has the one struct of CANN that they fill.
OWN = (HERE.parent / "common", HERE.parents[1] / "twin" / "include")
# In torch_npu: the header made for extensions, and what it includes.
HEADERS = ("third_party/op-plugin/op_plugin/include", "third_party/op-plugin", "third_party/acl/inc")

try:
    from torch_npu.utils.cpp_extension import PYTORCH_NPU_INSTALL_PATH, NpuExtension
except ImportError as error:
    sys.exit(
        f"setup.py: torch_npu cannot be imported ({error})\n"
        "  source CANN's set_env.sh, for instance: source /usr/local/Ascend/cann/set_env.sh\n"
        '  then, where it is not installed: pip install "torch_npu==2.13.*"'
    )

os.chdir(HERE)  # sources are named relative to it
include = Path(PYTORCH_NPU_INSTALL_PATH) / "include"
setup(
    name="turbogr_npu",
    ext_modules=[
        NpuExtension(
            "turbogr_npu",
            ["adapter.cpp"],
            include_dirs=[*(str(include / folder) for folder in HEADERS), *map(str, OWN)],
            extra_compile_args=["-O2", "-fvisibility=hidden", "-Wno-unused-function"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
    options={"build": {"build_lib": str(BUILD / "torch"), "build_temp": str(BUILD / "torch-objects")}},
)
