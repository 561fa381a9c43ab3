"""A run as its flags describe it."""
