"""Tests find faults of the compiler itself; validation, which is on by default, would hide them behind a fallback.

Their models are tiny: packing them would not pay, and is what they are about.
"""

import os

os.environ.setdefault("TURBOGR_VERIFY", "fast")
os.environ.setdefault("TURBOGR_WORTH", "always")
os.environ.setdefault("TURBOGR_QUIET", "1")
