"""T8: what is decoded from a copy is what a client would decode, or it counts as unreadable."""

from __future__ import annotations

import functools
import gzip
import zlib

import pytest

from epochgate.relay.coding import MOST_AT_FIRST, MOST_AT_ONCE, MOST_MEMBERS, MOST_PER_BYTE, decoded, decoder_of

compress = functools.partial(gzip.compress, mtime=0)  # the same bytes in every process
PLAIN = b"id: 1\ndata: one\n\nid: 2\ndata: two\n\n" * 50


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


CODED = {
    b"gzip": compress(PLAIN),
    b"X-GZIP": compress(PLAIN),
    b" deflate ": zlib.compress(PLAIN),
}


@pytest.mark.parametrize("coding", [None, b"", b"identity", b" Identity\t"])
def test_t8_plain_bytes_need_no_decoder(coding):
    assert decoder_of(coding) is None
    assert decoded(PLAIN, coding) == PLAIN


@pytest.mark.parametrize("coding", CODED)
def test_t8_known_codings_cut_anywhere(coding):
    data = CODED[coding]
    for cut in range(len(data)):
        decoder = decoder_of(coding)
        assert (decoder.decode(data[:cut]) or b"") + (decoder.decode(data[cut:]) or b"") == PLAIN
    assert decoded(data, coding) == PLAIN


def test_t8_deflate_without_its_frame():
    assert decoded(raw_deflate(PLAIN), b"deflate") == PLAIN


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_t8_all_members_of_a_gzip_body_are_read(size):
    """A divergence cannot hide in the second one."""
    data = compress(b"first") + compress(b"second") + compress(b"third")
    decoder = decoder_of(b"gzip")
    pieces = [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]
    assert b"".join(pieces) == b"firstsecondthird"


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        (b"br", b"anything"),
        (b"gzip, gzip", compress(compress(PLAIN))),
        (b"gzip", b"not gzip at all"),
        (b"deflate", b"\xff\xff\xff"),
        (b"gzip", compress(PLAIN) + b"junk"),
        (b"deflate", zlib.compress(PLAIN) + b"junk"),
        (b"gzip", compress(bytes(MOST_AT_ONCE + 1))),
        (b"gzip", compress(bytes(MOST_AT_ONCE)) * 2),
        (b"gzip", compress(bytes(2 * MOST_AT_FIRST))),
    ],
    ids=[
        "unknown",
        "twice",
        "no gzip",
        "no deflate",
        "junk after gzip",
        "junk after deflate",
        "bomb",
        "two bombs",
        "small bomb",
    ],
)
def test_t8_unreadable_once_is_unreadable_for_ever(coding, data):
    decoder = decoder_of(coding)
    assert decoder.decode(data) is None
    assert decoder.decode(compress(PLAIN)) is None
    assert decoded(data, coding) == data


@pytest.mark.parametrize("size", [100, 1000, 65536])
def test_t8_a_bomb_in_pieces_is_one(size):
    """It is told early: after a megabyte, not after all of its thirty."""
    data = compress(bytes(30 * 1024 * 1024))
    decoder = decoder_of(b"gzip")
    plain = 0
    for at in range(0, len(data), size):
        piece = decoder.decode(data[at : at + size])
        if piece is None:
            break
        plain += len(piece)
    else:
        raise AssertionError("all of it was decoded")
    assert plain <= MOST_AT_FIRST + at * MOST_PER_BYTE


def test_t8_a_long_body_of_ordinary_text_is_no_bomb():
    """40 MB of JSON events that shrink to a thirtieth."""
    events = b"".join(b'{"n":%d,"text":"The quick brown fox jumps over the lazy dog."}' % n for n in range(40_000))
    data = compress(events * 16)
    decoder = decoder_of(b"gzip")
    assert len(events) * 16 / len(data) > 10
    pieces = [decoder.decode(data[at : at + 65536]) for at in range(0, len(data), 65536)]
    assert b"".join(pieces) == events * 16


@pytest.mark.parametrize(("members", "readable"), [(MOST_MEMBERS // 2, True), (MOST_MEMBERS + 300, False)])
def test_t8_a_flood_of_members_is_a_bomb(members, readable):
    """4 MiB of empty ones kept the event loop busy for a minute: zlib copies the rest at the end of each."""
    data = compress(b"") * members + compress(PLAIN)
    plain = decoder_of(b"gzip").decode(data)
    assert plain == (PLAIN if readable else None)
