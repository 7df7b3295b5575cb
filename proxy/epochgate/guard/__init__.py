"""What decides: SSE framing, records, the verdict on a resume, refusals. No I/O, no clock, no logging."""
