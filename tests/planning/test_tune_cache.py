"""The kept measurements: whole files, several writers, broken files, and which candidate they choose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnops.errors import ConfigError, InputError
from attnops.planning import tune_cache
from attnops.planning.tune_cache import Measured, keep, load

KEY = {"operation": "splash", "device": "TPU v5 lite", "shapes": {"q_len": 128}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


def _measured(part: str, block: int, seconds: float | None, how: str = "static") -> Measured:
    name = {"forward": "block_q", "backward": "block_q_dkv"}[part]
    return Measured(part, {name: block}, how, seconds, None if seconds else "too large")


def test_nothing_is_kept_at_first() -> None:
    assert load(KEY)[1:] == ((), None, None)


def test_a_search_that_has_not_ended_chooses_nothing() -> None:
    assert keep(KEY, [_measured("forward", 512, 2.0)]).choice is None
    assert keep(KEY, [_measured("forward", 256, 1.0)]).choice is None
    assert keep(KEY, [], finished="device").choice is None
    found = keep(KEY, [], finished="static")
    assert found.choice is not None
    assert found.choice.fields == {"block_q": 256}
    assert load(KEY) == found


def test_each_pass_has_its_fastest_and_failures_never_win() -> None:
    some = [("forward", 512, 2.0), ("forward", 256, None), ("backward", 128, 4.0), ("backward", 256, 5.0)]
    found = keep(KEY, [_measured(*one) for one in some], finished="static")
    assert found.choice is not None
    assert found.choice.fields == {"block_q": 512, "block_q_dkv": 128}
    assert keep({**KEY, "dtype": "x"}, [_measured("forward", 1, None)], finished="static").choice is None


def test_a_time_on_the_device_beats_an_estimate() -> None:
    keep(KEY, [_measured("forward", 256, 1e-9)], finished="static")
    found = keep(KEY, [_measured("forward", 512, 3.0, "device")], finished="device")
    assert found.choice is not None
    assert found.choice.fields == {"block_q": 512}
    assert "device" in found.choice.how


def test_a_later_measurement_of_the_same_candidate_replaces_the_earlier() -> None:
    keep(KEY, [_measured("forward", 256, 1.0)])
    assert [one.seconds for one in keep(KEY, [_measured("forward", 256, 3.0)]).measured] == [3.0]


def test_every_part_of_a_key_counts() -> None:
    keep(KEY, [_measured("forward", 256, 1.0)], finished="static")
    for other in ({"device": "TPU v6 lite"}, {"operation": "ring"}, {"shapes": {"q_len": 129}}, {"versions": {}}):
        assert load(KEY | other).choice is None


_WRITER = """
import sys
from attnops.planning.tune_cache import Measured, keep
for i in range(12):
    keep({"operation": "splash", "device": "d"}, [Measured("forward", {"writer": int(sys.argv[1]), "i": i}, "static", 1.0)])
"""


@pytest.mark.slow
def test_several_writers_lose_nothing_and_readers_never_see_a_part() -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(n)]) for n in range(3)]
    key = {"operation": "splash", "device": "d"}
    counts = []
    while any(writer.poll() is None for writer in writers):
        found = load(key)
        assert found.trouble is None
        counts.append(len(found.measured))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert counts == sorted(counts)
    assert {tuple(one.fields.values()) for one in load(key).measured} == {(n, i) for n in range(3) for i in range(12)}
    assert [path.suffix for path in load(key).path.parent.iterdir() if path.suffix != ".lock"] == [".json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema_version": 2}',
        '{"schema_version": 1, "key": {}, "measured": [], "finished": []}',
        "[" * 200_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_broken_file_is_a_miss_with_its_reason_and_is_written_anew(text: str) -> None:
    path = load(KEY).path
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = load(KEY)
    assert found.choice is None
    assert found.trouble is not None
    assert str(path) in found.trouble
    assert keep(KEY, [_measured("forward", 256, 1.0)], finished="static").choice is not None
    assert json.loads(path.read_text())["key"] == KEY


@pytest.mark.parametrize(
    "change",
    [
        {"fields": []},
        {"seconds": "quick"},
        {"fields": None},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"how": 3},
        {"part": None},
        {"detail": []},
        {"failure": 7},
    ],
    ids=str,
)
def test_measurements_that_make_no_sense_are_a_miss(change: dict[str, object]) -> None:
    path = keep(KEY, [_measured("forward", 256, 1.0), _measured("forward", 512, 2.0)], finished="static").path
    data = json.loads(path.read_text())
    data["measured"][0] |= change
    path.write_text(json.dumps(data))
    found = load(KEY)
    assert found.choice is None
    assert f"{path} can't be read" in (found.trouble or "")


def test_a_folder_that_can_not_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"can't be written.*set ATTNOPS_TUNE_CACHE"):
        keep(KEY, [_measured("forward", 256, 1.0)])


def test_the_folder_is_the_users_cache_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tune_cache.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune_cache.folder() == tmp_path / "attnops" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tune_cache.folder() == tmp_path / ".cache" / "attnops" / "tune"


@pytest.mark.parametrize("named", ["~no_such_user_here/tune", None])
def test_without_a_home_folder_everything_is_a_miss(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is None:
        monkeypatch.delenv(tune_cache.ENVIRONMENT)
        monkeypatch.setattr(Path, "home", unknown)
    else:
        monkeypatch.setenv(tune_cache.ENVIRONMENT, named)
    found = load(KEY)
    assert (found.path, found.measured, found.choice) == (None, (), None)
    assert (named or "~/.cache/attnops/tune") in (found.trouble or "")
    assert tune_cache.state("a device") == tune_cache.state("a device")
    with pytest.raises(InputError, match=r"set ATTNOPS_TUNE_CACHE to a folder"):
        keep(KEY, [_measured("forward", 256, 1.0)])


def test_what_a_config_refuses_is_withdrawn() -> None:
    keep(KEY, [_measured("forward", 256, 2.0), _measured("forward", -5, 1.0)], finished="static")
    (name,) = _measured("forward", 256, 1.0).fields

    def resolve(fields: dict[str, int]) -> None:
        if fields[name] < 0:
            raise ConfigError("negative")

    tune_cache.mark_refused(KEY, resolve)
    found = load(KEY)
    assert found.choice is not None
    assert found.choice.fields == {name: 256}
    assert {one.fields[name]: (one.seconds, one.failure) for one in found.measured} == {
        256: (2.0, None),
        -5: (None, "negative"),
    }
