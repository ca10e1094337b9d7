"""Which rank has what of a model.

split    layers that several ranks share, before there are numbers: tensor, context and expert parallel
shard    all weights divided by rows, gathered a layer at a time (FSDP2), as copies or both
"""
