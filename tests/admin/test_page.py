"""The status page, in a real browser."""

from __future__ import annotations

import pytest

from admin.browser import page
from admin.stage import Client, play_divergent, play_proven

ROWS = "document.querySelectorAll('#verdicts tr').length"


async def text(opened, selector: str) -> str:
    found: str = await opened.tell(f"document.querySelector('{selector}').innerText")
    return found


async def test_the_page_shows_what_happens_as_it_happens(server, gate, client, http):
    """It renders, updates by itself, shows an injected divergence with its reason, and filters."""
    async with page(gate.admin + "/status") as opened:
        await opened.until("document.getElementById('ready').textContent === 'ready'")
        assert "No client has resumed a stream yet." in await text(opened, "#no-verdicts")
        await play_proven(client)
        await opened.until(f"{ROWS} === 1")
        session = await play_divergent(Client(http, gate.url), server)
        await opened.until(f"{ROWS} === 2")
        first = await text(opened, "#verdicts tr")
        for shown in (
            "divergent",
            "epoch_changed",
            "the server lost the session and made a new one",
            "the epoch of the session",
            "another epoch",
            "refused",
            "1 call in flight",
        ):
            assert shown in first
        assert await opened.tell("document.querySelectorAll('#timeline rect.divergent').length") == 1
        assert await opened.tell("document.querySelectorAll('#timeline rect.epoch').length") == 1
        assert "fenced" in await text(opened, "#sessions tr")

        choose = "document.getElementById('f-verdict')"
        await opened.tell(f"{choose}.value = 'proven'; {choose}.dispatchEvent(new Event('input'))")
        await opened.until(f"{ROWS} === 1")
        assert "carried the session's epoch token" in await text(opened, "#verdicts")
        await opened.tell("document.getElementById('f-clear').click()")
        await opened.until(f"{ROWS} === 2")
        await opened.tell("document.querySelector('#verdicts tr button').click()")
        await opened.until(f"{ROWS} === 1")
        assert "epoch_changed" in await text(opened, "#verdicts")
        choose = "document.getElementById('f-reason')"
        await opened.tell(f"{choose}.value = 'epoch'; {choose}.dispatchEvent(new Event('input'))")
        await opened.until("document.getElementById('no-verdicts').hidden === false")
        assert "None of the last 500 verdicts is like that." in await text(opened, "#no-verdicts")
        choose = "document.getElementById('f-state')"
        await opened.tell(f"{choose}.value = 'open'; {choose}.dispatchEvent(new Event('input'))")
        await opened.until("document.getElementById('no-sessions').hidden === false")

        assert opened.complaints == []
        assert {url.split("/")[2] for url in opened.asked if not url.startswith("data:")} == {gate.admin.split("/")[2]}
        assert session not in await opened.tell("document.documentElement.outerHTML")


async def test_trouble_is_told_at_the_top(server, gate):
    async with page(gate.admin + "/status") as opened:
        await opened.until("document.getElementById('ready').textContent === 'ready'")
        assert await opened.tell("document.getElementById('banner').hidden")
        gate.file.write_text(gate.file.read_text() + "colour: blue\n")
        await opened.until("!document.getElementById('banner').hidden")
        assert "colour: unknown key" in await text(opened, "#banner")
        await gate.kill()
        await opened.until("document.getElementById('ready').textContent === 'no answer'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone_in_both_schemes(server, gate, client, scheme):
    await play_divergent(client, server)
    async with page() as opened:
        await opened.size(390, 844, phone=True)
        await opened.scheme(scheme)
        await opened.goto(gate.admin + "/status")
        await opened.until(f"{ROWS} === 1")
        assert await opened.tell("document.documentElement.scrollWidth <= 390")
        assert await opened.tell(
            "[...document.querySelectorAll('main *')].every((e) => e.getBoundingClientRect().right <= 390)"
        )
        paper, ink = await opened.tell(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (brightness(paper) > brightness(ink)) is (scheme == "light")
        assert await contrast_of_chips(opened) >= 4.5
        assert opened.complaints == []


def brightness(color: str) -> int:
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


async def contrast_of_chips(opened) -> float:
    """The least contrast between a chip's word and what is behind it, by the formula of WCAG 2."""
    found: float = await opened.tell("""(() => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const over = (colors) => {
            canvas.clearRect(0, 0, 1, 1);
            for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const light = (rgb) => rgb.map((part) => part / 255)
            .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
            .reduce((sum, part, index) => sum + part * [.2126, .7152, .0722][index], 0);
        return Math.min(...[...document.querySelectorAll(".card .chip")].map((chip) => {
            const style = getComputedStyle(chip), card = getComputedStyle(chip.closest(".card")).backgroundColor;
            const pair = [light(over([card, style.backgroundColor])), light(over([style.color]))].sort();
            return (pair[1] + .05) / (pair[0] + .05);
        }));
    })()""")
    return found
