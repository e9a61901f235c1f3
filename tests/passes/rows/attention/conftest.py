"""Idioms of tests/packing are recognised here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
