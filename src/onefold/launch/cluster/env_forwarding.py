"""Owns which environment variables travel with a run: `.deepspeed_env`, `--env`, and the families that ranks on other
machines need too.

Invariant: what is said nearer wins: `--env` over `.deepspeed_env` over the launcher's own environment. Values are never
interpreted; they arrive as they were written.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onefold.errors import LaunchError

FORWARDED = (
    *("NCCL", "PYTHON", "LD_LIBRARY", "PATH", "UCX", "MLFLOW", "MV2"),  # DeepSpeed's launcher forwards these
    *("ONEFOLD", "TORCH", "OMP_", "MKL_", "CUDA_", "GLOO", "HF_", "TOKENIZERS_PARALLELISM"),
)
"""Variables whose names begin so are forwarded to other machines."""
_STAYS = re.compile(r"CUDA_VISIBLE_DEVICES|TORCHELASTIC_.*|ONEFOLD_RUN")
# Every user of a machine can read command lines, so what looks like a secret has to be asked for with --env.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|COOKIE|(?<![A-Z])(KEYS?|PASS|PWD|PAT|AUTH)(?![A-Z])",
    re.I,
)
_SECRET_VALUE = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]*:[^/?#\s]*@", re.I)
"""A URL with a password in it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a `.deepspeed_env`: lines `NAME=VALUE`; `#` at the start of a line begins a comment.

    Raises:
        LaunchError: it cannot be read, or a line is wrong; file and line are named.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise LaunchError(f"{path}, line {number}: expected NAME=VALUE; found {text!r}")
        found[name.strip()] = value
    return found


def env_files(name: str, folders: Iterable[Path]) -> list[Path]:
    """The files called `name` in `folders`, each once, in that order: later ones win."""
    return list(dict.fromkeys(path for folder in folders if (path := (folder / name).resolve()).is_file()))


def given(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What `--env` says: `NAME=VALUE`, or `NAME` for the value that it has here.

    Raises:
        LaunchError: a name that is none, or that has no value here.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(f"--env {word}: expected NAME=VALUE or NAME")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: it has no value here; set it, or write --env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that ranks on other machines get as well."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED)
        and _NAME.fullmatch(name)
        and not (_STAYS.fullmatch(name) or _SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }
