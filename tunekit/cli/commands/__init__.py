"""One module per verb of `tune`: its `main(args)` does what `tunekit.cli.main` has parsed."""
