"""Every private torch API turbogr uses, in one place, so that an upgrade breaks in one place.

`tests/turbogr_compile/test_torch_api.py` has one smoke test per name.
"""

# ruff: noqa: F403
from .aot import *
from .deferral import *
from .dynamo import *
from .fake import *
from .groups import *
from .ops import *
from .tracing import *
