"""The decoder that every family shares: as data (`spec`), as modules (`decoder`), as names on disk (`families`)."""
