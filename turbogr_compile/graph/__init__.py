"""Graphs: reading nodes, sizes, metadata, user lines, costs; the printed form."""
