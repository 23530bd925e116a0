"""The dashboard in a real browser: its figures are those of /metrics, it draws, and it trusts no text."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from dashboard_scene import SYSTEM, Scene
from playwright.async_api import Browser, Page
from prometheus_client.parser import text_string_to_metric_families

HOSTILE = "<img src=x onerror=document.title='owned'>"

# Whether a canvas holds a pixel of a colour that a custom property of the page names.
PAINTED = """([id, name]) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const wanted = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const off = (i) => Math.abs(pixels[i] - r) + Math.abs(pixels[i + 1] - g) + Math.abs(pixels[i + 2] - b);
  let found = 0;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200 && off(i) < 12) found += 1;
  return found;
}"""


class Watched:
    """A page, and everything it asked for or complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self.hosts.add(re.sub(r"^(\w+://[^/]+).*", r"\1", asked.url)))

    async def text(self, selector: str) -> str:
        return (await self.page.inner_text(selector)).strip()

    async def figure(self, selector: str) -> float:
        """The number in an element, without its unit."""
        found = re.search(r"[\d,]+(\.\d+)?", await self.text(selector))
        assert found is not None, selector
        return float(found[0].replace(",", ""))

    async def rows(self, table: str) -> list[list[str]]:
        rows = await self.page.query_selector_all(f"#{table} tbody tr")
        return [
            [(await cell.inner_text()).strip() for cell in await row.query_selector_all("td")] for row in rows
        ]


