"""What processes that share a store tell each other. Nothing here is kept; what is lost is asked again or lapses."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A held stream that its owner lends to the process which got the resume (docs/adr/0009)."""

    loan: str  # names it; no other loan ever had this name
    owner: str  # the process that has the upstream connection
    life: str  # the epoch of the session that the stream belongs to
    stream: int  # its key
    position: int  # of the cursor's event
    decided: bool  # the connection is the stream's own, or proven to continue it


class Asked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write what you have of a session; and lend the stream that is resumed elsewhere, or let go of it."""

    tag: str
    asker: str
    number: int
    cursor: bytes
    credentials: bytes
    stream: int = -1  # the key of the stream that is resumed, as far as the asker knows it
    serves: bool = False  # it can serve a stream that it is lent


class Answered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is written."""

    number: int
    by: str
    offer: Offer | None = None


class Granted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The upstream has let somebody resume a stream: a connection that is held for it is superseded (R4)."""

    tag: str
    stream: int


class Appended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the reader: there is more in the loan."""

    loan: str


class TakenBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the reader: another resume has the stream now."""

    loan: str


class Reading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the owner: these loans are being read, up to the entry of this number."""

    loans: list[tuple[str, int]]


class Returned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the owner: nobody reads it any more. `close`: the resume goes to the upstream instead (R4, R5)."""

    loan: str
    close: bool


Message = Asked | Answered | Granted | Appended | TakenBack | Reading | Returned

decode = msgspec.msgpack.Decoder(Message).decode
encode = msgspec.msgpack.Encoder().encode
