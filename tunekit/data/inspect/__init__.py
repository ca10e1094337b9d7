"""Text and HTML reports of the data of a config, for `tune data`."""
