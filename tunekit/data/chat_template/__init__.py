"""Chat templates: conversations rendered with a loss mask."""
