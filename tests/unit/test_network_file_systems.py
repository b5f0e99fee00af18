"""Where SQLite's locks do not hold, no store is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError
from holdfast.stores.sqlite.connection import file_system

_READ = Path.read_text


def mounted(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let the system say that these are its mounts."""

    def read(path: Path, *arguments: object, **options: object) -> str:
        if str(path) == "/proc/self/mounts":
            return "".join(f"{line} rw 0 0\n" for line in ("/dev/sda1 / ext4", *lines))
        return _READ(path, *arguments, **options)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.s3fs"],
)
def test_a_network_file_system_is_refused_before_anything_is_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, f"host:/export {tmp_path} {kind}")
    with pytest.raises(ConfigError, match=f"lies on {kind}, where SQLite's locks do not hold") as caught:
        Holdfast(f"sqlite:///{tmp_path}/jobs.db").sync.enqueue("work")
    assert "use a local disk" in str(caught.value)
    assert caught.value.exit_code == 78
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk"])
def test_a_local_one_is_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, f"/dev/sdb1 {tmp_path} {kind}")
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    assert app.sync.enqueue("work").created
    app.sync.close()


def test_the_innermost_and_latest_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a b" / "inner"
    inner.mkdir(parents=True)
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounted(monkeypatch, f"x {spaced}/inner nfs4", f"x {spaced} ext3", f"x {tmp_path} xfs", f"x {tmp_path} btrfs")
    assert [file_system(folder) for folder in (inner, inner.parent, tmp_path)] == ["nfs4", "ext3", "btrfs"]
    assert file_system(tmp_path.parent / f"{tmp_path.name}-neighbour") == "ext4"


def test_a_link_is_followed_to_where_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "local").symlink_to(tmp_path / "share")
    mounted(monkeypatch, f"host:/export {tmp_path}/share nfs")
    with pytest.raises(ConfigError, match="lies on nfs"):
        Holdfast(f"sqlite:///{tmp_path}/local/jobs.db").sync.count()
