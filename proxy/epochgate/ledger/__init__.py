"""What remembers: the protocol of a ledger, and where its records live."""
