"""Limits of resources: what may be asked for, by whom, within which settings."""

from __future__ import annotations

import errno
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import ConfigError, Holdfast, Invalid, Resources, Settings
from holdfast.core.resources import UNLIMITED, ResourceLimits, as_resources
from holdfast.tasks.command_policy import CommandPolicy
from holdfast.worker.executors.resource_limits import limit_behind_error, limit_behind_exit
from holdfast.worker.sandbox.seccomp import ARCHITECTURES, filter_program


def test_amounts_are_read_as_code_and_commands_say_them() -> None:
    asked = Resources(memory="512M", cpu="5m", open_files=64, file_size="2GiB", processes=8)
    assert asked.to_limits() == ResourceLimits(512 << 20, 300.0, 64, 2 << 30, 8)
    assert Resources(memory=64 << 20, cpu=timedelta(seconds=1.5)).to_limits() == ResourceLimits(64 << 20, 1.5)
    assert as_resources({"cpu": 2}).to_limits() == ResourceLimits(cpu=2.0)
    assert Resources().to_limits() == UNLIMITED
    assert not UNLIMITED.is_set


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"memory": -1}, "resources.memory: -1 is not valid; write a number of bytes, or a size"),
        ({"memory": "-5M"}, "resources.memory: '-5M' is not valid"),
        ({"memory": "much"}, "resources.memory: 'much' is not valid"),
        ({"memory": 1.5}, "resources.memory: 1.5 is not valid"),
        ({"memory": True}, "resources.memory: True is not valid"),
        ({"memory": "1M"}, "resources.memory: '1M' is not valid; give at least 16MiB"),
        ({"memory": 1 << 60}, "resources.memory: .* is not valid; give at most"),
        ({"cpu": -1}, "resources.cpu: -1 is not valid"),
        ({"cpu": "soon"}, "resources.cpu: 'soon' is not valid"),
        ({"cpu": 0}, "resources.cpu: 0 is not valid; give at least 100ms"),
        ({"open_files": 3}, "resources.open_files: 3 is not valid; give a whole number from 16"),
        ({"file_size": "-1"}, "resources.file_size: '-1' is not valid"),
        ({"processes": 0}, "resources.processes: 0 is not valid; give a whole number from 1"),
        ({"memroy": "1G"}, "resources.memroy: '1G' is not valid; there are memory, .*memory"),
        (["memory"], "resources: .* is not valid; give an object of memory"),
    ],
)
def test_bad_amount_names_field_value_and_remedy(resources: Any, message: str) -> None:
    policy = CommandPolicy(mode="argv")
    with pytest.raises(Invalid, match=message):
        as_resources(resources)
    with pytest.raises(Invalid, match=message if isinstance(resources, dict) else "payload"):
        policy.parse_command({"argv": ["true"], "resources": resources})


@pytest.mark.parametrize("executor", ["async", "thread", None])
def test_only_process_tasks_take_resources(executor: Any, tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    async def handle() -> None: ...

    def work() -> None: ...

    with pytest.raises(Invalid, match=r"resources of task 'x'.*executor=\"process\""):
        app.task("x", executor=executor, resources=Resources(cpu=1))(work if executor == "thread" else handle)


def test_stricter_of_task_and_setting_holds() -> None:
    maxima = ResourceLimits(memory=100 << 20, cpu=10)
    assert ResourceLimits(cpu=5, processes=3).restricted_to(maxima) == ResourceLimits(
        memory=100 << 20, cpu=5, processes=3
    )
    assert UNLIMITED.restricted_to(maxima) == maxima


@pytest.mark.parametrize(
    ("settings", "payload", "message"),
    [
        (
            {"job_memory": "64MiB"},
            {"resources": {"memory": "1G"}},
            "resources.memory: '1GiB' is above .*64MiB.*job_memory",
        ),
        ({"job_cpu": "1s"}, {"resources": {"cpu": 2}}, "resources.cpu: '2s' is above .*at most 1s.*job_cpu"),
        ({}, {"sandbox": "stict"}, "sandbox: 'stict' is not valid; give none or strict; did you mean strict"),
        ({"sandbox": "strict"}, {"sandbox": "none"}, "sandbox: 'none' is less than has to be; leave it out"),
        ({"sandbox": "strict"}, {"network": True}, "network: True is not valid; .*sandbox_network"),
        ({"sandbox": "strict"}, {"cwd": "/"}, "cwd: '/' may be written by a sandboxed command.*command_roots"),
        ({}, {"sandbox": "strict", "cwd": "/tmp"}, "cwd: '/tmp' may be written"),
        (
            {"sandbox": "strict", "command_roots": "/srv"},
            {"cwd": "/tmp"},
            "cwd: '/tmp' is not valid; it must lie under",
        ),
    ],
)
def test_command_beyond_the_settings_is_refused(
    settings: dict[str, Any], payload: dict[str, Any], message: str, tmp_path: Path
) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", commands="argv", **settings)
    with pytest.raises(Invalid, match=message):
        app.draft_job("command", {"argv": ["true"], **payload})


@pytest.mark.parametrize(
    ("name", "value"),
    [("job_memory", "1B"), ("job_memory", "-1"), ("job_cpu", "never"), ("job_processes", 0), ("sandbox", "stirct")],
)
def test_bad_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: "):
        Settings.load(**{name: value})


def test_refusals_of_the_kernel_are_distinguished() -> None:
    limits = ResourceLimits(cpu=1, open_files=64, file_size=1)
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    behind = ValueError("no good")
    behind.__cause__ = refused
    assert limit_behind_error(refused, limits) == limit_behind_error(behind, limits) == "open_files"
    assert limit_behind_error(refused, UNLIMITED) is None
    assert limit_behind_error(OSError(errno.ENOENT, "none"), limits) is None
    looped = ValueError()
    looped.__context__ = second = ValueError()
    second.__context__ = looped
    assert limit_behind_error(looped, limits) is None
    assert (
        limit_behind_exit(-signal.SIGXCPU, "", limits) == limit_behind_exit(128 + signal.SIGXCPU, "", limits) == "cpu"
    )
    assert limit_behind_exit(1, "x: Too many open files", limits) == "open_files"
    assert limit_behind_exit(1, "x: Too many open files", UNLIMITED) is None
    assert limit_behind_exit(-signal.SIGKILL, "", limits) is None


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("namespaces", [True, False])
def test_every_jump_of_a_filter_stays_inside(machine: str, network: bool, namespaces: bool) -> None:
    program = filter_program(machine, network=network, namespaces=namespaces)
    instructions = [program[each : each + 8] for each in range(0, len(program), 8)]
    assert len(instructions) < 4096
    for place, each in enumerate(instructions):
        if each[0] & 7 == 5:
            assert place + 1 + max(each[2], each[3]) < len(instructions)
    assert instructions[-1] == bytes([6, 0, 0, 0, 0, 0, 255, 127])
