"""What makes a round, whatever the algorithm."""
