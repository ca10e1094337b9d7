"""How good a model is: what it answers, how likely it finds the answers of others, and whether two models differ."""
