"""From rows in a file to micro-batches of tokens.

source      where rows come from: files, a bundled set, a URL or a Hub name, and which part of it (`train[:90%]`)
find        which files of a folder hold a split, on this machine or behind a URL
table       a row and where it came from; pieces of rows that travel to other processes and can be gone on from
storage     the bytes of a file, wherever it lies and however it is packed; text: lines of it
jsonfile    JSON and JSON lines; csvfile, parquet, arrow: other kinds; remote, hub: other places (the last four are
            loaded only when used: their libraries are slow)
transforms  what is done to a row's columns first: renamed, chosen by, or a person's own
recognise   what rows are, by their columns: one table
messages    checks a row's conversation before a template sees it, and writes it as templates expect
dialects    ShareGPT, Alpaca, prompts with completions and pairs as such conversations; plain: values of JSON
tokenizer   text to ids and back, the checkpoint's special tokens, streamed decoding
template    the checkpoint's Jinja chat template, with `{% generation %}`; sandbox: where it runs, and has an end
pieces      words that come again are encoded once, where that cannot change a token
turns       where a turn stands in what a template writes, found with texts hidden
layout      what was found of one conversation, for others of its shape
spans       which characters of a rendered conversation are learnt, and which tokens those are
said        how a template wants messages, found by trying, and what of them it leaves out
signs       what a document shows that is seldom meant
written     from what a row is to text with learnt characters, and to tokens
fit         documents that are too long: cut, dropped or gone on with
documents   tokenised rows, held flat
prepare     from rows to documents: those that are kept, else anew; pool, worker: the processes that do it
cache       where prepared rows are kept; key: all that they follow from; own: a person's modules among that
rows        the choices of a recipe's `data:`: Auto, Chat, ShareGPT, Instruct, Completion, Text; Preference, Marked
mix         the choice of several sources in one (Mix), and which rows of each an epoch holds
packing     which documents share a packed row
order       which documents make up the rows of an epoch, from (seed, epoch) alone
batch       tokens, targets, positions and bounds of one micro-batch; how a step lies on ranks
report      what an epoch holds, for the log
ahead       the next step is made while this one trains
served      what recipes step through (Loader)
mapped      steps of rows that are prepared: a pure function of (seed, step, rank)
stream      blocks of rows that are read while they are trained on
streamed    steps of such blocks, and the small state from which they go on
loader      what a recipe calls: from `data:` to a Loader
checks      faults that tokenised rows show; measure: what checks want to know of every document, by numpy
"""
