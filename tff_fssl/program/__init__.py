"""The training program's logic. `programs/` holds its wiring."""
