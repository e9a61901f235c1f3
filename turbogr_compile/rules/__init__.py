"""Declarative rewrites: patterns, matching, reasons for near misses, replacement."""
