"""Who is said to wait for ever: compared with a model that tries it out, and the sentences about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distsdk.driver.hang import Scene, last_collectives, named, position, stuck, verdict, where
from distsdk.wire.messages import GRADIENTS, Inspected, Outcome, Parcel, Progress, Returned, Stopped, Wait
from tests.driver.collectives import Compute, Enter, Entry, Leave, Model, Move, call

RETURNED = Returned(Parcel(0, b""))
A, B, C = Entry(0), Entry(1), Entry(2)

# the model against `stuck`

Step = Entry | tuple[int, int, int] | None
"""A collective; a message (group, from, to); a computation."""


@st.composite
def models(draw: Any, *, edits: int, messages: bool = False, overlap: bool = False) -> Model:
    """Ranks that run the same collectives in the same order, but for `edits` changes at most. messages: some send to
    others. overlap: some collectives are begun and waited for at the end."""
    everyone = tuple(range(draw(st.integers(2, 4))))
    subsets = st.sets(st.sampled_from(everyone), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
    groups = (everyone, *draw(st.lists(subsets, max_size=2)))
    entries = st.builds(Entry, st.integers(0, len(groups) - 1), st.sampled_from(["all_reduce", "all_gather"]))
    pairs = st.permutations(everyone).map(lambda order: (0, order[0], order[1]))
    step = st.one_of(entries, entries, pairs if messages else entries, st.none())
    steps = draw(st.lists(step, min_size=1, max_size=5))
    programs = []
    for rank in everyone:
        own = [step for step in steps if _takes_part(rank, step, groups)]
        for _ in range(draw(st.integers(0, edits))):
            own = _edited(own, draw(st.integers(0, 5)), draw(st.sampled_from(["drop", "swap", "end", "op", "size"])))
        waits_at_once = [not (overlap and draw(st.booleans())) for _ in own]
        programs.append(_moves(rank, own, waits_at_once))
    return Model(tuple(programs), groups)


def _takes_part(rank: int, step: Step, groups: tuple[tuple[int, ...], ...]) -> bool:
    if step is None:
        return True
    return rank in (groups[step.group] if isinstance(step, Entry) else step[1:])


def _edited(steps: list[Step], i: int, kind: str) -> list[Step]:
    if i >= len(steps):
        return steps
    if kind == "end":
        return steps[:i]
    if kind == "swap":
        return [*steps[:i], *reversed(steps[i : i + 2]), *steps[i + 2 :]]
    step = steps[i]
    if kind == "drop" or not isinstance(step, Entry):
        return steps[:i] + steps[i + 1 :]
    return [*steps[:i], replace(step, op="barrier") if kind == "op" else replace(step, sizes="[[2]]"), *steps[i + 1 :]]


def _moves(rank: int, steps: list[Step], waits_at_once: list[bool]) -> tuple[Move, ...]:
    made: list[Move] = []
    for step, waits in zip(steps, waits_at_once, strict=True):
        if step is None:
            made.append(Compute())
            continue
        if not isinstance(step, Entry):
            group, source, target = step
            step = Entry(group, "send", peer=target) if rank == source else Entry(group, "recv", peer=source)
        made.extend(call(step) if waits else [Enter(step)])
    return (*made, *([] if all(waits_at_once) else [Leave(all=True)]))


def assert_right_everywhere(model: Model) -> None:
    """In every state: nobody is named who makes another move, whatever the order. At the end: all who never end are,
    unless one is in a message, since it is not known to whom."""
    for state in model.states():
        for rank in stuck(model.scene(state)):
            assert rank in model.deadlocked and state[rank] == model.last_state[rank], (state, model)
    last = model.scene(model.last_state)
    if not any(wait.is_p2p for rank in last.live() for wait in last.waits_of(rank)):
        assert stuck(last) == model.deadlocked




@settings(max_examples=150)
@given(model=models(edits=1))
def test_as_by_trying_out(model: Model) -> None:
    assert_right_everywhere(model)


@settings(max_examples=100)
@given(model=models(edits=1, messages=True))
def test_as_by_trying_out_with_messages(model: Model) -> None:
    assert_right_everywhere(model)


@settings(max_examples=100)
@given(model=models(edits=1, messages=True, overlap=True))
def test_as_by_trying_out_with_work_under_way(model: Model) -> None:
    assert_right_everywhere(model)


@settings(max_examples=80)
@given(model=models(edits=0, messages=True, overlap=True), on_gpu=st.booleans())
def test_ranks_that_do_the_same_are_never_named(model: Model, on_gpu: bool) -> None:
    """Also on a GPU, where the main thread is ahead of the collectives."""
    assert model.deadlocked == []
    for state in model.states():
        assert stuck(model.scene(state, on_gpu)) == [] and verdict(model.scene(state, on_gpu)) == ""


@settings(max_examples=100)
@given(model=models(edits=1), silent=st.sets(st.integers(0, 3)), unasked=st.sets(st.integers(0, 3)))
def test_of_those_who_say_nothing_nothing_is_claimed(model: Model, silent: set[int], unasked: set[int]) -> None:
    """Ranks whose process is not there, and ranks that have not answered: fewer are named, none wrongly."""
    for state in model.states():
        whole = model.scene(state)
        plain = {rank: Inspected(0, rank, 1) if rank in unasked else seen for rank, seen in whole.seen.items()}
        seen = {rank: inspected for rank, inspected in plain.items() if rank not in silent}
        part = stuck(replace(whole, seen=seen))
        assert set(part) <= set(stuck(whole)) - silent - unasked


def test_a_healthy_program_with_work_under_way() -> None:
    """Rank 0 has begun A with rank 1, and is in B with rank 2, who computes. Rank 1 is already in C, to which rank 0
    comes after B; then both finish A."""
    zero = (Enter(A), *call(B), *call(C), Leave(all=True))
    model = Model((zero, (*call(C), *call(A)), (Compute(), *call(B))), ((0, 1), (0, 2), (0, 1)))
    assert model.deadlocked == []
    assert stuck(model.scene((2, 1, 0))) == []


# cases by hand


def seen(
    rank: int, *waits: Wait, done: int = 0, is_blocked: bool | None = None, has_answered: bool = True, **more: Any
) -> Inspected:
    blocked = bool(waits) if is_blocked is None else is_blocked
    return Inspected(0, rank, 1, list(waits), {"0": done}, blocked, has_answered=has_answered, **more)


def scene(*inspected: Inspected, ended: dict[int, Outcome] | None = None, on_gpu: bool = False) -> Scene:
    outcomes = ended or {}
    ranks = {one.rank for one in inspected} | set(outcomes)
    return Scene({one.rank: one for one in inspected}, outcomes, max(ranks) + 1, on_gpu)


def wait(seq: int = 1, op: str = "all_reduce", ranks: tuple[int, ...] = (0, 1), **more: Any) -> Wait:
    return Wait(op, more.pop("group", "0"), seq, list(ranks), **more)


def test_one_that_has_ended_without_coming() -> None:
    assert stuck(scene(seen(0, wait(3), done=3), seen(1, done=2), ended={1: RETURNED})) == [0]


def test_one_that_has_ended_after_coming() -> None:
    """Its part is sent; the collective is as good as over."""
    assert stuck(scene(seen(0, wait(3), done=3), seen(1, done=3), ended={1: RETURNED})) == []


def test_one_that_has_ended_and_is_gone() -> None:
    assert stuck(scene(seen(0, wait(3), done=3), ended={1: RETURNED})) == []


def test_a_group_without_the_one_that_has_ended() -> None:
    inner = wait(1, ranks=(0, 1), group="7")
    assert stuck(scene(seen(0, inner), seen(1), seen(2), ended={2: RETURNED})) == []


def test_stuck_behind_one_that_is_stuck() -> None:
    inner = wait(1, ranks=(1, 2), group="7")
    outer = wait(1, ranks=(0, 1, 2, 3))
    zero, one, three = seen(0, outer, done=1), seen(1, inner, done=0), seen(3)
    assert stuck(scene(zero, one, seen(2), three, ended={2: RETURNED})) == [0, 1]


@pytest.mark.parametrize(("one", "other", "clashes"), [
    (wait(1), wait(1), False),
    (wait(1, "all_reduce"), wait(1, "barrier"), True),
    (wait(1, num_elements=4), wait(1, num_elements=5), True),
    (wait(1, sizes="[[4]]", num_elements=4), wait(1, sizes="[[2, 2]]", num_elements=4), False),
    (wait(1, num_elements=4), wait(1), False),
    (wait(1, "broadcast", num_elements=4), wait(1, "broadcast", num_elements=5), True),
    (wait(1, "all_gather", num_elements=4), wait(1, "all_gather", num_elements=5), False),
])  # fmt: skip
def test_collectives_that_do_not_match(one: Wait, other: Wait, clashes: bool) -> None:
    assert stuck(scene(seen(0, one, done=1), seen(1, other, done=1))) == ([0, 1] if clashes else [])


def test_messages() -> None:
    """Who is at the other end is not known: any member of the group may be."""
    ask = wait(1, "recv", (0, 1, 2), is_p2p=True)
    assert stuck(scene(seen(0, ask), seen(1), seen(2))) == []
    assert stuck(scene(seen(0, ask), seen(1), seen(2), ended={1: RETURNED})) == []
    assert stuck(scene(seen(0, ask), seen(1), seen(2), ended={1: RETURNED, 2: RETURNED})) == [0]
    assert stuck(scene(seen(0, ask), seen(1, ask), seen(2, ask))) == [0, 1, 2]


def test_messages_are_counted_by_themselves() -> None:
    """Rank 0 sends to rank 1, which is not there yet; rank 2 is ahead."""
    send, collective = wait(1, "send", (0, 1, 2), is_p2p=True), wait(1, ranks=(0, 1, 2))
    assert stuck(scene(seen(0, send), seen(1), seen(2, collective, done=1))) == []


def test_gradients_say_themselves_who_is_missing() -> None:
    gradients = Wait(GRADIENTS, "gradients", 4, [0, 1, 2], needs=[1])
    assert stuck(scene(seen(0, gradients), seen(1), seen(2, gradients))) == []
    assert stuck(scene(seen(0, gradients), seen(1), seen(2, gradients), ended={1: RETURNED})) == [0, 2]
    assert stuck(scene(seen(0, structs.replace(gradients, needs=[])), seen(1), seen(2), ended={1: RETURNED})) == []


def test_the_store() -> None:
    asks = Wait("the exchange of 'order'", "store", 1, [0, 1, 2], needs=[0])
    assert stuck(scene(seen(0), seen(1, asks), seen(2, asks))) == []
    assert stuck(scene(seen(0), seen(1, asks), seen(2), ended={0: RETURNED})) == [1]


def test_different_things_from_the_store() -> None:
    one, other = (Wait(f"the exchange of {what!r}", "store", 1, [0, 1, 2], needs=[0]) for what in ("a", "b"))
    assert stuck(scene(seen(0), seen(1, one), seen(2, other))) == []


def test_work_under_way_does_not_hold_up_a_main_thread_that_goes_on() -> None:
    zero, one = seen(0, wait(3), done=3, is_blocked=False), seen(1, done=2)
    assert stuck(scene(zero, one, ended={1: RETURNED})) == []
    assert stuck(scene(zero, one, ended={1: RETURNED}, on_gpu=True)) == [0]  # there it waits outside of our sight


def test_a_rank_in_native_code_may_go_on() -> None:
    assert stuck(scene(seen(0, wait(3), done=3), seen(1, has_answered=False))) == []


def test_all_have_ended() -> None:
    assert stuck(scene(ended={0: RETURNED, 1: RETURNED})) == []


def test_position_is_equal_only_when_nothing_has_moved() -> None:
    before = scene(seen(0, wait(3), done=3), seen(1, done=2))
    assert position(before) == position(scene(seen(0, wait(3), done=3), seen(1, done=2)))
    for moved in (
        seen(1, done=3),
        seen(1, wait(3), done=2),
        seen(1, done=2, is_blocked=True),
        seen(1, done=2, progress=Progress(batches=1)),
    ):
        assert position(scene(seen(0, wait(3), done=3), moved)) != position(before)
    assert position(scene(seen(0, wait(3), done=3), seen(1, done=2, cpu_s=9.0, stack="x"))) == position(before)


# the sentences

STACK = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in train\n'


def test_sentence_about_one_that_has_returned() -> None:
    three = [seen(0, wait(3, ranks=(0, 1, 2)), done=3, stack=STACK), seen(2, wait(3, ranks=(0, 1, 2)), done=3)]
    text = verdict(scene(*three, seen(1, done=2, progress=Progress(steps=2)), ended={1: RETURNED}))
    assert text.startswith(
        "rank 1 has returned after 2 optimizer steps, and ranks 0, 2 wait for it in all_reduce "
        "(/home/me/train.py:12 in train). "
    )


@pytest.mark.parametrize(("outcome", "progress", "how"), [
    (RETURNED, Progress(), "returned"),
    (RETURNED, Progress(steps=1), "returned after 1 optimizer step"),
    (RETURNED, Progress(backwards=2), "returned after 2 backward(s)"),
    (Returned(Parcel(0, b""), by_exit=True), Progress(), "ended by sys.exit"),
    (Stopped(), Progress(steps=3), "stopped after 3 optimizer steps"),
])  # fmt: skip
def test_sentences_about_ends(outcome: Outcome, progress: Progress, how: str) -> None:
    text = verdict(scene(seen(0, wait(3), done=3), seen(1, progress=progress), ended={1: outcome}))
    assert text.startswith(f"rank 1 has {how}, and rank 0 waits for it in all_reduce. ")


def test_sentence_about_a_mismatch() -> None:
    text = verdict(scene(seen(0, wait(1), done=1, stack=STACK), seen(1, wait(1, "barrier"), done=1)))
    assert "cannot match" in text
    assert "rank 0 waits in all_reduce at /home/me/train.py:12 in train; rank 1 waits in barrier" in text


@pytest.mark.parametrize(("one", "text"), [
    (wait(2), "all_reduce"),
    (wait(2, sizes="[[4, 8]]"), "all_reduce of size [4, 8]"),
    (wait(1, "barrier", sizes="[]"), "barrier"),
    (wait(2, group="7", ranks=(0, 1, 2)), "all_reduce of the group of ranks 0-2"),
    (Wait(GRADIENTS, "gradients", 4, [0, 1]), "the averaging of gradients in a backward"),
    (Wait("the exchange of 'order'", "store", 1, [0, 1]), "the exchange of 'order'"),
])  # fmt: skip
def test_names_of_collectives(one: Wait, text: str) -> None:
    assert named(one) == text


def test_where() -> None:
    several = scene(
        seen(0, wait(1), done=1, stack=STACK),
        seen(1, stack=STACK),
        seen(2, state="T"),
        seen(3, has_answered=False, state="R"),
        seen(4),
        ended={5: RETURNED, 6: Stopped()},
    )
    assert where(replace(several, num_ranks=8), range(8)).split("; ") == [
        "rank 0 waits in all_reduce at /home/me/train.py:12 in train",
        "rank 1 is at /home/me/train.py:12 in train",
        "rank 2 is stopped by SIGSTOP (`kill -CONT 0` lets it go on)",
        "rank 3 is in native code that holds the interpreter",
        "rank 4 is outside of collectives",
        "rank 5 has returned",
        "rank 6 has stopped",
        "rank 7 did not say where it is",
    ]


def test_last_collectives() -> None:
    counts = Inspected(0, 1, 1, done={"0": 3, "gradients": 2, "7": 0, "8": 1}, has_answered=True)
    assert last_collectives(scene(seen(0, wait(4), done=4), counts, seen(2))) == {
        0: "all_reduce (number 4)",
        1: "3 in the default group; 2 in backwards; 1 in group 8",
        2: "none",
    }
