"""A Result as HTML for notebooks: status, metrics, curves as inline SVG, ranks. No script, no widget."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsdk.driver.result import Result

WIDTH, HEIGHT = 220, 60


def result_html(result: Result[Any]) -> str:
    """The whole of it."""
    head = f"<b>{html.escape(result.name)}</b> {result.status} on {len(result.ranks)} worker(s), {total(result)} s"
    curves = "".join(_cell(result, name) for name in result.history.names())
    ranks = "".join(
        f"<tr><td>{info.rank}</td><td>{html.escape(info.host)}</td><td>{info.device}</td>"
        f"<td>{html.escape(info.exit)}</td><td><code>{html.escape(info.log_path)}</code></td></tr>"
        for info in result.ranks
    )
    return (
        f"<div>{head}<table><tr>{curves}</tr></table>"
        f"<details><summary>ranks</summary><table>{ranks}</table></details>"
        f"<code>{html.escape(result.path)}</code></div>"
    )


def _cell(result: Result[Any], name: str) -> str:
    last = result.metrics.get(name, math.nan)
    return f"<td>{html.escape(name)}<br>{curve(result.history.column(name))}<br>{last:.4g}</td>"


def total(result: Result[Any]) -> str:
    """The run's seconds."""
    return f"{result.timings.get('total', 0.0):.1f}"


def curve(points: list[tuple[int, float]]) -> str:
    """A line through the finite points."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return ""
    xs, ys = _scaled([float(step) for step, _ in finite]), _scaled([value for _, value in finite])
    path = " ".join(f"{x * WIDTH:.1f},{HEIGHT - y * HEIGHT:.1f}" for x, y in zip(xs, ys, strict=True))
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}">'
        f'<polyline fill="none" stroke="currentColor" points="{path}"/></svg>'
    )


def _scaled(numbers: list[float]) -> list[float]:
    """To 0 .. 1; halved first, since the span of two floats may be none."""
    low, high = min(numbers) / 2, max(numbers) / 2
    return [(number / 2 - low) / ((high - low) or 1) for number in numbers]
