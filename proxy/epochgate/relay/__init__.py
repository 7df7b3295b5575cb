"""What moves bytes: connections to both sides, one request at a time, held streams. The only code that awaits."""
