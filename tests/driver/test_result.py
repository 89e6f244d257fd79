from __future__ import annotations

import html.parser
import json
import math
from pathlib import Path
from typing import Any

import pytest

from distsdk import CheckpointError, Result
from distsdk.driver.result import HistoryTable, RankInfo
from distsdk.driver.run import mean_of_mappings
from distsdk.wire.blackbox import Counters
from tests.storage import flaky

ROWS = [{"step": 0, "loss": 1.0, "acc": 0.5}, {"step": 2, "loss": 0.5}]


def result(tmp_path: Path, **changes: Any) -> Result[Any]:
    made: dict[str, Any] = {
        "status": "completed",
        "path": str(tmp_path),
        "values": [1, {"a": (2,)}],
        "metrics": {"loss": 0.5},
        "history": HistoryTable(ROWS),
        "ranks": [
            RankInfo(rank, "host", 10 + rank, "cpu", "returned", f"/logs/{rank}", {"loss": 0.5}) for rank in range(2)
        ],
        "name": "train",
        "seed": 7,
        "timings": {"start": 0.1, "run": 1.0, "total": 1.1},
        "checkpoint_names": ["step-000002"],
    }
    return Result(**{**made, **changes})


def saved(tmp_path: Path, **changes: Any) -> Result[Any]:
    made = result(tmp_path, **changes)
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.history))
    made.save()
    return made


def test_load_gives_what_was_saved(tmp_path: Path) -> None:
    made = saved(tmp_path)
    assert Result.load(tmp_path, trusted=True) == made
    assert Result.load(str(tmp_path)).values == [None, None]


def test_untrusted_load_runs_no_code(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "values.pkl").write_bytes(b"cposix\nabort\n(tR.")
    assert Result.load(tmp_path).metrics == {"loss": 0.5}


def at_url(path: Path, rest: str = "") -> str:
    return f"{flaky.FlakyFileSystem.protocol}://{path}{rest}"


def test_damaged_checkpoints_are_left_out(tmp_path: Path) -> None:
    saved(tmp_path, checkpoint_names=["step-000001", "step-000002", "step-000003"])
    files: dict[str, Any] = {}
    manifest = {"step": 1, "metrics": {}, "world_size": 1, "needs_trust": {}, "files": files}
    contents = {"step-000001": json.dumps(manifest), "step-000002": "[]", "step-000003": json.dumps(manifest)}
    for name, content in contents.items():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text(content)
    (tmp_path / "run.json").write_text(json.dumps({"name": "train", "seed": 1, "workers": 2}))
    assert Result.load(tmp_path).checkpoint_names == ["step-000001", "step-000003"]
    assert Result.load(at_url(tmp_path)).checkpoint_names == ["step-000001", "step-000003"]
    (tmp_path / "result.json").unlink()
    assert Result.load(tmp_path).checkpoint_names == ["step-000001", "step-000003"]
    assert Result.load(at_url(tmp_path)).checkpoint_names == ["step-000001", "step-000003"]


WRONG = [
    ("status", 3), ("metrics", {"x": "y"}), ("ranks", {}), ("ranks", [{}]), ("ranks", ["x"]), ("ranks", None),
    ("attempts", [{"number": "0", "status": ""}]), ("attempts", [{"number": 0, "status": "", "who": 1}]),
    ("error", 3), ("timings", []), ("checkpoints", "step-1"), ("checkpoints", ["../x"]), ("seed", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_record_of_the_wrong_types(field: str, value: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    record = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**record, field: value}))
    for place in (str(tmp_path), at_url(tmp_path)):
        with pytest.raises(CheckpointError, match=rf"^{place}/result.json is damaged: .*Remove it to load"):
            Result.load(place)


