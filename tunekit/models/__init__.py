"""The decoder that every family shares, as data (`spec`), as modules (`decoder`), and its names on disk (`weights`, `families`)."""
