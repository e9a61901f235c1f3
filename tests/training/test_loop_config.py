"""Settings: presets, text form, and errors that say what was meant."""

from __future__ import annotations

import json

import pytest

from turbogr_compile import OptionError
from turbogr_compile.commands import main
from turbogr_compile.training.config import Config, read_file


def test_size_sets_and_names_win():
    config = Config.read({"size": "small", "dim": "96", "heads": 3})
    assert (config.dim, config.heads, config.max_len, config.batch) == (96, 3, 128, 32)


def test_large_has_fewer_layers_where_layers_are_larger():
    assert Config.read({"size": "large"}).layers == 24
    assert Config.read({"size": "large", "model": "fuxi"}).layers == 10
    assert Config.read({"size": "large", "model": "fuxi", "layers": 3}).layers == 3


def test_text_form_reads_back():
    config = Config.read({"features": "all", "lr": "3e-4", "deterministic": True, "size": "base"})
    assert Config.read(json.loads(json.dumps(config.as_dict()))) == config
    assert config.features == ("offload", "half", "share", "window")


def test_features_keep_one_order():
    assert Config.read({"features": "share, offload"}) == Config.read({"features": ["offload", "share"]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modle": "hstu"}, "no setting is named 'modle' (did you mean 'model'?)"),
        ({"model": "sasrek"}, "did you mean 'sasrec'?"),
        ({"size": "larg"}, "did you mean 'large'?"),
        ({"features": "offload,hlaf"}, "did you mean 'half'?"),
        ({"steps": "many"}, "steps takes a whole number, got 'many'"),
        ({"steps": 1.5}, "steps takes a whole number"),
        ({"steps": True}, "steps takes a whole number"),
        ({"lr": "nan"}, "lr takes a number, got 'nan'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"dim": 30, "heads": 4}, "dim must be a multiple of heads"),
        ({"backend": "eager", "features": "share"}, "features share are turbogr's"),
        ({"features": "window", "order": "balanced"}, "give one"),
        ({"deterministic": "yes"}, "deterministic takes true or false"),
        ({"temperature": 0}, "temperature must be above 0"),
    ],
)
def test_what_is_wrong_is_said(given, said):
    with pytest.raises(OptionError) as error:
        Config.read(given)
    assert said in str(error.value)


def test_settings_from_a_file_or_a_run(tmp_path):
    (tmp_path / "plain.json").write_text('{"dim": 64}')
    (tmp_path / "run.json").write_text('{"format": 1, "config": {"dim": 96}}')
    assert read_file(tmp_path / "plain.json") == {"dim": 64}
    assert read_file(tmp_path / "run.json") == {"dim": 96}
    (tmp_path / "list.json").write_text("[1]")
    for name in ("list.json", "none.json"):
        with pytest.raises(OptionError, match=name):
            read_file(tmp_path / name)


def test_the_command_suggests(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--stpes", "3"])
    assert stopped.value.code == 2 and "did you mean '--steps'?" in capsys.readouterr().err
    assert main(["train", "--model", "hsut", "--out", str(tmp_path / "run")]) == 2
    assert "did you mean 'hstu'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
