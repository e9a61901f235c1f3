"""Helpers for authors of rules and passes, and for whoever counts what a step computes."""

from .rules import (
    Flops,
    assert_near_miss,
    assert_rewrites,
    assert_unchanged,
    filecheck,
    near_miss_text,
    plain_text,
    rule_tests,
    run_passes,
    same_graph,
    trace_graph,
)

__all__ = [
    "Flops",
    "assert_near_miss",
    "assert_rewrites",
    "assert_unchanged",
    "filecheck",
    "near_miss_text",
    "plain_text",
    "rule_tests",
    "run_passes",
    "same_graph",
    "trace_graph",
]
