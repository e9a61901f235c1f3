"""The main job: data, models, the training loop, its report. Knows the public API of turbogr_compile only.

`turbogr train` is the command, docs/training.md the guide. From Python:

    from turbogr_compile.training.config import Config
    from turbogr_compile.training.loop import train

    result = train(Config.read({"model": "hstu", "size": "small"}), "runs/small")
"""
