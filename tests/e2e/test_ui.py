"""The page in a real browser, against the routes and an engine that echoes; skipped without Chromium."""

import asyncio
import base64
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from dspark_ray.core.config import parse_app_config
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.observability.fleet_page import fleet_page
from tests.fakes import FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir

CONFIG = parse_app_config(
    {
        "model": {"id": "echo", "max_model_len": 256},
        "engine": {"max_running": 4, "max_waiting": 2},
        "speculation": {"drafter": {"kind": "ngram"}},
    }
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a free port."""
    tokenizer = Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))
    started = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        app = LocalApp(tokenizer, FakeEngine(CONFIG, step_ms=5.0), CONFIG)

        async def metrics_page() -> bytes:
            return fleet_page(app.fleet.last_stats(), {}).encode()

        app.fleet.metrics_page = metrics_page
        server = uvicorn.Server(uvicorn.Config(app.api, port=0, log_level="warning"))
        servers.append(server)
        started.set()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    started.wait(10)
    while not servers[0].started:
        time.sleep(0.05)
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    servers[0].should_exit = True
    thread.join(10)


class Page:
    """One page of a browser, driven over its debugging socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._calls = socket, 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=60)
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until a JavaScript expression is true."""
        for _ in range(300):
            if await self.evaluate(script):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"never true: {script}")

    async def screenshot(self, path: Path, width: int, height: int, scheme: str) -> None:
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=media)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        picture = await self.call("Page.captureScreenshot")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(picture["data"]))


def debugging_port(path: Path) -> int:
    """What Chromium writes once it listens."""
    for _ in range(600):
        if path.is_file() and len(lines := path.read_text().splitlines()) == 2:
            return int(lines[0])
        time.sleep(0.1)
    raise AssertionError("Chromium did not start")


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Chromium without a window, and its page."""
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await asyncio.to_thread(debugging_port, folder / "DevToolsActivePort")
        root = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            targets = await (await session.get(f"{root}/json")).json()
            address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.wait()


async def test_an_answer_is_coloured_and_figures_are_live(address: str, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        await page.call("Page.navigate", url=f"{address}/ui?ask=hello")
        await page.until("document.querySelector('.facts') !== null")
        sources = await page.evaluate("[...document.querySelectorAll('.token')].map(t => t.className)")
        assert {"token accepted", "token correction"} <= set(sources)
        tip = await page.evaluate("document.querySelector('.accepted.token').dataset.tip")
        assert tip.startswith("drafted and accepted, confidence 0.80.")
        facts = await page.evaluate("document.querySelector('.facts').textContent")
        assert re.search(r"\d+ tokens · .*verified draft tokens accepted", facts)
        await page.until("document.getElementById('state').textContent === 'ready'")
        await page.until("document.getElementById('budget').textContent !== '–'")
        assert await page.evaluate("document.querySelectorAll('.failed').length") == 0
        # Nothing is wider than the page, on a desk and on a telephone.
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            await page.screenshot(tmp_path / f"{width}-{scheme}.png", width, 800, scheme)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_a_question_that_fails_and_a_new_conversation(address: str, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as page:
        await page.call("Page.navigate", url=f"{address}/ui?ask=hello")
        await page.until("document.querySelector('.facts') !== null")
        # The answer has filled the model's context: nothing more can be asked, and nothing is kept of it.
        await ask(page, "again")
        await page.until("document.querySelector('.failed') !== null")
        assert "context length" in await page.evaluate("document.querySelector('.failed').textContent")
        assert await page.evaluate("messages.map(m => m.role).join()") == "user,assistant"
        await page.screenshot(tmp_path / "failed.png", 390, 800, "light")
        await page.evaluate("document.getElementById('clear').click()")
        assert await page.evaluate("document.querySelectorAll('article').length") == 0
        assert await page.evaluate("document.querySelector('.empty') !== null")
        # One that is left while its answer still comes has no part in the next one.
        await ask(page, "left")
        await page.until("document.querySelector('.token') !== null")
        await page.evaluate("document.getElementById('clear').click()")
        await page.until("document.getElementById('send').textContent === 'Send'")
        await ask(page, "fresh")
        await page.until("document.querySelector('.facts') !== null")
        assert await page.evaluate("messages.map(m => m.role).join()") == "user,assistant"
        assert await page.evaluate("messages[0].content") == "fresh"
        assert await page.evaluate("document.querySelectorAll('.failed').length") == 0


async def ask(page: Page, question: str) -> None:
    """Types a message and sends it."""
    await page.evaluate("document.getElementById('prompt').focus()")
    await page.call("Input.insertText", text=question)
    await page.evaluate("document.getElementById('form').requestSubmit()")
