"""From rows in a file to micro-batches of tokens, in this order.

sources     where rows come from
rows        the choices of a recipe's `data:`: Auto, Chat, ShareGPT, Instruct, Completion, Text; Preference, Marked
transforms  what is done to a row's columns first: renamed, chosen by, or a person's own
recognise   what rows are, by their columns: one table
chat        conversations, and what of them is learnt
tokenizer   text to ids and back, special tokens, streamed decoding; pieces: words that come again are encoded once
written     from what a row is to text with learnt characters, and to tokens
signs       what a document shows that is seldom meant
fit         documents that are too long: cut, dropped or gone on with
prepared    rows made documents once, by several processes, and kept
steps       from documents to the micro-batches of a step
measure     what all documents show, in one pass
checks      what is wrong, doubtful or worth a note in it, and how to mend it
"""
