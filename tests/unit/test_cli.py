"""The commands: what they print, what they exit with, and errors without a traceback."""

import os
import subprocess
import sys

import pytest


def labkit(*args, cwd=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env=os.environ | env,
    )


def test_help_is_quick_and_names_every_command():
    done = labkit("--help")
    assert done.returncode == 0
    for command in ("check", "hello", "run", "test", "experiment"):
        assert f" {command} " in done.stdout, done.stdout


def test_hello_writes_the_same_text_for_the_same_seed(tmp_path):
    first, again = (labkit("hello", "My lord", "--tokens", 30, cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "My lord" in first.stdout
    text = first.stdout.split("\n", 1)[1]
    assert text == again.stdout.split("\n", 1)[1]
    words = [word.strip(".,;:!?[]'").lower() for word in text.split()]
    known = {"the", "and", "of", "to", "i", "my", "lord", "is", "a", "not", "you"}
    assert len(known & set(words)) >= 4, f"not a text one can read: {text}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hello", ""), "the prompt '' is empty"),
        (("hello", "x", "--checkpoint", "nowhere"), "nowhere is not a folder"),
        (("hello", "x", "--tokens", "9999"), "more than the model's 512 positions"),
        (("hello", "x", "--device", "tpu"), "tpu"),
        (("hello", "x", "--temperature", "nan"), "temperature=nan"),
        (("hello", "\udcff"), "is not UTF-8 text"),
        (("profile", "a/b"), "name='a/b' must be a file name"),
        (("profile", ""), "name='' must be a file name"),
        (("profile", "--layers", "0"), "n_layers=0"),
        (("profile", "--target", ".x:make"), "not of the form"),
        (("run", "nowhere.ipynb"), "nowhere.ipynb does not exist"),
        (("run", "--profile", "fast"), "no profile 'fast'"),
        (("test", "C77"), "C77"),
        (("experiment", "nothing"), "nothing"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path):
    done = labkit(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done
    assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: "), done.stderr


def test_check_says_whether_all_is_well(tmp_path):
    well = labkit("check", cwd=tmp_path)
    assert well.returncode == 0 and "[ok] checkpoint" in well.stdout, well.stdout
    ill = labkit("check", "--checkpoint", tmp_path, cwd=tmp_path)
    assert ill.returncode == 1 and "[FAIL] checkpoint" in ill.stdout, ill.stdout


def test_a_terminal_without_utf_8_gets_its_text(tmp_path):
    done = labkit("hello", "é", "--tokens", 2, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\n?" in done.stdout, done


def test_out_of_memory_is_one_line(tmp_path):
    done = labkit("profile", "--micro-batch-size", 10**10, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.startswith("out of memory: ") and "Traceback" not in done.stderr, done.stderr
    assert "smaller model or batch" in done.stderr
