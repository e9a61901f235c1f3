"""The main job: data, models, the training loop, its report. Knows the public API of turbogr_compile only."""
