"""Losses: sums over target tokens, preference losses and reward losses."""
