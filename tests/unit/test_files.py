"""Files appear whole or not at all, and nothing else is left in their folder."""

import pytest

from labkit.errors import UserError
from labkit.files import whole_file, writable_folder


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a b é.csv"
    with whole_file(path) as draft:
        draft.write_text("one")
        assert not path.exists(), "half of a file is to be seen"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as draft:
        draft.write_text("two")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path], "a draft was left behind"


def test_a_folder_is_tried_before_it_is_needed(tmp_path):
    folder = writable_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and not any(folder.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be written to \("):
        writable_folder(tmp_path / "file")
