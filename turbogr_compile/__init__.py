"""turbogr: a compiler for generative recommenders.

    step = torch.compile(model, backend="turbogr")
"""