@pytest.mark.parametrize("content", [b"", b'{"status": "comp', b"[]", b"null", b"\xff", b"{}"])
def test_torn_records(content: bytes, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/result.json is damaged: .*Remove it to load"):
        Result.load(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/run.json is damaged: .*Checkpoint\("):
        Result.load(tmp_path)


def test_error_is_kept_as_text(tmp_path: Path) -> None:
    saved(tmp_path, status="failed", error=ValueError("bad"))
    loaded = Result.load(tmp_path)
    assert (loaded.status, str(loaded.error)) == ("failed", "ValueError: bad")


def test_nan_and_inf_survive(tmp_path: Path) -> None:
    saved(
        tmp_path,
        metrics={"x": math.nan, "y": -math.inf},
        history=HistoryTable([{"step": 0, "x": math.nan, "y": -math.inf}]),
    )
    loaded = Result.load(tmp_path)
    assert math.isnan(loaded.metrics["x"]) and loaded.metrics["y"] == -math.inf
    assert math.isnan(loaded.history[0]["x"])


def test_values_that_do_not_pickle_any_more(tmp_path: Path) -> None:
    import threading

    saved(tmp_path, values=[threading.Lock(), 1])
    assert Result.load(tmp_path, trusted=True).values == [None, None]


def test_torn_last_line_of_the_history(tmp_path: Path) -> None:
    saved(tmp_path)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert list(Result.load(tmp_path).history) == ROWS


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_folder_without_a_finished_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointError, match="holds no run: there is no run.json"):
        Result.load(tmp_path / place)


def test_frozen(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        result(tmp_path).status = "x"  # type: ignore[misc]


def test_value_and_checkpoints(tmp_path: Path) -> None:
    made = result(tmp_path)
    assert made.value == 1
    assert made.checkpoint.path == str(tmp_path / "checkpoints" / "step-000002")
    assert result(tmp_path, values=[], checkpoint_names=[]).value is None
    assert result(tmp_path, checkpoint_names=[]).checkpoint is None


def test_load_into_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="saved no checkpoint"):
        result(tmp_path, checkpoint_names=[]).load_into(None)


def test_load_into(tmp_path: Path) -> None:
    import torch

    from distsdk.worker.context import Context
    from distsdk.worker.saving import Saver

    trained, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    saver = Saver(Context(run_dir=str(tmp_path)), Counters(), lambda message: None)
    saver.save(2, {"net": trained}, {})
    saver.wait()
    made = result(tmp_path, checkpoint_names=["step-000002"])
    assert made.load_into(fresh, key="net") is fresh
    assert torch.equal(fresh.weight, trained.weight)
    with pytest.raises(CheckpointError, match=r"has no 'model': it has \['net'\]"):
        made.load_into(fresh)


def test_history_is_a_sequence() -> None:
    table = HistoryTable(ROWS)
    assert (len(table), table[-1], table[:1], list(table)) == (2, ROWS[1], ROWS[:1], ROWS)
    assert (
        table.column("loss") == [(0, 1.0), (2, 0.5)] and table.column("acc") == [(0, 0.5)] and table.column("x") == []
    )
    assert table.names() == ["loss", "acc"]
    assert table == ROWS and table == HistoryTable(list(ROWS)) and table != HistoryTable([])
    assert table != 3


def test_to_pandas() -> None:
    pytest.importorskip("pandas")
    frame = HistoryTable(ROWS).to_pandas()
    assert list(frame.columns) == ["step", "loss", "acc"]
    assert frame["loss"].tolist() == [1.0, 0.5] and math.isnan(frame["acc"][1])


def test_repr(tmp_path: Path) -> None:
    assert repr(result(tmp_path)) == f"<Result completed of train on 2 worker(s): loss=0.5; {tmp_path}>"
    assert "no metrics" in repr(result(tmp_path, metrics={}))


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("br", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "polyline":
            assert self.open.pop() == tag


def tags_of(text: str) -> list[str]:
    parser = Tags()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.seen


def test_html_is_well_formed_and_has_a_curve_for_each_metric(tmp_path: Path) -> None:
    seen = tags_of(result(tmp_path)._repr_html_())
    assert seen.count("svg") == 2
    assert "script" not in seen


def test_html_escapes_the_users_names(tmp_path: Path) -> None:
    rows = [{"step": 0, "<script>a": 1.0}]
    text = result(tmp_path, name="<script>x", history=HistoryTable(rows), status="failed")._repr_html_()
    assert "script" not in tags_of(text)
    assert "&lt;script&gt;x" in text and "&lt;script&gt;a" in text


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 1.0], [math.nan, math.inf], [1.0, math.nan, 2.0], [1e308, -1e308], [5e-324, 0.0]]
)
def test_html_of_odd_curves(tmp_path: Path, values: list[float]) -> None:
    rows = [{"step": step, "x": value} for step, value in enumerate(values)]
    text = result(tmp_path, history=HistoryTable(rows), metrics={})._repr_html_()
    points = text.partition('points="')[2].partition('"')[0].split()
    assert len(points) == sum(map(math.isfinite, values))
    assert all(
        math.isfinite(float(number)) and -1 <= float(number) <= 221 for point in points for number in point.split(",")
    )


@pytest.mark.parametrize(("values", "means"), [
    ([{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}], {"a": 2.0, "b": 3.0}),
    ([{"a": True}], {"a": 1.0}),
    ([{"a": 1}, {"b": 1}], {}),
    ([{"a": 1}, None], {}),
    ([{"a": "x"}], {}), ([{1: 1}], {"1": 1.0}), ([3, 4], {}), ([], {}), ([{}], {}),
])  # fmt: skip
def test_mean_of_returned_mappings(values: list[Any], means: dict[str, float]) -> None:
    assert mean_of_mappings(values) == means


@pytest.mark.parametrize("numbers", [(math.inf, -math.inf), (1.7e308, 1.7e308), (10**400, 1), (math.nan, 1.0)])
def test_mean_of_returned_mappings_never_raises(numbers: tuple[float, float]) -> None:
    """A diverged training still has a Result."""
    assert not mean_of_mappings([{"a": number} for number in numbers]).get("a", 0) == 1
