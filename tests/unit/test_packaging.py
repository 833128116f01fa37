"""One set of versions in three files, a light import, and a package that holds what it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


def requirements() -> set[str]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return {name_of(r) for group in groups for r in group} - {"labkit"}


def test_every_dependency_has_a_tested_version():
    pinned = {name_of(name) for name in PINS}
    assert requirements() <= pinned, f"not in constraints.txt: {requirements() - pinned}"


def test_the_conda_environment_says_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert conda == ["python=3.12", "pip"]
    stated = dict(line.split("==") for line in pip["pip"] if "==" in line)
    assert stated["torch"].startswith("2.13.")
    for name, version in stated.items():
        assert PINS[name] == version, f"{name}: {version} in environment.yml, {PINS[name]} pinned"
    assert "--constraint constraints.txt" in pip["pip"] and "--editable .[dev]" in pip["pip"]
    assert set(stated) <= requirements() | {"torch"}


def test_the_pinned_torch_is_in_the_supported_range():
    (torch,) = (r for r in PROJECT["dependencies"] if r.startswith("torch"))
    assert torch == "torch>=2.11,<2.15"
    assert (2, 11) <= tuple(map(int, PINS["torch"].split(".")[:2])) < (2, 15)


@pytest.mark.parametrize(
    "module", ["labkit", "labkit.cli", "labkit.perfmodel", "labkit.devices", "labkit.course.score"]
)
def test_light_modules_do_not_import_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", f"{module} imports {done.stdout}"


def test_an_unknown_name_is_an_attribute_error():
    import labkit

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = labkit.nothing


def test_a_wheel_holds_every_data_file_but_no_rubric():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "labkit"
    data = {p for p in package.rglob("*.*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    rubrics = set((package / "course" / "rubrics").rglob("*"))
    held = {p for pattern in tool["package-data"]["labkit"] for p in package.glob(pattern)}
    held = {p for p in held if p.is_file()}
    assert rubrics, "the folder of rubrics has moved: this test guards nothing"
    assert not held & rubrics, f"a wheel would hold {sorted(held & rubrics)}"
    assert held == data - rubrics, f"differs by {sorted(held ^ (data - rubrics))}"
