"""Files are written whole or not at all, and read with a clear error or not at all."""

from __future__ import annotations

import json
import os
import stat
import threading
import warnings

import pytest

from turbogr_compile.files import Damaged, foreign, make_private, obstacle, read_json, read_text, replace_file
from turbogr_compile.kernels.cpu.cache import Cache
from turbogr_compile.show.dump import DumpDirectory

from ..damage.ways import damaged

as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


# --- writing -----------------------------------------------------------------------------------------


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    path, failures, mixed = tmp_path / "file.txt", [], []
    contents = [str(n) * 20_000 for n in range(4)]
    replace_file(path, contents[0])

    def write(content):
        for _ in range(40):
            try:
                replace_file(path, content)
                if read_text(path) not in contents:
                    mixed.append(content[0])
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not mixed
    assert os.listdir(tmp_path) == ["file.txt"]


def test_the_mode_stays(tmp_path):
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    replace_file(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "new"


def test_links_that_somebody_planted_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "dump"
    folder.mkdir()
    for name in (f".run.json.{os.getpid()}", "run.json"):
        (folder / name).symlink_to(victim)
    replace_file(folder / "run.json", "{}")
    assert victim.read_text() == "mine"
    assert (folder / "run.json").read_text() == "{}" and not (folder / "run.json").is_symlink()


CALLS = ("open", "fchmod", "write", "fsync", "close", "replace")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, call, number):
    """Each call to the system fails in turn; only what follows the rename may fail unheard."""
    path = tmp_path / "file.txt"
    path.write_text("old")
    real, seen = getattr(os, call), []

    def failing(*arguments, **named):
        seen.append(arguments)
        if len(seen) - 1 == number:
            if call == "close":
                real(*arguments)
            raise OSError(28, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, failing)
    try:
        replace_file(path, "new")
        outcome = "new"
    except OSError:
        outcome = "old"
    monkeypatch.undo()
    assert outcome == ("old" if number == 0 else "new")
    assert path.read_text() == outcome and os.listdir(tmp_path) == ["file.txt"]


def test_a_write_that_is_cut_goes_on(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:7]))
    replace_file(tmp_path / "file", "0123456789" * 9)
    assert (tmp_path / "file").read_text() == "0123456789" * 9


# --- reading -----------------------------------------------------------------------------------------


def test_damaged_files_are_an_error_that_names_them(tmp_path):
    path = tmp_path / "files.json"
    text = json.dumps([f"0.{n}-captured/00{n}-input.txt" for n in range(20)]).encode()
    for number in range(300):
        path.write_bytes(damaged(text, number))
        try:
            assert isinstance(read_json(path, list), list)
        except ValueError as error:
            assert str(path) in str(error)


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe") if hasattr(os, "mkfifo") else pytest.skip("no pipes")
    with pytest.raises(Damaged, match="is not a file"):  # at once: nobody writes into it
        read_text(tmp_path / "pipe")


def test_a_number_with_too_many_digits(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ' + 5000 * "1" + "}")
    with pytest.raises(Damaged, match=r"a\.json is damaged: .*digits"):
        read_json(tmp_path / "a.json")


# --- folders -----------------------------------------------------------------------------------------


def test_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
        Cache(tmp_path / "d" / "e")
    finally:
        os.umask(before)
    for name in ("a", "a/b", "a/b/c", "d", "d/e"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700, name


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert foreign(folder.stat()) and "another user" in obstacle(folder)


# --- the dump folder ---------------------------------------------------------------------------------


def opened(root):
    directory = DumpDirectory(root, 0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        directory.prepare()
    return directory, " ".join(str(w.message) for w in found)


def test_a_damaged_list_of_files_does_not_stop_a_dump(tmp_path):
    text = json.dumps(["0.0-captured/000-input.txt"]).encode()
    (tmp_path / "rank0").mkdir()
    (tmp_path / "run.json").write_text('{"writer": "turbogr"}')
    for number in range(120):
        (tmp_path / "rank0" / "files.json").write_bytes(damaged(text, number))
        directory, said = opened(tmp_path)
        assert not directory.refusal, (number, said)


@pytest.mark.parametrize("content", [b"{", b"[1, null, {}]", b'["a\\u0000b"]', b"[" * 100_000, b"\xff\xfe", b"{}"])
def test_a_damaged_list_is_said_once_or_is_harmless(tmp_path, content):
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "files.json").write_bytes(content)
    directory, said = opened(tmp_path)
    assert not directory.refusal and said.count("stay beside new ones") <= 1


def test_a_path_that_cannot_be_is_refused(tmp_path):
    directory, said = opened(tmp_path / "a\0b")
    assert "null" in directory.refusal and "training goes on" in said


@as_root
def test_a_dump_folder_of_another_user_is_refused(tmp_path):
    root = tmp_path / "theirs"
    root.mkdir()
    os.chown(root, 12345, 12345)
    directory, said = opened(root)
    assert "belongs to another user" in directory.refusal and "training goes on" in said
    assert os.listdir(root) == []


def test_a_rank_folder_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "dump"
    root.mkdir()
    (root / "rank0").symlink_to(tmp_path / "elsewhere")
    directory, _ = opened(root)
    assert "leads elsewhere" in directory.refusal
