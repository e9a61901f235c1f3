"""What a tracer is made of: functional tensors, proxies, dispatch modes."""

from __future__ import annotations

from torch._decomp import _should_decompose_because_unsafe_op  # composites whose schema hides writes or views
from torch._dispatch.python import enable_python_dispatcher  # symbolic sizes inside composite ops
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,  # current value of a functional tensor
    has_data_mutation,  # was it written to?
    has_metadata_mutation,  # was its shape or storage replaced?
    to_fun,  # wrap a tensor for functionalization
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,  # rewrites in-place ops and views; subclassed for our vocabulary
)
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # the tracer that is recording
    make_fx,
    maybe_enable_thunkify,  # arithmetic on sizes is recorded only where it is used; halves the time of tracing
    track_tensor_tree,  # makes a value known to the tracer
)
from torch.multiprocessing.reductions import StorageWeakRef  # identity of memory
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every op that runs
    is_traceable_wrapper_subclass,  # DTensor and friends
)

__all__ = [
    "FunctionalTensor",
    "FunctionalTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "_should_decompose_because_unsafe_op",
    "enable_python_dispatcher",
    "from_fun",
    "get_proxy_mode",
    "has_data_mutation",
    "has_metadata_mutation",
    "is_traceable_wrapper_subclass",
    "make_fx",
    "maybe_enable_thunkify",
    "to_fun",
    "track_tensor_tree",
]
