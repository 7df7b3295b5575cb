"""The status page of a proxy with several workers, in a real browser."""

from __future__ import annotations

import os
import signal

from admin.browser import page
from admin.stage import play_divergent


async def test_the_page_tells_of_all_workers(crew, server):
    """How many serve, what is amiss with one, and the verdicts of each."""
    one, two = await crew.serving()
    async with page(crew.gate.admin + "/status") as opened:
        await opened.until("document.getElementById('about').textContent.includes(' 2 of 2 workers ')")
        for pid in (one, two):
            async with crew.client(pid) as client:
                await play_divergent(client, server)
        await opened.until("document.querySelectorAll('#verdicts tr').length === 2")
        await opened.until("document.querySelectorAll('#sessions tr').length === 2")
        os.kill(one, signal.SIGSTOP)
        try:
            await opened.until(
                "document.getElementById('banner').textContent.includes('Ready, but worker 1: does not answer.')"
            )
        finally:
            os.kill(one, signal.SIGCONT)
        await opened.until("document.getElementById('banner').hidden")
        assert opened.complaints == []
