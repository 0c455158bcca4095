"""The moving picture of a stream that fails and one that recovers, as SVG without a script, for light and dark pages.

Made from the result of benchmarks/stream.py. It moves by CSS, which also shows it still (its last moment) to those who
prefer no motion. Pixels are paths, not embedded images, which some hosts block.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from testtime.report.run_figures import sliding_mean

WIDTH, HEIGHT = 860, 350
_SECONDS, _HELD = 14, 0.2  # of a round; share of it in which the last moment is shown
_LEFT, _RIGHT, _TOP, _BOTTOM = 400, 718, 92, 268  # the chart
_WORDS = "The light fades. One network stays as trained, one keeps learning."
_SIZE, _SMALL = 144, 72  # of the digit as seen, and brightened


class Palette(NamedTuple):
    """Colours for one kind of page."""

    paper: str
    ink: str
    soft: str
    rule: str
    frozen: str
    adapting: str


PALETTES = {
    "light": Palette("#ffffff", "#1c2733", "#5a6675", "#dfe3e8", "#7d858f", "#1a7fc4"),
    "dark": Palette("#0d1117", "#e6edf3", "#9aa5b1", "#30363d", "#a2abb5", "#4aa8e8"),
}


def draw_stream(found: Mapping[str, Any], scheme: str) -> str:
    """Draw the picture.

    Args:
        found: The result of benchmarks/stream.py.
        scheme: "light" or "dark".
    """
    colours = PALETTES[scheme]
    frames = found["frames"]
    shown = [_draw_frame(frame, index, found, colours) for index, frame in enumerate(frames)]
    source = f"{found['network']}, {found['images']:,} test digits, seed {found['seed']}: {found['command']}"
    title = "A stream of digits whose light fades: the frozen network fails, the adapting one recovers"
    fonts = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, DejaVu Sans, sans-serif"
    box = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">
<desc>{html.escape(source)}</desc>
<style>{_style(len(frames))}</style>
{box} fill="{colours.paper}"/>
<g font-family="{fonts}">
{_text(28, 42, _WORDS, 21, colours.ink, bold=True)}
{_draw_chart(found, colours)}
{"".join(shown)}
{_text(28, HEIGHT - 16, source, 11.5, colours.soft)}
</g>
{box} fill="none" stroke="{colours.rule}"/>
</svg>
"""


def _text(x: float, y: float, text: str, size: float, colour: str, anchor: str = "start", bold: bool = False) -> str:
    given = (' font-weight="650"' if bold else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:g}" y="{y:.1f}" font-size="{size}" fill="{colour}"{given}>{html.escape(text)}</text>'


def _style(frames: int) -> str:
    """The animation: each frame is shown for its share of the time, and the chart is uncovered as far."""
    moving, width = (1 - _HELD) * 100, _RIGHT - _LEFT
    rules = [f".f,.c{{animation:{_SECONDS}s infinite}}.f{{visibility:hidden}}.f{frames - 1}{{visibility:visible}}"]
    for index in range(frames):
        begin, end = moving * index / frames, moving * (index + 1) / frames
        before = "" if index == 0 else f"0%,{begin - 0.01:.2f}%{{visibility:hidden}}"
        after = "" if index == frames - 1 else f"{end:.2f}%,100%{{visibility:hidden}}"
        last = 100 if index == frames - 1 else end - 0.01
        rules.append(f"@keyframes f{index}{{{before}{begin:.2f}%,{last:.2f}%{{visibility:visible}}{after}}}")
        rules.append(f".f{index}{{animation-name:f{index};animation-timing-function:step-end}}")
    uncovered = f"{{transform:translateX({width}px)}}"
    rules.append(f".c{uncovered}.c{{animation-name:c;animation-timing-function:linear}}")
    rules.append(f"@keyframes c{{0%{{transform:translateX(0)}}{moving:.2f}%,100%{uncovered}}}")
    rules.append("@media (prefers-reduced-motion:reduce){.f,.c{animation:none}}")
    return "".join(rules)


