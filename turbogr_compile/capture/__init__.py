"""From Dynamo's graph to functional ATen before autograd, in one normal form."""
