"""What semi-supervised learning is made of: one idea a file."""