def _draw_chart(found: Mapping[str, Any], colours: Palette) -> str:
    count, window, soft = found["images"], found["window"], colours.soft
    parts = [_text(_LEFT, _TOP - 18, f"error of the last {window} digits", 13, soft)]
    for name in ("frozen", "adapting"):
        wrong = np.array(list(found["wrong"][name]), dtype=float)
        curve = sliding_mean(wrong, window, 160)
        points = " ".join(f"{_x(seen, count):.1f},{_y(value):.1f}" for seen, value in zip(*curve, strict=True))
        line = f'fill="none" stroke="{getattr(colours, name)}" stroke-width="3" stroke-linejoin="round"'
        parts.append(f'<polyline points="{points}" {line}/>')
    # Moves to the right with the frames; the axes are drawn above it.
    size = f'width="{_RIGHT - _LEFT + 6}" height="{_BOTTOM - _TOP + 9}"'
    parts.append(f'<rect class="c" x="{_LEFT - 1}" y="{_TOP - 6}" {size} fill="{colours.paper}"/>')
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent)
        parts.append(f'<path d="M{_LEFT} {y:g}H{_RIGHT}" stroke="{colours.rule}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{percent}%", 12, soft, "end"))
    for seen in range(0, count + 1, count // 5):
        light = found["light"] ** min(1.0, seen / found["fade"])
        parts.append(_text(_x(seen, count), _BOTTOM + 19, f"{seen:,}", 12, soft, "middle"))
        parts.append(_text(_x(seen, count), _BOTTOM + 36, f"{light:.0%}", 12, soft, "middle"))
    for text, y in (("digits seen", 19), ("light left", 36)):
        parts.append(_text(_LEFT - 26, _BOTTOM + y, text, 12, soft, "end"))
    return "\n".join(parts)


def _draw_frame(frame: Mapping[str, Any], index: int, found: Mapping[str, Any], colours: Palette) -> str:
    """A digit as it was seen and brightened, both answers, and the error up to there."""
    pixels = np.frombuffer(bytes.fromhex(frame["pixels"]), dtype=np.uint8).astype(int)
    pixels = pixels.reshape(int(len(pixels) ** 0.5), -1)
    bright, beside = np.round(pixels * (255 / max(pixels.max(), 1))), 28 + _SIZE + 14
    parts = [
        f'<g class="f f{index}">',
        _text(28, 76, f"as seen, no. {frame['number']}", 12, colours.soft),
        _draw_pixels(pixels, 28, 84, _SIZE),
        _text(beside, 84 + _SIZE - _SMALL - 8, "brightened", 12, colours.soft),
        _draw_pixels(bright, beside, 84 + _SIZE - _SMALL, _SMALL),
    ]
    errors: dict[str, float] = {}
    for place, name in enumerate(("frozen", "adapting")):
        answer, bits = frame["answers"][name], found["wrong"][name][: frame["number"]][-found["window"] :]
        text = f"{name}: “{answer}” {'✓' if answer == frame['label'] else '✗'}"
        parts.append(_text(28, 84 + _SIZE + 32 + 26 * place, text, 18, getattr(colours, name), bold=True))
        errors[name] = 100 * bits.count("1") / len(bits)
    heights = {name: _y(error) + 5 for name, error in errors.items()}
    heights["frozen"] = min(heights["frozen"], heights["adapting"] - 17)  # never one on the other
    for name, error in errors.items():
        parts.append(_text(_RIGHT + 12, heights[name], f"{error:.0f}% {name}", 14, getattr(colours, name), bold=True))
    return "".join(parts) + "</g>\n"


def _draw_pixels(pixels: np.ndarray, left: int, top: int, size: int) -> str:
    """Grey pixels as one path for each of 64 levels, on black."""
    levels = np.round(pixels / 255 * 63).astype(int)
    parts = [f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="#000"/>']
    parts.append(f'<g transform="translate({left} {top}) scale({size / len(pixels):g})" shape-rendering="crispEdges">')
    for level in sorted({*levels.flat} - {0}):
        path = "".join(f"M{x} {y}h1v1h-1z" for y, x in zip(*np.nonzero(levels == level), strict=True))
        shade = f"{round(level * 255 / 63):02x}"
        parts.append(f'<path fill="#{shade * 3}" d="{path}"/>')
    return "".join(parts) + "</g>"


def _x(seen: float, count: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * seen / count


def _y(percent: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * percent / 100
