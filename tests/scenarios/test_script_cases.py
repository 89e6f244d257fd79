"""A decorated function works wherever a session can live: scripts of every kind, pytest, a shell, a notebook."""

from __future__ import annotations

import json
import sys
import zipapp
from pathlib import Path
from textwrap import dedent

import pytest

from tests.scenarios.programs import printed, ran, written

NO_GUARD = """
    print("START", flush=True)
    import distsdk

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        print("step on", distsdk.context().rank)
        return distsdk.context().rank

    print("END", train().values)
    """


def test_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": NO_GUARD})
    assert printed(["job.py"], tmp_path).splitlines() == ["START", "step on 0", "END [0, 1]"]
    (other,) = tmp_path.glob("distsdk_runs/*/logs/rank-1.log")
    assert other.read_text() == "step on 1\n"


NO_FILE = dedent("""
    import distsdk

    @distsdk.distributed(workers=2, gpu=False)
    def train(bad=False):
        if bad and distsdk.context().rank == 1:
            raise ValueError("no source file here")
        return distsdk.context().rank

    print(train().values)
    try:
        train(bad=True)
    except ValueError as error:
        print(error, error.__notes__[0].startswith("on rank 1 "), ":7 in train" in error.__notes__[0])
        print("line 7, in train" in str(error.__cause__))
    """)
EXECUTED = f"exec(compile({NO_FILE!r}, '<string>', 'exec'), {{'__name__': '__main__'}})"
FILELESS_WAYS = {"stdin": (["-"], NO_FILE), "-c": (["-c", NO_FILE], ""), "exec": (["-c", EXECUTED], "")}


@pytest.mark.parametrize("way", ["stdin", "-c", pytest.param("exec", marks=pytest.mark.slow)])
def test_program_without_a_file_runs_and_its_error_has_name_and_line(tmp_path: Path, way: str) -> None:
    arguments, stdin = FILELESS_WAYS[way]
    lines = printed(arguments, tmp_path, stdin).splitlines()
    assert lines == ["[0, 1]", "no source file here True True", "True"]


def test_modules_packed_in_a_zip_application(tmp_path: Path) -> None:
    app = written(tmp_path / "app", {
        "tools/__init__.py": "def increased(x): return x + 1",
        "__main__.py": """
            import distsdk
            from tools import increased

            @distsdk.distributed(workers=2, gpu=False)
            def train():
                import tools
                return increased(distsdk.context().rank), "app.pyz" in tools.__file__

            print(train().values)
            """,
    })  # fmt: skip
    zipapp.create_archive(app, tmp_path / "app.pyz")
    (tmp_path / "elsewhere").mkdir()
    assert printed([str(tmp_path / "app.pyz")], tmp_path / "elsewhere") == "[(1, True), (2, True)]\n"


PYTEST_PROJECT = {
    "project/tests/package/__init__.py": "",
    "project/tests/package/squares.py": """
        def sq(x):
            return x * x

        def check_large(x):
            assert x > 5, f"{x} is too small"
        """,
    "project/tests/package/test_it.py": """
        import distsdk
        import pytest
        from distsdk import distributed
        from .squares import check_large, sq

        @pytest.fixture
        def scale():
            return 3

        @distributed(workers=2, gpu=False)
        def train(k):
            return sq(distsdk.context().rank + 1) * k

        @distributed(workers=2, gpu=False)
        def failing():
            check_large(sq(distsdk.context().rank + 2))

        def test_values(scale, capsys):
            assert train(scale).values == [3, 12]

        def test_local_function():
            @distributed(workers=2, gpu=False)
            def inner():
                return sq(distsdk.context().rank + 2)

            assert inner().values == [4, 9]

        def test_that_fails_on_a_worker():
            failing()
        """,
}


PYTEST_RUNS = [
    ("importlib", ".", 0),
    *(
        pytest.param(*run, marks=pytest.mark.slow)
        for run in [("prepend", "project", 0), ("prepend", ".", 2), ("importlib", "project", 2)]
    ),
]


