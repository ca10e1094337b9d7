"""What is minimised: sums over learnt tokens, or over answers that are compared."""
