"""Where rows come from: files, folders, addresses, the Hub.

source      what a name stands for, and which part of it (`train[:90%]`)
table       a row, a fault, and rows in chunks that other processes read, from any place on
find        which files of a folder or an address hold a split
storage     files as they lie on a disk, packed or not, and a digest of what they hold
text        lines of files: jsonfile and csvfile read them
parquet     and arrow, hub, remote: readers whose libraries are loaded only when used
"""