@pytest.mark.parametrize(("mode", "folder", "num_processes"), PYTEST_RUNS)
def test_pytest_module_with_relative_import(tmp_path: Path, mode: str, folder: str, num_processes: int) -> None:
    written(tmp_path, PYTEST_PROJECT)
    options = ["-p", "no:cacheprovider", f"--import-mode={mode}", f"-n{num_processes}"]
    ended = ran(["-m", "pytest", *options, str(tmp_path / "project")], tmp_path / folder)
    assert "2 passed" in ended.stdout and "1 failed" in ended.stdout, ended.stdout + ended.stderr
    assert "AssertionError: 4 is too small" in ended.stdout


CELLS = [
    "import distsdk\nfrom distsdk import distributed",
    "class Net:\n    width = 4",
    """@distributed(workers=2, gpu=False)
def train():
    print("hello from", distsdk.context().rank)
    return Net().width * (distsdk.context().rank + 1)""",
    "first = train().values",
    "class Net:\n    width = 5",
    "second = train().values",
    "print(first, second)",
]


@pytest.mark.slow
def test_interactive_shell_runs_the_newest_class(tmp_path: Path) -> None:
    script = f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        for cell in {CELLS!r}:
            shell.run_cell(cell).raise_error()
        """
    written(tmp_path, {"session.py": script})
    lines = printed(["session.py"], tmp_path).splitlines()
    assert lines == ["hello from 0", "hello from 0", "[4, 8] [5, 10]"]


MAIN_CLASS_JOB = """
    import distsdk
    STEP = 7

    class Item:
        def __init__(self, v):
            self.v = v

    @distsdk.distributed(workers=2, gpu=False)
    def train(item):
        assert isinstance(item, Item)
        return item.v + STEP + distsdk.context().rank

    print(train(Item(1)).values)
    """


def executed_notebook(folder: Path, cells: list[str]) -> list[list[str]]:
    """What each cell of a real notebook printed or showed, in its own output."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [[_shown(output) for output in cell.outputs] for cell in notebook.cells]


def _shown(output: dict[str, object]) -> str:
    data = output.get("data", {})
    assert isinstance(data, dict)
    return str(output.get("text") or data.get("text/html") or data.get("text/plain"))


NOTEBOOK_RUN = """
    import json, sys
    from pathlib import Path
    from tests.scenarios.test_script_cases import executed_notebook

    print(json.dumps(executed_notebook(Path.cwd(), json.loads(sys.stdin.read()))))
    """


def notebook_outputs(folder: Path, cells: list[str]) -> list[list[str]]:
    """As `executed_notebook`, in a process of its own: a notebook client leaves loops and sockets behind."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})\n{dedent(NOTEBOOK_RUN)}"
    return json.loads(printed(["-W", "ignore", "-c", code], folder, json.dumps(cells)).splitlines()[-1])


def test_notebook_runs_the_newest_class_and_prints_into_the_calling_cell(tmp_path: Path) -> None:
    outputs = notebook_outputs(tmp_path, [*CELLS, "(await train.aio()).values"])
    hello = ["hello from 0\n"]
    assert outputs == [[], [], [], hello, [], hello, ["[4, 8] [5, 10]\n"], [*hello, "[5, 10]"]]


def test_notebook_shows_a_live_line_and_a_result_and_runs_scripts(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": MAIN_CLASS_JOB})
    reporting = """import distsdk
@distsdk.distributed(workers=2, gpu=False)
def train():
    distsdk.report({"loss": 0.5})
