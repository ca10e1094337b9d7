"""Traffic with the Hugging Face Hub: what is fetched from it and what is sent to it."""
