"""Teachers and on-policy sampling."""
