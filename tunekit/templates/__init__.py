"""Jinja templates of web pages and model cards."""
