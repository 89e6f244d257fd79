"""The README's example is true: it runs as it stands and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def block(language: str) -> str:
    """The README's first block in `language`."""
    found = re.search(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"README.md has no block in {language}"
    return found[1]


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block("python"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, block("text"))


def test_the_example_has_15_lines() -> None:
    assert sum(bool(line.strip()) for line in block("python").splitlines()) == 15
