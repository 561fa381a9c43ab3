"""Tables, curves and comparisons of runs."""
