"""From documents to the micro-batches of a step: a pure function of (seed, step, rank).

loader      opens what a recipe's `data:` says: served is what both kinds share
mapped      prepared rows; streamed: rows that are prepared while they are trained on, in blocks (stream)
mix         the choice of several sources in one, and which rows of each an epoch holds
compared    what recipes that compare answers read; scored: what those for models that score do
order       which documents make up the rows of an epoch
packing     which documents share a packed row
batch       tokens, targets, positions and bounds of one micro-batch; how a step lies on ranks
ahead       the next step is made while this one trains
report      what an epoch holds, for the log
"""
