"""Secrets are compared and shown without being kept (L7)."""

import re

from epochgate.guard.fingerprint import Fingerprints

NAMES = (b"authorization", b"cookie", b"x-api-key")


def test_a_name_is_shown_as_twelve_digits_under_a_key() -> None:
    """L7: the same everywhere under one key, and nothing under another."""
    one, same, other = Fingerprints(b"k" * 32), Fingerprints(b"k" * 32), Fingerprints(b"l" * 32)
    assert re.fullmatch("[0-9a-f]{12}", one.name(b"secret"))
    assert one.name(b"secret") == same.name(b"secret") == one.name(b"secret")
    assert one.name(b"secret") != other.name(b"secret")
    assert one.name(b"secret") != one.name(b"secret2")


def test_credentials_are_the_fields_of_the_policy() -> None:
    """Section 2: names in any case and order of different fields; other fields do not matter."""
    prints = Fingerprints(b"k" * 32)

    def of(*fields: tuple[bytes, bytes]) -> bytes:
        return prints.credentials(fields, NAMES)

    both = of((b"Authorization", b"Bearer a"), (b"Cookie", b"c=1"))
    assert len(both) == 16
    assert both == of((b"cookie", b"c=1"), (b"X-Other", b"1"), (b"AUTHORIZATION", b"Bearer a"))
    assert of((b"X-Other", b"1")) == of() == b""
    different = [
        both,
        of((b"Authorization", b"Bearer a")),
        of((b"Authorization", b"Bearer b")),
        of((b"X-API-Key", b"Bearer a")),
        of((b"Authorization", b"")),
        of((b"Cookie", b"a"), (b"Cookie", b"b")),
        of((b"Cookie", b"b"), (b"Cookie", b"a")),
        of((b"Cookie", b"a6:cookie1:b")),
        of(),
    ]
    assert len(set(different)) == len(different)
    assert not any(b"Bearer" in value for value in different)
