"""Readers of JSON, CSV, Parquet, Arrow, remote files, and Hub datasets."""
