"""The server's web page in Debian's Chromium."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

from tests.fakes.tools import find
from tests.integration.serving.apar_process import REQUEST_S, TOKEN, Server

API = "**/v1/chat/completions"
CARDS = '.card:not([data-thread=""])'
# Records, once a frame, how long the text of each thread's card is, without the cards in it.
WATCH = f"""
window.lengths = [];
const own = (node) => [...node.childNodes].reduce((sum, child) => sum + (
  child.nodeType === 3 ? child.length : child.matches?.('.card') ? 0 : own(child)), 0);
(function watch() {{
  const cards = [...document.querySelectorAll('{CARDS}')];
  const lengths = cards.map((card) => [card.dataset.thread, own(card)]);
  window.lengths.push(Object.fromEntries(lengths));
  requestAnimationFrame(watch);
}})();
"""
# A slow network, whatever the speed of the engine and of the browser: each event of a stream takes
# 30 ms and a frame.
SLOW = """
const fetchFast = window.fetch;
window.fetch = async (...request) => {
  const response = await fetchFast(...request);
  if (!response.headers.get('content-type')?.startsWith('text/event-stream')) return response;
  const slow = new TransformStream({
    async transform(text, controller) {
      for (const event of text.split(/(?<=\\n\\n)/)) {
        controller.enqueue(event);
        await new Promise((go) => setTimeout(() => requestAnimationFrame(go), 30));
      }
    },
  });
  const text = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(slow);
  return new Response(text.pipeThrough(new TextEncoderStream()), response);
};
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium; its sandbox does not work for root in a container."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class WebPage:
    """The page of a server in a context of its own, with an API key entered."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.set_default_timeout(1000 * REQUEST_S)

    def _said(self, message: Any) -> None:
        # Chromium itself reports refused requests.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, token: str = TOKEN, fragment: str = "") -> None:
        """Load the page, enter an API key, and choose greedy decoding."""
        self.page.goto(f"{self.server.url}/{fragment}")
        self.page.fill("#key", token)
        self.page.press("#key", "Enter")
        self.page.wait_for_selector("#model:enabled")
        self.page.locator("#temperature").evaluate("input => { input.value = 0 }")

    def slow_down(self) -> None:
        """Let this context's pages receive one event after the other, to see how cards grow."""
        self.page.context.add_init_script(SLOW)

    def ask(self, prompt: str) -> None:
        """Send a question with the keyboard."""
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Enter")

    def wait(self, state: str = "complete", lanes: int = 1) -> None:
        """Wait until all answers are complete, or have failed."""
        self.page.wait_for_selector(" + ".join([f'.lane[data-state="{state}"]'] * lanes))
        self.page.wait_for_selector("#send:visible")

    def alter_requests(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Let a function change the body of each request for an answer."""

        def changed(route: Route) -> None:
            body = json.loads(route.request.post_data or "{}")
            change(body)
            route.continue_(post_data=json.dumps(body))

        self.page.route(API, changed)

    def copied(self) -> str:
        """Return the ordered text that the page copies."""
        self.page.get_by_role("button", name="Copy").first.click()
        text: str = self.page.evaluate("navigator.clipboard.readText()")
        return text

    def cards(self) -> list[str]:
        """Return the text of each thread's card, without its badge."""
        return self.page.locator(f"{CARDS} > .parts").all_inner_texts()


@contextmanager
def web_page(browser: Browser, server: Server, **context: Any) -> Iterator[WebPage]:
    """Open a context of its own; at its end, check that no script of the page has failed."""
    fields = {"permissions": ["clipboard-read", "clipboard-write"]} | context
    opened = browser.new_context(**fields)
    opened.add_init_script(WATCH)
    page = WebPage(opened.new_page(), server)
    try:
        yield page
        assert page.errors == []
    finally:
        opened.close()


def growing_at_once(lengths: list[dict[str, int]]) -> int:
    """Return the largest number of cards that are written at the same time.

    Counted in a frame are the cards that have a text and later a longer one. A busy browser may
    draw few frames, and not every card in each.
    """
    longest: Counter[str] = Counter()
    for frame in lengths:
        longest |= Counter(frame)
    return max(sum(0 < frame[card] < longest[card] for card in frame) for frame in lengths)


def letters(text: str) -> str:
    """Return a text without white space, Markdown's marks, bullets and numbers of list items."""
    return re.sub(r"^\s*(\d+\.|-)|[\s*]", "", text, flags=re.MULTILINE)
