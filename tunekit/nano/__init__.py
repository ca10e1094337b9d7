"""The nano: a small checkpoint, the text it learnt from, and the data set of a skill that it lacks."""
