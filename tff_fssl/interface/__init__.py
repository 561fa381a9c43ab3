"""What an algorithm is: its methods, and the values that travel."""
