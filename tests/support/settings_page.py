"""The reference page of the settings, made from their table.

``python -m tests.support.settings_page > docs/settings.md``
"""

from __future__ import annotations

from holdfast.settings.settings import SETTINGS, Setting

_HEAD = """\
# Settings

<!-- Made by `python -m tests.support.settings_page > docs/settings.md`, and compared by a test. -->

A setting may be given in four places. Each place goes before the one above it:

1. its default, below;
2. a file: `holdfast.toml`, or the table `[tool.holdfast]` in `pyproject.toml`, in the working directory or the nearest
   directory above it, up to the root of the repository; `HOLDFAST_CONFIG` or `--config` names another file;
3. the environment: `HOLDFAST_LEASE=60s` says `lease`; an empty variable says nothing;
4. an argument: `Holdfast(lease="60s")` in code, or an option of a command.

`holdfast config list` shows every setting with its value and its source, except that it does not show what the
application's code sets, as in `Holdfast(lease="60s")`. A wrong name or value is refused when the program
starts, with its place and all the others that are wrong too. Only a `HOLDFAST_` variable that is no setting is not
refused: it has no effect, and `worker start`, `config list` and `doctor` warn of it, other commands do not.
[Operating](operating.md#changing-settings) says which settings a running worker follows.

A duration is a number of seconds or `500ms`, `30s`, `5m`, `2h`, `7d`. A size is a number of bytes or `64KiB`, `1MiB`,
`2GiB`. A retry policy is written as [Tasks](tasks.md#retries) shows.

| setting | meaning | default | may be |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(map(_row, SETTINGS.values()))


def _row(setting: Setting[object]) -> str:
    default = setting.kind.show(setting.default)
    shown = f"`{default}`" if default else "nothing"
    return f"| `{setting.name}` | {setting.doc} | {shown} | {setting.kind.form} |\n"


if __name__ == "__main__":
    print(page(), end="")
