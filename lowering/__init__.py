"""Targets: what runs the rewritten graphs. One module per target, found by name in `target.py`."""
