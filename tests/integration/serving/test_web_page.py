"""The web page in a browser, in front of real engines."""

import json
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from tests.fakes.tools import needs
from tests.integration.serving.apar_process import ENGINE, HAPROXY, TOKEN, Server, slowed
from tests.integration.serving.browser import (
    API,
    WebPage,
    chromium,
    growing_at_once,
    letters,
    web_page,
)
from tests.integration.serving.killed_streams import Victims
from tests.integration.serving.shared_server import MODEL, SharedServer, wait_for_a_new_minute

# A browser that shares its cores with other tests misses frames: `.ci/run` runs these tests alone.
pytestmark = [pytest.mark.cluster, pytest.mark.ci, needs("chromium")]

GUITAR = "Give me 5 tips for learning guitar."
GUIDES = "Give me a detailed guide to baking bread.", "Give me a detailed guide to making coffee."
JOINING = "apar-tiny-threadweaver"
SCRIPT = "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 2'>"
LINK = f"[link](javascript:window.hacked=3) **bold** <b>not bold</b> {'wide' * 25}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[WebPage]:
    with web_page(browser, server) as opened:
        yield opened


@pytest.fixture
def joining(shared: SharedServer) -> Server:
    """Return the shared server with a second model, whose threads are joined."""
    said = shared.roll_out(MODEL, MODEL | {"checkpoint": JOINING})
    assert "Rolled out" in said, said
    shared.server.wait_for_replicas(2)
    return shared.server


def answer(server: Server, prompt: str = GUITAR, model: str = "apar-tiny") -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "temperature": 0}
    choices = server.post("/v1/chat/completions", json=body).json()["choices"]
    return str(choices[0]["message"]["content"])


def replay(lead: str, detail: str) -> dict[str, list[int]]:
    """Return the replay of an answer that forks once: a lead, and the detail of a child."""
    text = load_text(str(checkpoint_path()))
    fork, end = text.tokens.fork_id, text.tokens.end_id
    return {"": [*text.encode(lead), fork, end], "0": [*text.encode(detail), end]}


def shown_text(page: WebPage) -> str:
    """Return the text of the threads in their places, without the badges of the cards."""
    shown = page.page.locator(".lane-body > .parts").inner_text()
    for badge in page.page.locator(".badge").all_inner_texts():
        shown = shown.replace(badge, "", 1)
    return shown


def replays(page: WebPage, lead: str, detail: str) -> None:
    """Let the page's requests be answered with these texts."""
    replayed = replay(lead, detail)
    page.alter_requests(lambda body: body["apar"].update(replay=replayed))


def test_details_grow_side_by_side_into_the_text_of_the_api(page: WebPage, server: Server) -> None:
    page.slow_down()
    page.open()
    page.ask(GUITAR)
    page.wait()

    expected = answer(server)
    assert growing_at_once(page.page.evaluate("window.lengths")) >= 2
    assert len(page.cards()) == 5
    assert page.copied() == expected
    assert letters(shown_text(page)) == letters(expected)
    assert page.page.locator(".row:not(.axis)").count() == 6
    # The key is in the page's memory only.
    assert page.page.input_value("#key") == ""
    assert TOKEN not in json.dumps(
        page.page.evaluate("[document.cookie, localStorage, sessionStorage]")
    )


def test_html_in_an_answer_is_text(page: WebPage) -> None:
    replays(page, f"1. {SCRIPT}:", f" {LINK}")
    page.open()
    page.ask(GUITAR)
    page.wait()

    shown = page.page.locator(".lane-body")
    text = shown.inner_text()
    assert SCRIPT in text
    assert "<b>not bold</b>" in text
    assert shown.locator("script, img, b, a[href]").count() == 0
    assert shown.locator("strong").inner_text() == "bold"
    assert page.page.evaluate("window.hacked") is None
    card = page.page.locator(".card")
    assert card.evaluate("card => card.scrollWidth") <= card.evaluate("card => card.clientWidth")


def test_escape_stops_the_answer_and_frees_its_blocks(page: WebPage, server: Server) -> None:
    replays(page, "1. A long one:", " and so on" * 200)
    page.open()
    server.wait_until_idle()
    # The answer must not be complete before.
    with slowed(server.processes(ENGINE)):
        page.ask(GUITAR)
        page.page.wait_for_selector(".card >> text=and so on and so on")
        assert server.loads()[0]["threads"] > 0

        page.page.keyboard.press("Escape")
        page.wait("failed")

    server.wait_until_idle()
    assert "Stopped." in page.page.locator(".lane-error").inner_text()
    assert "and so on" in page.cards()[0]
    # The next question works.
    page.page.unroute_all()
    page.ask(GUITAR)
    page.wait()


