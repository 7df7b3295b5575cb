"""The hot path in figures that no machine's mood changes: writes, and function calls, of each unit of work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from bench.wire import RESULT, Wire, counted_calls, event, json_answer, one_event

UNITS = 20
Gate = Callable[[str, float], None]


def json_result(number: int) -> bytes:
    return json_answer(RESULT % number)


@pytest.mark.parametrize(("answer", "name"), [(json_result, "json"), (one_event, "call")])
async def test_a_call_is_one_write_up_and_one_down(wire: Wire, answer: Callable[[int], bytes], name: str) -> None:
    for number in range(2, 2 + UNITS):
        up, down = await wire.call(number, answer(number))
        assert len(up) == 1, name
        assert len(down) == 1, name
        assert b'"id":%d,' % number in down[0]


async def test_a_call_answered_by_a_stream_leaves_its_upstream_connection_for_the_next(wire: Wire) -> None:
    for number in range(2, 2 + UNITS):
        await wire.call(number, one_event(number))
    assert len(wire.upstreams) == 1


async def test_an_event_is_one_write(wire: Wire) -> None:
    upstream = await wire.open_stream()
    for number in range(1, 1 + UNITS):
        await wire.answer(upstream, event(number, 1024, token=True))
        assert len(wire.to_client.take()) == 1


async def test_events_that_come_in_one_read_are_one_write(wire: Wire) -> None:
    upstream = await wire.open_stream()
    await wire.answer(upstream, b"".join(event(number, 1024, token=True) for number in range(1, 1 + UNITS)))
    (written,) = wire.to_client.take()
    assert written.count(b"id: ") == UNITS


@pytest.mark.parametrize(("answer", "name"), [(json_result, "json"), (one_event, "call")])
async def test_function_calls_of_a_call(wire: Wire, gate: Gate, answer: Callable[[int], bytes], name: str) -> None:
    for number in range(2, 5):
        await wire.call(number, answer(number))
    with counted_calls() as calls:
        for number in range(5, 5 + UNITS):
            await wire.call(number, answer(number))
    tell(name, calls)
    gate(f"calls per {name} POST", calls.total() / UNITS)


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("size", [100, 1024, 16384])
async def test_function_calls_of_an_event(wire: Wire, gate: Gate, size: int, *, token: bool) -> None:
    upstream = await wire.open_stream()
    for number in range(1, 10):
        await wire.answer(upstream, event(number, size, token=token))
    with counted_calls() as calls:
        for number in range(10, 10 + UNITS):
            await wire.answer(upstream, event(number, size, token=token))
    tell("event", calls)
    gate(f"calls per event of {size} B, {'token' if token else 'no token'}", calls.total() / UNITS)


@pytest.mark.parametrize("size", [100, 1024, 16384])
async def test_function_calls_of_an_event_among_others(wire: Wire, gate: Gate, size: int) -> None:
    """In one read, whose first and last events are not whole."""
    upstream = await wire.open_stream()
    stream = b"".join(event(number, size, token=True) for number in range(1, 10 + UNITS))
    await wire.answer(upstream, stream[: size + size // 2])
    with counted_calls() as calls:
        await wire.answer(upstream, stream[size + size // 2 : -size // 2])
    tell("event among others", calls)
    gate(f"calls per event of {size} B among others", calls.total() / (UNITS + 7))


def tell(what: str, calls: Counter[str]) -> None:
    """For `pytest -rP`: where the calls of one unit go."""
    print(f"{calls.total() / UNITS:.1f} calls per {what}")
    for name, count in calls.most_common(40):
        print(f"{count / UNITS:6.1f}  {name}")
