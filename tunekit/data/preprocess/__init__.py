"""Rows made documents once, by several processes, and kept.

prepare     what is kept for a choice, or its preparation now
documents   tokenised rows, flat, in memory or mapped from files
pool        processes that prepare chunks, in order; worker: what each of them does
own         a person's own modules, for other processes
key         what prepared rows follow from
cache       where they are kept, safe with several processes
"""
