"""`workers` above 1: processes that serve on one address, and the one that supervises them and tells of them."""
