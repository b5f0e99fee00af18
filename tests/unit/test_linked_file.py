"""Where SQLite's locks do not hold, no store is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError

_READ = Path.read_text


def mounted(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let the system say that these are its mounts."""

    def read(path: Path, *arguments: object, **options: object) -> str:
        if str(path) == "/proc/self/mounts":
            return "".join(f"{line} rw 0 0\n" for line in ("/dev/sda1 / ext4", *lines))
        return _READ(path, *arguments, **options)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Path, "read_text", read)


def test_a_linked_file_is_followed_to_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "jobs.db").touch()
    (tmp_path / "jobs.db").symlink_to(tmp_path / "share" / "jobs.db")
    mounted(monkeypatch, f"host:/export {tmp_path}/share nfs")
    with pytest.raises(ConfigError, match="lies on nfs"):
        Holdfast(f"sqlite:///{tmp_path}/jobs.db").sync.count()
