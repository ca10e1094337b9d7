"""Reports of runs: a web page with curves, facts and samples, and the progress of a run on the terminal."""