def test_a_race_writes_one_text_twice(page: WebPage, server: Server) -> None:
    page.open(fragment="#mode=race")
    page.ask(GUITAR)
    page.wait(lanes=2)

    expected = answer(server)
    for lane in range(2):
        shown = page.page.locator(".lane").nth(lane)
        shown.get_by_role("button", name="Show as one text").click()
        assert letters(shown.locator(".whole").inner_text()) == letters(expected)
    steps = page.page.locator(".figure.steps .value").all_inner_texts()
    assert int(steps[0]) < int(steps[1]) / 2
    assert "one thread at a time" in page.page.locator(".verdict").inner_text()


def test_an_ordered_stream_is_one_text(page: WebPage, server: Server) -> None:
    page.open()
    page.page.locator("#tags").evaluate("select => { select.value = 'text' }")
    page.ask(GUITAR)
    page.wait()

    assert page.cards() == []
    assert letters(page.page.locator(".whole").inner_text()) == letters(answer(server))


def test_refusals_say_what_to_do(page: WebPage) -> None:
    wait_for_a_new_minute()
    page.open("once")  # The list of models was its one request in a minute.
    page.ask(GUITAR)
    page.wait("failed")
    said = page.page.locator(".lane-error").inner_text()
    assert "429" in said
    assert "Try again in" in said

    page.page.click("#key-toggle")
    page.page.fill("#key", "unknown")
    page.page.press("#key", "Enter")
    page.page.wait_for_selector("#error:has-text('401')")

    page.page.fill("#key", "clé")
    page.page.press("#key", "Enter")
    page.page.wait_for_selector("#error:has-text('ASCII')")

    # The browser reports an invalid field only where it can show it.
    page.page.locator("#seed").evaluate("input => { input.value = 0.5 }")
    page.ask(GUITAR)
    page.page.wait_for_selector("#seed:focus")
    page.page.keyboard.press("Escape")
    assert page.page.locator(".options summary:focus").count() == 1
    assert not page.page.locator("#seed").is_visible()


def test_a_lost_connection_is_reported_behind_the_text(page: WebPage, server: Server) -> None:
    replays(page, "1. A long one:", " and so on" * 200)
    page.open()
    with slowed(server.processes(ENGINE)):
        page.ask(GUITAR)
        page.page.wait_for_selector(".card >> text=and so on and so on")

        for process in server.processes(HAPROXY):
            process.kill()
        page.wait("failed")

    assert "connection" in page.page.locator(".lane-error").inner_text()
    assert "and so on" in page.cards()[0]
    server.wait_for_replicas(1)
    server.wait_until_idle()


def test_the_replay_shows_an_earlier_moment(page: WebPage) -> None:
    page.open()
    page.ask(GUITAR)
    page.wait()
    whole = sum(map(len, page.cards()))

    # When the first token came depends on the machine.
    lengths = []
    for moment in range(100, 1000, 100):
        page.page.locator("#moment").fill(str(moment))
        lengths.append(sum(map(len, page.cards())))
    page.page.locator("#speed").select_option("1")
    page.page.get_by_role("button", name="Replay").click()
    page.page.wait_for_selector("#play:has-text('Replay')")

    assert lengths == sorted(lengths)
    assert any(0 < length < whole for length in lengths)
    assert whole == sum(map(len, page.cards()))