async def look(browser: Browser, scene: Scene, **options: Any) -> Watched:
    """Open the page and wait until it was drawn twice."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    watched = Watched(await context.new_page())
    await watched.page.goto(f"{scene.admin}/dashboard")
    await watched.page.wait_for_selector("body[data-updated]")
    return watched


async def chat(scene: Scene, key: str, turns: int, number: int) -> None:
    """One conversation of streamed turns whose system prompt begins with a clock and an id."""
    messages: list[dict[str, str]] = [{}]
    for turn in range(turns):
        clock, id = f"10:{number:02}:{turn:02}", f"{number:08x}-0000-4000-8000-{turn:012x}"
        head = f"Current time: 2026-03-01 {clock}\nRequest id: {id}\n"
        messages[0] = {"role": "system", "content": head + SYSTEM}
        messages.append({"role": "user", "content": f"Question {number}.{turn}?"})
        body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 8}
        headers = {"Authorization": f"Bearer {key}"}
        async with scene.session.post(
            f"{scene.base}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            assert answer.status == 200
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        messages.append({"role": "assistant", "content": "Yes."})


async def metrics_of(scene: Scene) -> dict[str, Any]:
    """Sums over /metrics, as a stranger with a Prometheus parser would make them."""
    async with scene.session.get(f"{scene.admin}/metrics") as answer:
        text = await answer.text()
    sums: dict[str, float] = defaultdict(float)
    parts: dict[str, dict[str, float]] = defaultdict(dict)
    labelled: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            labelled[sample.name].append((sample.labels, sample.value))
            if sample.name.startswith("warmfront_ttft_part_seconds_") and "le" not in sample.labels:
                parts[sample.labels["part"]][sample.name.rsplit("_", 1)[1]] = sample.value
    means = {part: 1000 * of["sum"] / of["count"] for part, of in parts.items() if of["count"]}
    return {"sums": sums, "means": means, "labelled": labelled}


async def settled(scene: Scene) -> dict[str, Any]:
    """/metrics once nothing changes any more (the shadow index credits a moment after a request ends)."""
    before = await metrics_of(scene)
    while True:
        await asyncio.sleep(0.4)
        after = await metrics_of(scene)
        names = [name for name in after["sums"] if "_tokens_total" in name]
        if all(before["sums"][name] == after["sums"][name] for name in names):
            return after
        before = after


async def test_the_page_shows_what_metrics_say(scene: Scene, browser: Browser) -> None:
    await asyncio.gather(*(chat(scene, "acme-key", 3, number) for number in range(4)))
    await asyncio.gather(*(chat(scene, "globex-key", 2, number) for number in range(10, 13)))
    async with scene.session.post(f"{scene.base}/v1/chat/completions", json={"model": "tiny"}) as refused:
        assert refused.status == 401
    metrics = await settled(scene)
    sums = metrics["sums"]
    assert sums["warmfront_requests_total"] == 19
    assert sums["warmfront_delivered_tokens_total"] > 0

    seen = await look(browser, scene)
    prompt = sums["warmfront_prompt_tokens_total"]
    assert await seen.text("#hit-rate") == f"{100 * sums['warmfront_delivered_tokens_total'] / prompt:.1f} %"
    assert await seen.figure("#requests") == sums["warmfront_requests_total"]
    assert await seen.figure("#failed") == 1
    assert await seen.figure("#prompt-tokens") == prompt
    assert await seen.figure("#delivered-tokens") == sums["warmfront_delivered_tokens_total"]
    assert await seen.text("#recover-title") == "Recovered"
    assert await seen.figure("#recover-note") == sums["warmfront_recovered_tokens_total"]
    assert sums["warmfront_recoverable_tokens_total"] > 0, "the route in observe has something to gain"

    shown = {}
    for item in await seen.page.query_selector_all("#ttft-legend li[data-part]"):
        shown[await item.get_attribute("data-part")] = (await item.inner_text()).splitlines()[-1]
    assert shown.keys() == metrics["means"].keys()
    for part, mean in metrics["means"].items():
        figure = float(shown[part].removesuffix(" ms").replace(",", ""))
        assert figure == pytest.approx(mean, abs=0.051 if mean < 100 else 0.51), part

    replicas = {row[0]: row for row in await seen.rows("replicas")}
    resident = {
        labels["replica"]: value for labels, value in metrics["labelled"]["warmfront_replica_resident_blocks"]
    }
    assert len(replicas) == 2
    for name, row in replicas.items():
        assert row[1] == "ready"
        assert float(row[6].replace(",", "")) == resident[name] > 0
    pins = await seen.rows("pins")
    assert [(row[0], row[1], row[3]) for row in pins] == [("acme-support", "acme", "resident")] * 2
    assert {row[2] for row in pins} == replicas.keys()
    routes = await seen.rows("routes")
    assert [(row[0], row[3]) for row in routes] == [("support", "enforce"), ("tutor", "observe")]
    assert "policy enforce tutor --policy " in routes[1][6]
    assert len(await seen.rows("recent")) == 19

    assert seen.complaints == []
    assert seen.hosts == {scene.admin}
    assert "Question" not in await seen.page.content(), "prompts are never shown"
    for chart, colour in (("hit-chart", "--warm"), ("hit-chart", "--cool"), ("ttft-chart", "--prefill")):
        assert await seen.page.evaluate(PAINTED, [chart, colour]) > 5, (chart, colour)


async def test_no_text_becomes_markup(scene: Scene, browser: Browser) -> None:
    async with scene.session.get(f"{scene.admin}/admin/policy") as answer:
        path = (await answer.json())["path"]
    text = await asyncio.to_thread(Path(path).read_text)
    body = {"text": text, "source": HOSTILE}
    async with scene.session.post(f"{scene.admin}/admin/policy", json=body) as answer:
        assert answer.status == 200, await answer.text()
    replica = next(iter(scene.gateway.pools["default"].replicas.values()))
    replica.reason = HOSTILE
    seen = await look(browser, scene)
    assert await seen.text("#policy-source") == HOSTILE
    assert HOSTILE in (await seen.rows("replicas"))[0][1]
    assert await seen.page.query_selector("img") is None
    assert await seen.page.title() == "Warmfront"
    assert seen.complaints == []
    assert seen.hosts == {scene.admin}


async def test_an_empty_page_says_so_and_a_lost_gateway_too(scene: Scene, browser: Browser) -> None:
    seen = await look(browser, scene, color_scheme="dark")
    assert await seen.text("#hit-rate") == "-"
    assert await seen.text("#hit-chart .none") == "no requests in the last ten minutes"
    assert [row[0] for row in await seen.rows("recent")] == ["no requests yet"]
    for width in (1280, 420):
        await seen.page.set_viewport_size({"width": width, "height": 900})
        # Nothing sticks out, once the charts have followed the new width.
        await seen.page.wait_for_function(f"document.documentElement.scrollWidth === {width}", timeout=10_000)
    assert seen.complaints == []
    await seen.page.route("**/admin/state", lambda route: route.abort())
    await seen.page.wait_for_selector("body.stale")
    assert "no answer from the gateway" in await seen.text("#status")
    await seen.page.unroute("**/admin/state")
    await seen.page.wait_for_selector("body:not(.stale)")
    assert await seen.text("#status") == "live"
