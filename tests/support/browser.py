"""A real Chromium under Playwright, and pictures small enough to keep.

Playwright is in an environment of its own (``make test-page``), and imported here only.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import struct
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS: Final = 30_000.0
COLOURS: Final = 256
PIXELS: Final = """async (data) => {
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const raw = context.getImageData(0, 0, picture.width, picture.height).data;
  let text = "";
  for (let at = 0; at < raw.length; at += 32768) {
    text += String.fromCharCode(...raw.subarray(at, at + 32768));
  }
  return [picture.width, picture.height, btoa(text)];
}"""


def chromium_path() -> str:
    """Return where Chromium is; fails where there is none."""
    found = os.environ.get("WARMROUTE_CHROMIUM") or shutil.which("chromium")
    assert found, "no chromium: install it, or set WARMROUTE_CHROMIUM to its path"
    return found


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Run a browser with a fresh profile."""
    playwright = import_module("playwright.async_api").async_playwright
    async with playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=chromium_path(), args=list(FLAGS), timeout=2 * WAIT_MS
        )
        try:
            yield browser
        finally:
            await browser.close()


class Tab:
    """One page with what it said on its console; ``faults`` is to stay empty."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.faults.append(message.text)

    async def text(self, selector: str) -> str:
        """Return the text of one element."""
        return str(await self.page.inner_text(selector))

    async def picture(self, path: Path, *, whole: bool = False) -> int:
        """Write what is seen as a small PNG; return its size in bytes."""
        shot = await self.page.screenshot(full_page=whole, animations="disabled")
        blank = await self.page.context.new_page()
        width, height, raw = await blank.evaluate(PIXELS, base64.b64encode(shot).decode())
        await blank.close()
        pixels = np.frombuffer(base64.b64decode(raw), np.uint8).reshape(height, width, 4)
        return _written(path, small_png(pixels[:, :, :3]))


@contextlib.asynccontextmanager
async def tab(browser: Any, url: str, **options: Any) -> AsyncIterator[Tab]:
    """Open ``url`` in a context of its own."""
    context = await browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    try:
        opened = Tab(page)
        await page.goto(url)
        yield opened
    finally:
        await context.close()


def small_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return a PNG of a palette: the commonest colours, others as the nearest of them."""
    height, width, _ = pixels.shape
    wide = pixels.astype(np.int64)
    packed = (wide[:, :, 0] << 16) | (wide[:, :, 1] << 8) | wide[:, :, 2]
    colours, where, counts = np.unique(packed, return_inverse=True, return_counts=True)
    kept = np.argsort(counts)[::-1][:COLOURS]
    parts = np.stack([colours >> 16, (colours >> 8) & 255, colours & 255], axis=1)
    nearest = np.empty(len(colours), np.uint8)
    for start in range(0, len(colours), 1_024):
        apart = ((parts[start : start + 1_024, None] - parts[None, kept]) ** 2).sum(axis=2)
        nearest[start : start + 1_024] = apart.argmin(axis=1)
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = nearest[where.reshape(height, width)]
    palette = parts[kept].astype(np.uint8).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    chunks = ((b"IHDR", head), (b"PLTE", palette), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _written(path: Path, data: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(data)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
