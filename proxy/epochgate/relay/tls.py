"""TLS on both sides: the contexts that the files of the configuration make."""

from __future__ import annotations

import ssl

from epochgate.errors import ConfigurationError
from epochgate.files import check_regular
from epochgate.settings import StoreTls, Tls, UpstreamTls

_ALPN = ["http/1.1"]


def server_context(tls: Tls) -> ssl.SSLContext | None:
    """The context of the listener, None where it speaks plain http. Raises ConfigurationError."""
    if tls.cert is None or tls.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(_ALPN)
    load_pair(context, "tls", tls.cert, tls.key)
    return context


def client_context(tls: UpstreamTls) -> ssl.SSLContext:
    """The context of connections to the upstream. Raises ConfigurationError."""
    context = _client_context("upstream.tls", tls)
    context.set_alpn_protocols(_ALPN)
    return context


def check_store(tls: StoreTls) -> None:
    """Whether the files of `store.tls` can be used; the client of the store reads them by itself, for each connection.

    Raises ConfigurationError.
    """
    _client_context("store.tls", tls)


def _client_context(above: str, tls: UpstreamTls | StoreTls) -> ssl.SSLContext:
    try:
        if tls.ca is not None:
            check_regular(tls.ca)
        context = ssl.create_default_context(cafile=tls.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{above}.ca: {tls.ca} cannot be used: {_describe(error)}; name a PEM file with certificates"
        ) from None
    if tls.cert is not None and tls.key is not None:
        load_pair(context, above, tls.cert, tls.key)
    return context


def load_pair(context: ssl.SSLContext, above: str, cert: str, key: str) -> None:
    """Use this certificate and key from now on. `above` is where they stand in the configuration.

    Raises ConfigurationError.
    """
    try:
        check_regular(cert)
        check_regular(key)
        context.load_cert_chain(cert, key, password="")  # an empty one, or OpenSSL would ask at the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{above}.cert, {above}.key: {cert} and {key} cannot be used: {_describe(error)}; "
            "they must be PEM files that belong together, the key without a passphrase"
        ) from None


def _describe(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    return (error.strerror or "cannot be read").lower()
