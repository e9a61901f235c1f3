"""Benchmarks: each module but the helpers is a program that measures one thing."""
