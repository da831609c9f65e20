"""page: a report as HTML that is well formed and loads nothing."""

import json
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from megatron.core.transformer._cuda_graphs.report.page import page, write
from megatron.core.transformer._cuda_graphs.report.record import BufferUse, MemorySample, StaticInput

from .reports import counts, report

WHOLE = {
    "whole_model": True,
    "layers": (),
    "hooks": (),
    "static_inputs": (),
    "graphs": counts(1, 1),
    "order": [(None, 0, "forward"), (None, 0, "backward")],
    "passes": (),
}


class Parsed(HTMLParser):
    """The elements of a page.

    Attributes:
        elements: ``(tag, attributes)`` of each.
        texts: The text in each element, by tag.
        headings: The text of level-2 headings.
    """

    def __init__(self, text):
        super().__init__()
        self.elements: list = []
        self.texts: list = []
        self._open: list = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts.append((self._open[-1], data))

    def text(self, tag):
        return [text for each, text in self.texts if each == tag]

    def boxes(self, **wanted):
        found = [attributes for tag, attributes in self.elements if tag == "rect"]
        return [box for box in found if wanted.items() <= box.items()]


@pytest.fixture
def parsed():
    return Parsed(page(report()))


@pytest.mark.parametrize("changes", [{}, WHOLE, {"memory": ()}, {"static_inputs": ()}], ids=str)
def test_tags_are_closed_and_nothing_is_loaded(changes):
    text = page(report(**changes))
    for tag, attributes in Parsed(text).elements:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href", "onclick"} & set(attributes)
    assert "http" not in text and "url(" not in text and "@import" not in text


def test_sections(parsed):
    assert parsed.text("h2") == [
        "Memory over capture",
        "Order of passes",
        "Static inputs over their lives",
        "Layers",
        "Hooks",
        "What stays eager",
    ]
    assert Parsed(page(report(**WHOLE))).text("h2") == ["Memory over capture", "Order of passes", "What stays eager"]


def test_a_box_for_each_pass_in_the_lane_of_its_chunk(parsed):
    forward, backward = parsed.boxes(fill="#4477aa"), parsed.boxes(fill="#cc6677")
    assert len(forward) == len(backward) == 8
    assert len({box["y"] for box in forward}) == 2  # chunks
    boxes = sorted(forward + backward, key=lambda box: float(box["x"]))
    lanes = [layer // 2 for layer, _, _ in report().order]
    rows = sorted({box["y"] for box in boxes}, key=float)
    assert [rows.index(box["y"]) for box in boxes] == lanes


def around(page):
    """The frames, by the boxes inside."""
    found = []
    for frame in page.boxes(stroke="#222"):
        left, top, width, height = (float(frame[name]) for name in ("x", "y", "width", "height"))
        boxes = page.boxes(fill="#4477aa") + page.boxes(fill="#cc6677")
        inside = [box for box in boxes if left < float(box["x"]) < left + width]
        assert all(top < float(box["y"]) < top + height for box in inside)
        found.append(len(inside))
    return found


@pytest.mark.parametrize("together", [(0, 1), (2, 3)])
def test_a_frame_around_passes_in_one_graph(together):
    layers = report().layers
    for index, layer in enumerate(layers):
        layer.recorded_with = together[0] if index in together else None
    # Two layers, forward and backward, for two micro-batches.
    assert around(Parsed(page(report(layers=layers)))) == [2] * 4


def test_passes_have_names_and_times(parsed):
    titles = parsed.text("title")
    assert "layer 2 (Layer), micro-batch 1, backward: 100.0 ms" in titles
    assert len([title for title in titles if title.endswith("ms")]) == 16


def test_a_bar_for_each_use_of_a_static_input(parsed):
    assert len(parsed.boxes(fill="#66aabb")) == 2
    (odd,) = parsed.boxes(fill="#aa88bb")
    even = [box for box in parsed.boxes(fill="#66aabb") if box["y"] == odd["y"]]
    assert len(even) == 1
    assert float(even[0]["x"]) + float(even[0]["width"]) <= float(odd["x"])


def test_static_inputs_that_are_left_out_are_counted():
    many = [StaticInput("mask", 1, [BufferUse(0, 0, 0, 1)]) for _ in range(83)]
    assert "3 more are in the JSON file beside this page." in Parsed(page(report(static_inputs=many))).text("p")


def test_memory_is_drawn_to_scale(parsed):
    reserved, allocated = (attributes["points"] for tag, attributes in parsed.elements if tag == "polyline")
    heights = [float(point.split(",")[1]) for point in reserved.split()]
    floor = 2 * heights[0] - heights[1]  # 200 MiB are half of 400
    assert heights[3] == pytest.approx(floor - (floor - heights[1]) * 300 / 400)
    lower = [float(point.split(",")[1]) for point in allocated.split()]
    assert lower[0] == pytest.approx(floor - (floor - heights[1]) * 100 / 400)


def test_an_allocator_that_reports_nothing_is_said_to():
    none = Parsed(page(report(memory=[MemorySample(0.0, "start", 0, 0), MemorySample(1.0, "end", 0, 0)])))
    assert "The allocator reported no memory, as on a machine without a GPU." in none.text("p")
    assert not [tag for tag, _ in none.elements if tag == "polyline"]


def test_names_are_escaped(parsed):
    assert "<count>" in parsed.text("td")


def test_files(tmp_path):
    data, html = write(report(), str(tmp_path / "new" / "folder"), "capture")
    assert (data.name, html.name) == ("capture.json", "capture.html")
    assert json.loads(data.read_text()) == json.loads(json.dumps(asdict(report())))
    assert html.read_text(encoding="utf-8") == page(report())
