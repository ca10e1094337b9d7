"""Model cards, plots and uploads."""
