"""From looks at the ranks, taken now and then, to findings: a certain hang, a long wait, a standstill. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distsdk.driver.hang import Scene, position, verdict, where
from distsdk.driver.root_cause import ranks_named
from distsdk.driver.stacks import shown
from distsdk.wire.messages import Inspected, Progress

EVERY_S = 1.0
"""From look to look. While all ranks go on, only their agents are asked."""
SOON_S = 0.5
"""To the next look when there may be a hang."""
RARELY_S = 3.0
"""To the next look, at most, when ranks stand still and there is no hang."""
IDLE_SHARE = 0.05
"""A rank that has used less than this share of a processor's time is idle. Each thread that waits for the interpreter's
lock, which wakes up 200 times a second, uses 0.005 (seen on an idle machine) to 0.01 of one."""


@dataclass(frozen=True)
class Finding:
    """What a look has shown. kind: "hang" (certain), "stall" (nothing has moved for too long), "warning", or "".
    Without a text it is to be told by the next look, which is to bring all stacks."""

    kind: str = ""
    text: str = ""


@dataclass
class _Track:
    """Where one rank was when it moved last, and what its processor time says."""

    progress: Progress
    done: dict[str, int] | None
    """None: it was not asked yet."""
    since_s: float
    cpu_s: float
    looked_s: float
    busy_s: float
    """When it was seen last to use the processor."""
    has_warned: bool = False

    def move(self, progress: Progress, done: dict[str, int] | None, now_s: float) -> bool:
        """Take in where the rank is; False when that is where it was."""
        has_moved = progress != self.progress or (None not in (done, self.done) and done != self.done)
        self.progress, self.done = progress, self.done if done is None else done
        if has_moved:
            self.since_s, self.has_warned = now_s, False
        return has_moved

    def use(self, cpu_s: float, now_s: float) -> None:
        """Take in its processor time."""
        if cpu_s - self.cpu_s > IDLE_SHARE * max(now_s - self.looked_s, 1.0):
            self.busy_s = now_s
        self.cpu_s, self.looked_s = cpu_s, now_s


@dataclass
class Watch:
    """What was seen before, by which a look is judged."""

    stall_warn: float | None
    stall_timeout: float | None
    moved_s: float
    """When any rank was seen to move, or heard, last."""
    _latest: object = None
    """Position at the last deep look."""
    _tracks: dict[int, _Track] = field(default_factory=dict)
    _delay_s: float = EVERY_S

    def on_output(self, now_s: float) -> None:
        """A rank has printed or reported something."""
        self.moved_s = now_s

    def next_delay_s(self, finding: Finding, scene: Scene) -> float:
        """Until the next look."""
        if verdict(scene):
            return SOON_S
        self._delay_s = min(RARELY_S, self._delay_s * 1.5) if not finding.kind else EVERY_S
        return self._within_limits(self._delay_s)

    @property
    def every_s(self) -> float:
        """From look to look while all go on."""
        return self._within_limits(EVERY_S)

    def _within_limits(self, delay_s: float) -> float:
        return min([delay_s, *(limit / 4 for limit in (self.stall_warn, self.stall_timeout) if limit is not None)])

    def all_move(self, seen: Mapping[int, Inspected], now_s: float) -> bool:
        """Take in what the agents see; False when a rank has not moved since the last look and has to be asked."""
        moving = [rank for rank, inspected in seen.items() if self._note(rank, inspected, None, now_s)]
        return len(moving) == len(seen)

    def _note(self, rank: int, inspected: Inspected, done: dict[str, int] | None, now_s: float) -> bool:
        """True when the rank has gone on since it was seen last."""
        track = self._tracks.get(rank)
        if track is None:
            self._tracks[rank] = _Track(inspected.progress, done, now_s, inspected.cpu_s, now_s, now_s)
        elif not track.move(inspected.progress, done, now_s):
            track.use(inspected.cpu_s, now_s)
            return False
        self._tracks[rank].use(inspected.cpu_s, now_s)
        self.moved_s = now_s
        return True

    def judged(self, scene: Scene, now_s: float, *, is_final: bool = True) -> Finding:
        """Judge what the ranks have said about themselves. is_final=False: when there is something to tell, another
        look is to be taken first."""
        here = position(scene)
        has_moved, self._latest = here != self._latest, here
        for rank, inspected in scene.seen.items():
            self._note(rank, inspected, inspected.done if inspected.has_answered else None, now_s)
        if not has_moved and (text := verdict(scene)):
            return Finding("hang", text if is_final else "")
        if self._stands_too_long(scene, now_s):
            return Finding("stall", self._stall_sentence(scene, now_s) if is_final else "")
        return self._warning(scene, now_s, is_final)

    def _are_idle(self, scene: Scene, limit_s: float, now_s: float) -> bool:
        """True when no live rank was seen to use the processor for so long."""
        tracks = [self._tracks[rank] for rank in scene.live() if rank in self._tracks]
        return all(now_s - track.busy_s >= limit_s for track in tracks)

    def _stands_too_long(self, scene: Scene, now_s: float) -> bool:
        limit = self.stall_timeout
        if limit is None or now_s - self.moved_s < limit:
            return False
        return bool(scene.waiting()) or self._are_idle(scene, limit, now_s)

    def _stall_sentence(self, scene: Scene, now_s: float) -> str:
        return (
            f"no rank has made a step, a report, a collective or a line of output for {now_s - self.moved_s:.0f} s "
            f"(stall_timeout={self.stall_timeout:g}): {where(scene, range(scene.num_ranks))}. If a rank needs so long, "
            "give a longer stall_timeout, or None."
        )

    def _warning(self, scene: Scene, now_s: float, is_final: bool) -> Finding:
        """Once for each wait of a rank; once for a standstill of all."""
        limit = self.stall_warn
        if limit is None:
            return Finding()
        waiting = scene.waiting()
        are_idle = not waiting and self._are_idle(scene, limit, now_s)
        standing = [rank for rank in scene.live() if rank in self._tracks] if are_idle else []
        long = [rank for rank in waiting or standing if now_s - self._tracks[rank].since_s >= limit]
        if all(self._tracks[rank].has_warned for rank in long):
            return Finding()
        if not is_final:
            return Finding("warning")
        for rank in long:
            self._tracks[rank].has_warned = True
        what = "waited for others" if waiting else "done nothing"
        head = f"{ranks_named(long)} {'have' if len(long) > 1 else 'has'} {what} for {limit:g} s"
        places = where(scene, range(scene.num_ranks))
        return Finding("warning", "\n".join([f"{head}: {places}.", *stack_lines(scene)]))


def stack_lines(scene: Scene) -> list[str]:
    """The main threads' stacks as lines of text, equal ones once."""
    by_stack: dict[tuple[str, ...], list[int]] = {}
    for rank, inspected in sorted(scene.seen.items()):
        if rank not in scene.outcomes and (lines := shown(inspected.stack)):
            by_stack.setdefault(tuple(lines), []).append(rank)
    return [
        line
        for lines, ranks in by_stack.items()
        for line in (f"stack of {ranks_named(ranks)}, innermost first:", *(f"    {text}" for text in lines))
    ]
