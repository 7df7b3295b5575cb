"""Content codings, decoded from a copy so that the guard can read what it checks (T8). Nothing is re-coded."""

from __future__ import annotations

import zlib

_GZIP = zlib.MAX_WBITS | 16
# Decoded bytes; more is taken for a bomb. Text of this kind shrinks to a tenth or a twentieth, a bomb to a thousandth.
MOST_AT_ONCE = 16 * 1024 * 1024  # of one read
MOST_PER_BYTE = 100  # of all reads, for each coded byte
MOST_AT_FIRST = 1024 * 1024  # and that much on top
MOST_MEMBERS = 16 * 1024  # of a gzip body in one read: as well
_SLICE = 4096  # bytes; zlib copies the rest of what it is given at the end of each member


class Decoder:
    """Decodes one body; `windows` are the zlib window sizes to try, none for a coding that is not known here.

    A gzip body may have several members. What follows the end of any other is no part of the body for some readers, and
    so cannot be read.
    """

    __slots__ = ("_members", "_room", "_windows", "_zlib")

    def __init__(self, windows: tuple[int, ...]) -> None:
        self._room = MOST_AT_FIRST  # decoded bytes that may still come
        self._windows = windows
        self._members = 0  # that ended in the last slice
        self._zlib = zlib.decompressobj(windows[0]) if windows else None

    def decode(self, data: bytes) -> bytes | None:
        """The decoded bytes, None where they cannot be had; nothing of the body can be had after that."""
        if len(data) <= _SLICE or self._windows != (_GZIP,):
            return self._decode(data)
        pieces: list[bytes] = []
        size = members = 0
        for at in range(0, len(data), _SLICE):
            piece = self._decode(data[at : at + _SLICE])
            if piece is None:
                return None
            pieces.append(piece)
            size += len(piece)
            members += self._members
            if size > MOST_AT_ONCE or members > MOST_MEMBERS:
                self._zlib = None
                return None
        return b"".join(pieces)

    def _decode(self, data: bytes) -> bytes | None:
        plain = b""
        self._members = 0
        self._room += len(data) * MOST_PER_BYTE
        most = min(self._room, MOST_AT_ONCE)
        while self._zlib is not None and data:
            try:
                plain += self._zlib.decompress(data, most + 1)
            except zlib.error:
                self._windows = self._windows[1:]  # `deflate` comes with and without its zlib frame
                self._zlib = zlib.decompressobj(self._windows[0]) if self._windows else None
                continue
            data = self._zlib.unused_data
            self._members += self._zlib.eof
            if self._zlib.unconsumed_tail or len(plain) > most:
                self._zlib = None
            elif data:
                self._zlib = zlib.decompressobj(_GZIP) if self._windows == (_GZIP,) else None
        self._room -= len(plain)
        return None if self._zlib is None else plain


def decoder_of(content_encoding: bytes | None) -> Decoder | None:
    """The decoder for a `Content-Encoding`; None for the plain bytes."""
    coding = (content_encoding or b"").strip(b" \t").lower()
    if coding in (b"", b"identity"):
        return None
    if coding in (b"gzip", b"x-gzip"):
        return Decoder((_GZIP,))
    if coding == b"deflate":
        return Decoder((zlib.MAX_WBITS, -zlib.MAX_WBITS))
    return Decoder(())


def decoded(body: bytes, content_encoding: bytes | None) -> bytes:
    """A whole body in plain bytes; as it is where the coding is not known."""
    decoder = decoder_of(content_encoding)
    plain = body if decoder is None else decoder.decode(body)
    return body if plain is None else plain


def decoded_within(most: int, body: bytes, content_encoding: bytes | None) -> bytes | None:
    """A whole body in plain bytes; None where it cannot be read, or is longer than that in them."""
    decoder = decoder_of(content_encoding)
    if decoder is None:
        return body
    pieces: list[bytes] = []
    size = 0
    for at in range(0, len(body), _SLICE):
        piece = decoder.decode(body[at : at + _SLICE])
        if piece is None or (size := size + len(piece)) > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)
