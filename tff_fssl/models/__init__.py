"""Networks, and the interface of local training to them."""
