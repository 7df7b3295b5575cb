"""Shows that the proxy holds under fuzzing, odd peers, faults and load; writes docs/reliability.md."""
