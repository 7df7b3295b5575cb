"""Headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

TIMEOUT = 30.0  # s, for the browser to do anything on a busy machine
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


class Page:
    """A page; `complaints` are what its console and its security policy said, `asked` the URLs that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.session = ""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._waiting.pop(data["id"]).set_result(data)
            elif data["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif data["method"] == "Network.requestWillBeSent":
                self.asked.append(data["params"]["request"]["url"])
            elif data["method"] == "Runtime.exceptionThrown":
                self.complaints.append(data["params"]["exceptionDetails"]["text"])
            elif data["method"] == "Log.entryAdded":
                self.complaints.append(data["params"]["entry"]["text"])

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; what it returns."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self.session} if self.session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        async with asyncio.timeout(TIMEOUT):
            data = await answer
        assert "error" not in data, data["error"]
        result: dict[str, Any] = data["result"]
        return result

    async def tell(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = await self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait, inside the page, until the expression is true; it is looked at after every change of the page."""
        promise = f"""new Promise((done) => {{
            const look = () => {{ if ({expression}) {{ watch.disconnect(); done(true); }} }};
            const watch = new MutationObserver(look);
            watch.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}});
            look();
        }})"""
        assert await self.tell(promise)

    async def goto(self, url: str) -> None:
        """Load another page."""
        self._loaded.clear()
        await self.do("Page.navigate", url=url)
        async with asyncio.timeout(TIMEOUT):
            await self._loaded.wait()

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    async def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.do("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        data = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))


def find_chromium() -> str:
    """The browser. Without one the test is skipped, on the build server it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("CI") == "true":
        pytest.fail("no chromium on the build server; install Debian's package chromium")
    pytest.skip("no chromium here; install Debian's package chromium")


@asynccontextmanager
async def page(url: str = "") -> AsyncIterator[Page]:
    """A page of a new browser, at `url` if there is one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            find_chromium(),
            *FLAGS,
            f"--user-data-dir={home}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(TIMEOUT):
                line = b""
                while b"DevTools listening on " not in line:
                    line = await process.stderr.readline()
                    assert line, "chromium ended before it was up"
            drained = asyncio.create_task(process.stderr.read())
            address = line.decode().partition("DevTools listening on ")[2].strip()
            async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
                opened = Page(socket)
                reader = asyncio.create_task(opened.listen())
                target = await opened.do("Target.createTarget", url="about:blank")
                attached = await opened.do("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                opened.session = attached["sessionId"]
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await opened.do(f"{domain}.enable")
                if url:
                    await opened.goto(url)
                yield opened
                opened.session = ""
                await opened.do("Browser.close")
                await reader
            async with asyncio.timeout(TIMEOUT):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await drained
