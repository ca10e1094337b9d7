"""Training on sampled answers: prompts, samples, advantages, and the policy gradient of a step."""