def test_the_timeline_shows_the_server_s_times(page: WebPage) -> None:
    def update(name: str, state: str, tokens: int, **fields: object) -> dict[str, object]:
        return {
            "choice": 0,
            "id": name,
            "text": "x" * tokens,
            "tokens": tokens,
            "state": state,
        } | fields

    child = {"parent": "root", "position": 5}
    chunks = [
        (100, [update("root", "writing", 5)]),
        (600, [update("root", "waiting", 5), update("root.0", "writing", 5, **child)]),
        (1600, [update("root.0", "ended", 5)]),
        (1900, [update("root", "ended", 5)]),
    ]
    events = [
        {
            "choices": [{"index": 0, "delta": {"content": "x"}}],
            "apar": {"time_ms": at, "updates": updates},
        }
        for at, updates in chunks
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    # All chunks arrive at once, as in a browser that was busy.
    page.page.route(
        API, lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"})
    )
    page.open()

    page.ask("Hi")
    page.wait()

    bars = page.page.locator(".row").first.locator(".bar")
    states = [bars.nth(i).get_attribute("data-state") for i in range(bars.count())]
    assert states == ["writing", "waiting", "writing"]
    page.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    cells = page.page.locator("#table tr").nth(1).locator("td").all_inner_texts()
    begin, end = (float(cell.removesuffix(" s")) for cell in cells[:2])
    # Between two chunks, times are interpolated over at most 0.08 s.
    assert 0.99 <= end - begin <= 1.09


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_it_is_accessible_and_fits(
    browser: Browser, server: Server, scheme: str, width: int
) -> None:
    context = {"color_scheme": scheme, "viewport": {"width": width, "height": 844}}
    # axe is injected as a script, which the policy would refuse.
    with web_page(browser, server, bypass_csp=True, **context) as page:
        page.open(fragment="#mode=race")
        for moment in ("start", "end"):
            results = Axe().run(page.page)
            assert results.violations_count == 0, (moment, results.generate_report())
            wide = page.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, moment
            if moment == "start":
                page.ask(GUITAR)
                page.wait(lanes=2)
                page.page.click("#table-box summary")


def test_sections_and_their_points_grow_at_once(page: WebPage, server: Server) -> None:
    page.slow_down()
    page.open()
    page.ask(GUIDES[0])
    page.wait()

    assert growing_at_once(page.page.evaluate("window.lengths")) >= 5
    assert page.page.locator(".card .card").count() == 8
    assert letters(shown_text(page)) == letters(answer(server, GUIDES[0]))


# The tests below need other replicas; each change takes half a minute.


def test_an_answer_survives_the_loss_of_its_replica(browser: Browser, replicated: Server) -> None:
    replayed = replay("1. A long one:", " and so on" * 200)
    with web_page(browser, replicated) as page:
        page.alter_requests(lambda body: body["apar"].update(replay=replayed))
        page.open()
        victims = Victims(replicated)
        with slowed(replicated.processes(ENGINE)):
            with page.page.expect_response(API) as response:
                page.ask(GUITAR)
            page.page.wait_for_selector(".card >> text=and so on and so on")
            victims.kill(replica=True)
        page.wait()

        assert page.copied() == "1. A long one:" + " and so on" * 200
        assert letters(page.cards()[0]) == letters("1. A long one:" + " and so on" * 200)
        assert replicated.record(response.value.headers["x-request-id"])["continued"] >= 1
    replicated.wait_for_replicas(2)


def test_threads_that_are_joined_stand_between_the_texts_of_their_parent(
    browser: Browser, joining: Server
) -> None:
    with web_page(browser, joining) as page:
        page.slow_down()
        page.open()
        page.page.select_option("#model", JOINING)
        page.ask(GUITAR)
        page.wait()

        # All children of a block start together.
        assert growing_at_once(page.page.evaluate("window.lengths")) == 5
        outlines, cards, conclusion = page.page.locator(".lane-body > .parts > *").all_inner_texts()
        assert outlines.splitlines()[2:4] == ["1: Practice daily", "2: Tune first"]
        assert len(page.cards()) == cards.count("Thread") == 5
        assert conclusion == "Be patient, and enjoy every small step on the way."
        expected = answer(joining, model=JOINING)
        assert page.copied() == expected
        assert letters(shown_text(page)) == letters(expected)
        bars = page.page.locator(".row").first.locator(".bar")
        states = [bars.nth(i).get_attribute("data-state") for i in range(bars.count())]
        assert states == ["writing", "waiting", "writing"]

        # One block for each section, behind its heading.
        page.ask(GUIDES[1])
        page.page.wait_for_selector('.lane[data-state="running"]')
        page.wait()

        kinds = page.page.locator(".lane-body > .parts > *")
        assert [
            (kinds.nth(i).get_attribute("class"), kinds.nth(i).locator(".card").count())
            for i in range(kinds.count())
        ] == [("prose", 0), ("cards", 3), ("prose", 0), ("cards", 3), ("prose", 0), ("cards", 2)]
        assert letters(shown_text(page)) == letters(answer(joining, GUIDES[1], JOINING))
