"""One file per family: a table of names and a function from config.json to a DecoderSpec. `registry` lists them."""
