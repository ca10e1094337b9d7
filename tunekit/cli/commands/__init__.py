"""One module per subcommand of `tune`: its `main(args)` runs what `tunekit.cli.main` has parsed."""
