"""Draw the pictures of the web page in the README, from a real run on a running server.

    apar serve &
    python docs/web_page_images.py http://127.0.0.1:8000

`apar-smollm2` answers. `web-page.png` shows a race of forked and sequential decoding.
`web-page.webp` replays a forked answer in slow motion, from the chunks that the page received. Both
show a run that took about the median time of several. On few cores, `cpu_threads: 1` of the model
leaves room for the browser.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parent / "images"
PROMPT = "Name 5 things to do on a rainy day."
NUM_RUNS = 3
MAX_RUNS = 20
TOLERANCE = 0.15
ANIMATION_S = 8
FRAMES_PER_S = 10
LAST_FRAME_S = 3.0
MAX_BYTES = 1_000_000
NUM_COLORS = 192
MARGIN = 9
TIMEOUT_MS = 120_000
WIDTH, HEIGHT = 1080, 1000


def ask(page: Page, mode: str) -> float:
    """Ask the question until the answers are complete; returns the seconds of the slowest."""
    lanes = 2 if mode == "race" else 1
    page.locator(f"input[value={mode}]").check(force=True)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    page.wait_for_selector(" + ".join(['.lane[data-state="complete"]'] * lanes))
    page.wait_for_selector("#replay:visible")
    shown = page.locator(".figure.time .value").all_inner_texts()
    return max(float(text.removesuffix(" s")) for text in shown)


def ask_for_a_typical_run(page: Page, mode: str) -> None:
    """Ask until a run takes about the median of the first ones."""
    median = statistics.median(ask(page, mode) for _ in range(NUM_RUNS))
    for _ in range(MAX_RUNS):
        if abs(ask(page, mode) - median) < TOLERANCE * median:
            return
    raise SystemExit(f"no run took about {median:.2f} s, the median: is the machine busy?")


def picture(page: Page, first: str, last: str) -> Image.Image:
    """Return the part of the page from one element to the end of another, and a margin."""
    begin, end = page.locator(first).bounding_box(), page.locator(last).bounding_box()
    assert begin is not None
    assert end is not None
    top = max(0.0, begin["y"] - MARGIN)
    height = end["y"] + end["height"] + MARGIN - top
    shot = page.screenshot(
        clip={"x": 0.0, "y": top, "width": WIDTH, "height": height},
        full_page=True,
        animations="disabled",
        caret="hide",
    )
    return Image.open(io.BytesIO(shot)).convert("RGB")


def draw_race(page: Page) -> None:
    """Write the still picture."""
    ask_for_a_typical_run(page, "race")
    image = picture(page, ".top", "#timeline")
    image.quantize(NUM_COLORS).save(IMAGES / "web-page.png", optimize=True)


def draw_answer(page: Page) -> None:
    """Write the animation."""
    ask_for_a_typical_run(page, "forked")
    num_frames = ANIMATION_S * FRAMES_PER_S
    moments = [round(1000 * number / num_frames) for number in range(num_frames + 1)]
    frames = []
    for moment in moments:
        page.locator("#moment").fill(str(moment))
        page.locator("#moment").blur()
        frames.append(picture(page, "#ask", "#timeline"))
    height = max(frame.height for frame in frames)
    # The frame before the last third has the carets, whose colors the last one lacks.
    both = Image.new("RGB", (WIDTH, 2 * height))
    both.paste(frames[-num_frames // 3], (0, 0))
    both.paste(frames[-1], (0, height))
    palette = both.quantize(NUM_COLORS)
    padded = [
        _on_canvas(frame, height).quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB")
        for frame in frames
    ]
    durations = [round(1000 / FRAMES_PER_S)] * num_frames + [round(1000 * LAST_FRAME_S)]
    padded[0].save(
        IMAGES / "web-page.webp",
        save_all=True,
        append_images=padded[1:],
        duration=durations,
        loop=0,
        lossless=True,
        quality=50,
        method=2,  # a ninth of method 0; the higher ones take minutes
    )


def _on_canvas(image: Image.Image, height: int) -> Image.Image:
    """Return an image in the height of the largest, on the page's own ground."""
    canvas = Image.new("RGB", (image.width, height), image.getpixel((0, image.height - 1)))
    canvas.paste(image)
    return canvas


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url", help="address of a running server")
    address = parser.parse_args().url
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        page.wait_for_selector("#model:enabled")
        page.locator("#temperature").evaluate("input => { input.value = 0 }")
        draw_race(page)
        draw_answer(page)
        browser.close()
    sizes = {path.name: path.stat().st_size for path in IMAGES.glob("web-page.*")}
    if sum(sizes.values()) > MAX_BYTES:
        raise SystemExit(f"the pictures have more than {MAX_BYTES} bytes: {sizes}")


if __name__ == "__main__":
    main()
