"""Big events cost what their bytes cost (L3): four times the size is about four times the work, never sixteen."""

from __future__ import annotations

import time

from bench.wire import Wire, chunk

READ = 64 * 1024
TIMES = 3


async def time_of(wire: Wire, size: int, number: int) -> float:
    """CPU time to pass one event of this size, in reads of 64 KB, s."""
    upstream = await wire.open_stream()
    data = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"' + b"x" * size + b'"}}'
    block = b"id: %d\ndata: %b\n\n" % (number, data)
    reads = [chunk(block[at : at + READ]) for at in range(0, len(block), READ)]
    began = time.process_time()
    for read in reads:
        upstream.data_received(read)
    took = time.process_time() - began
    assert sum(map(len, wire.to_client.take())) >= len(block)
    assert wire.context.telemetry.events > 0
    await wire.answer(upstream, b"0\r\n\r\n")
    wire.to_client.take()
    return took


async def test_a_16_mb_event_costs_at_most_six_times_a_4_mb_one(wire: Wire) -> None:
    small = min([await time_of(wire, 4 << 20, number) for number in range(1, 1 + TIMES)])
    big = min([await time_of(wire, 16 << 20, number) for number in range(10, 10 + TIMES)])
    print(f"4 MB: {small * 1000:.1f} ms, 16 MB: {big * 1000:.1f} ms")
    assert big < 6 * small
