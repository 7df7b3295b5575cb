"""The status page: one file without a request to anywhere else, and the headers that hold it to that."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web


def _allowed(text: str, element: str) -> str:
    """The inline elements of this kind, by their digests."""
    found = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode() for inline in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def build_page() -> web.Response:
    """The page; it asks the API for what it shows."""
    text = resources.files("epochgate.admin").joinpath("status.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_allowed(text, 'script')}; style-src {_allowed(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})
