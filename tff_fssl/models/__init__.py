"""Networks, and how local training sees them."""
