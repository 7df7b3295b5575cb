"""Two processes went on with one stream: what either of them could not read is unknown to both (L3)."""

import pytest

from epochgate.guard.record import Origin, Stream
from epochgate.ledger.state import KeptStream, encode_state, merge_stream


@pytest.mark.parametrize("forgotten", ["ours", "theirs"])
def test_what_one_could_not_read_is_unknown(forgotten):
    """L3: one of the two read a message that may have been the response."""
    streams = {whose: Stream(0, Origin.CALL, (1, 2), b"") for whose in ("ours", "theirs")}
    streams[forgotten].forget_owed()
    merge_stream(streams["ours"], KeptStream(1, encode_state(streams["theirs"]), {}), 0)
    assert not streams["ours"].owes
    assert not streams["ours"].finished
