"""Rubrics: complete, worth what the registry says, and never part of an installed package."""

import tomllib
from pathlib import Path

import pytest

from labkit.course import registry

FOLDER = Path(registry.__file__).parent / "rubrics"
RUBRICS = sorted(FOLDER.glob("*.toml"))
pytestmark = pytest.mark.skipif(not RUBRICS, reason="a student release has no rubrics")


@pytest.fixture(params=RUBRICS, ids=lambda path: path.stem)
def rubric(request):
    found = tomllib.loads(request.param.read_text(encoding="utf-8"))
    assert found["question"].lower() == request.param.stem
    return found


def test_points_add_up_to_the_question(rubric):
    points = sum(one["points"] for one in rubric["criterion"])
    worth = registry.find(rubric["question"]).points
    assert points == worth, f"the criteria have {points} points, the registry {worth}"


def test_every_part_has_criteria_and_a_reference_with_figures(rubric):
    parts = {one["part"] for one in rubric["criterion"]}
    assert parts == set(rubric["reference"]), f"criteria for {parts}"
    for part, answer in rubric["reference"].items():
        assert any(sign.isdigit() for sign in answer), f"part {part} cites no figure"


def test_mistakes_cost_no_more_than_the_question(rubric):
    for one in rubric["mistake"]:
        assert 0 <= one["costs"] <= registry.find(rubric["question"]).points, one["says"]
        assert one["reply"], one["says"]
