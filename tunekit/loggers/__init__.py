"""Services that draw curves. Each module is imported only when it is chosen."""
