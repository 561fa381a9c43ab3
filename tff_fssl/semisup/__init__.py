"""The building blocks of semi-supervised learning, one idea per file."""