train()"""
    ran_job, (line, result) = notebook_outputs(tmp_path, ["%run job.py", reporting])
    assert ran_job == ["[8, 9]\n"]
    assert "loss 0.5" in line
    assert "completed" in result


def test_reloaded_module_is_the_one_that_workers_run(tmp_path: Path) -> None:
    script = """
        import importlib, os, pathlib
        import recipe
        from distsdk import distributed

        @distributed(workers=2, gpu=False)
        def train():
            return recipe.go()

        first = train().values
        file = pathlib.Path("recipe.py")
        file.write_text("def go(): return 'b'")
        os.utime(file, (file.stat().st_mtime + 5,) * 2)
        importlib.reload(recipe)
        print(first, train().values)
        """
    written(tmp_path, {"job.py": script, "recipe.py": "def go(): return 'a'"})
    assert printed(["job.py"], tmp_path) == "['a', 'a'] ['b', 'b']\n"


RUNNERS = {
    "runpy": ["-c", "import runpy; runpy.run_path('job.py', run_name='__main__')"],
    "runpy-in-a-script": ["outer.py"],
    "%run": ["-m", "IPython", "--colors=nocolor", "-c", "%run job.py"],
}


@pytest.mark.parametrize(
    "runner", ["runpy", *(pytest.param(each, marks=pytest.mark.slow) for each in list(RUNNERS)[1:])]
)
def test_runner_that_replaces_the_main_module(tmp_path: Path, runner: str) -> None:
    outer = "import runpy\nrunpy.run_path('job.py', run_name='__main__')"
    written(tmp_path, {"job.py": MAIN_CLASS_JOB, "outer.py": outer})
    assert printed(RUNNERS[runner], tmp_path).splitlines() == ["[8, 9]"]


def test_module_of_a_package_started_with_m(tmp_path: Path) -> None:
    job = """
        import argparse, sys
        import distsdk
        from .bases import base

        def options():
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float)
            parser.add_argument("rest", nargs="*")
            return parser.parse_args()

        @distsdk.distributed(workers=2, gpu=False)
        def train():
            return base() + distsdk.context().rank + options().lr, sys.argv[1:]

        print(train().values)
        """
    written(tmp_path, {"package/__init__.py": "", "package/bases.py": "def base(): return 10", "package/job.py": job})
    arguments = ["--lr", "0.5", "--", "x"]
    expected = [(10.5, arguments), (11.5, arguments)]
    assert printed(["-m", "package.job", *arguments], tmp_path) == f"{expected}\n"


def test_script_of_a_virtual_environment_uses_its_interpreter(tmp_path: Path) -> None:
    script = """
        import sys
        from distsdk import distributed

        @distributed(workers=2, gpu=False)
        def train():
            return sys.executable, sys.prefix

        print(train().values == [(sys.executable, sys.prefix)] * 2, sys.executable)
        """
    written(tmp_path, {"job.py": script})
    assert printed(["job.py"], tmp_path) == f"True {sys.executable}\n"


UNGUARDED_SPAWN = """
    from torch.utils.data import DataLoader, Dataset
    from distsdk import distributed

    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return float(i)

    @distributed(workers=2, gpu=False)
    def train():
        loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
        return float(next(iter(loader)).sum())

    train()
    """


@pytest.mark.slow
def test_script_run_again_by_a_loader_process_starts_no_run_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": UNGUARDED_SPAWN})
    ended = ran(["job.py"], tmp_path)
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr
    assert len(list(tmp_path.glob("distsdk_runs/*"))) == 1


SPAWNED_DRIVER = """
    import multiprocessing
    from distsdk import distributed

    class Base:
        def value(self):
            return 1

    class Sub(Base):
        def value(self):
            return super().value() + 1

    @distributed(workers=2, gpu=False)
    def train(item):
        assert isinstance(item, Sub)
        return item.value(), item

    def drive():
        values = train(Sub()).values
        print([number for number, _ in values], type(values[1][1]) is Sub, flush=True)

    if __name__ == "__main__":
        process = multiprocessing.get_context({method!r}).Process(target=drive, daemon=True)
        process.start()
        process.join()
        assert process.exitcode == 0
    """


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_driver_that_multiprocessing_started(tmp_path: Path, method: str) -> None:
    written(tmp_path, {"job.py": SPAWNED_DRIVER.format(method=method)})
    assert printed(["job.py"], tmp_path) == "[2, 2] True\n"
