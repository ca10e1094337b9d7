"""Downloads from and uploads to the Hugging Face Hub."""
