"""What is shown of rows before they are trained on, by `tune data`.

pieces    tokens as text that can be read: special ones, white space, what has no sign of its own
sample    single rows as they will be learnt, and what is cut of them
figures   numbers of a whole data set: lengths, what is lost, packing
terminal  all of it as coloured or plain text
page      all of it as one HTML file
"""
