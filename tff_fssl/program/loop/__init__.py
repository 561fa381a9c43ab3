"""The training loop and what it runs."""
