"""The ordinary events of a stream that was not resumed, read, checked and recorded in one go: most of what flows.

Event by event this is what `Framer.feed`, `Watch.see` and `Session.add` do, without a block in between. Whatever is not
ordinary in any way is left to them.
"""

from __future__ import annotations

from epochgate.guard.mcp import CALLS, tells_escapes
from epochgate.guard.record import Event
from epochgate.guard.sse import ORDINARY_HEAD, Framer, digest_of
from epochgate.guard.watch import Watch

_LF, _CR = b"\n\r"
_LONG = 4096  # bytes


def record_ordinary(watch: Watch, framer: Framer, data: bytes, now: float) -> list[int]:
    """Record the ordinary events that `data` begins with, at time `now` (s); where the block of each of them ends.

    A block has to begin where `data` does.
    Ordinary is a block with one line of data and, where the stream has ids, one of its own, that is here as a whole,
    repeats the session's token or has none, and answers no request.
    """
    session, stream = watch.session, watch.stream
    stops: list[int] = []
    looks = watch.looks()
    if looks is None or stream is None or stream.key not in session.streams or tells_escapes(data):
        return stops
    has_cr = b"\r" in data
    last_id, longest = framer.last_id, framer.keep_data
    view = memoryview(data)
    at, size = 0, len(data)
    while at < size and (head := ORDINARY_HEAD(data, at)) is not None:
        event_id, begin = head[1], head.end()
        eol = end = data.find(b"\n", begin)
        if not begin < eol < size - 1 or not (event_id or event_id is last_id):
            break
        at = eol + 2
        if has_cr:
            end -= data[eol - 1] == _CR
            if data.find(b"\r", begin, end) >= 0:
                break
            at += data[eol + 1] == _CR
        if at > size or data[at - 1] != _LF or not begin < end <= begin + longest:
            break
        # A copy is quicker to look at than a part, unless it is long.
        text, base = (data[begin:end], 0) if end - begin < _LONG else (data, begin)
        if not text.startswith(CALLS, base) and (b'"result"' in text or b'"error"' in text):
            break
        for name, usual in looks:
            found = text.rfind(name, base, end)  # the quickest way over the whole of a long one
            if found >= 0 and not (text.startswith(usual, found) and text.rfind(name, base, found) < 0):
                break
        else:
            last_id = event_id
            session.add(stream, Event(event_id, digest_of(view[begin:end]), now), learn=event_id is not None)
            stops.append(at)
            continue
        break
    framer.last_id = last_id
    return stops
