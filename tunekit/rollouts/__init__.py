"""Rollouts: conversations that the model in training samples, alone or in an environment."""
