"""Private torch names that capture and tracing need."""

from __future__ import annotations

import torch
from torch._decomp import _should_decompose_because_unsafe_op  # composites whose schema hides writes or views
from torch._dispatch.python import enable_python_dispatcher  # symbolic sizes inside composite ops
from torch._dynamo.source import ConstantSource  # AOTAutograd wants a source for every lifted constant
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,  # current value of a functional tensor
    has_data_mutation,  # was it written to?
    has_metadata_mutation,  # was its shape or storage replaced?
    to_fun,  # wrap a tensor for functionalization
)
from torch._guards import TracingContext, detect_fake_mode  # Dynamo's fake mode and symbolic contexts of inputs
from torch._ops import HigherOrderOperator  # to name and refuse ops that hold subgraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # values without data
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,  # rewrites in-place ops and views; subclassed for our vocabulary
)
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode  # nodes Dynamo records
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # the tracer that is recording
    make_fx,
    maybe_enable_thunkify,  # arithmetic on sizes is recorded only where it is used; halves the time of tracing
    track_tensor_tree,  # makes a value known to the tracer
)
from torch.fx.experimental.symbolic_shapes import (
    PropagateUnbackedSymInts,  # interpreter that keeps Dynamo's names for data-dependent sizes
    ShapeEnv,
)
from torch.multiprocessing.reductions import StorageWeakRef  # identity of memory
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # DTensor and friends

get_data_attr = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # what Dynamo makes of `x.data`

__all__ = [
    "ConstantSource", "FakeTensor", "FakeTensorMode", "FunctionalTensor", "FunctionalTensorMode",
    "HigherOrderOperator", "PropagateUnbackedSymInts", "ShapeEnv", "StorageWeakRef", "TracingContext",
    "_enter_inference_mode", "_exit_inference_mode", "_should_decompose_because_unsafe_op", "detect_fake_mode",
    "enable_python_dispatcher", "from_fun", "get_data_attr", "get_proxy_mode", "has_data_mutation",
    "has_metadata_mutation", "is_traceable_wrapper_subclass", "make_fx", "maybe_enable_thunkify", "to_fun",
    "track_tensor_tree",
]  # fmt: skip
