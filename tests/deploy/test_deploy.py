"""The files of ``deploy/``, and the examples' containers: linters accept them, and whatever they name is there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import promql_parser
import pytest
import yaml

from holdfast.cli import main
from holdfast.settings.settings import SETTINGS, Settings
from holdfast.telemetry.metric_definitions import FAMILIES
from holdfast.web.keys_file import read_keys
from tests.support.pages import ROOT, find_block

DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent
DOCKERFILES = [DEPLOY / "Dockerfile", *sorted((ROOT / "examples").rglob("Dockerfile"))]
COMPOSE = [DEPLOY / "compose.yaml", *sorted((ROOT / "examples").rglob("*compose.y*ml"))]
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CUSTOM = {"ScaledObject", "Kustomization"}
"""Kinds of which Kubernetes itself knows nothing."""
GRACE = Settings.load(environ={}).grace.total_seconds()
AFTERWARDS = 20
"""Seconds at least beyond the grace for cancelled handlers and the last writes."""


def named(paths: Sequence[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def ran(*words: str) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def found(value: Any, key: str) -> Iterator[Any]:
    """Every value under that key, however deep."""
    match value:
        case dict():
            for name, each in value.items():
                if name == key:
                    yield each
                yield from found(each, key)
        case list():
            for each in value:
                yield from found(each, key)


# ── linters ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_dockerfiles_are_well_made() -> None:
    ran(str(TOOLS / "hadolint"), "--failure-threshold", "warning", "--ignore", "DL3013", *map(str, DOCKERFILES))


@pytest.mark.parametrize("path", DOCKERFILES, ids=named(DOCKERFILES))
def test_nothing_runs_as_root_but_what_says_why(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^USER (?!root|0\b)", text, re.MULTILINE) or "VOLUME /data" in text  # queuectl's own volume


def test_compose_files_are_what_the_specification_says() -> None:
    ran(str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE))


def test_yaml_is_tidy() -> None:
    ran(str(TOOLS / "yamllint"), "--strict", "-c", str(DEPLOY / ".yamllint"), str(DEPLOY))


@pytest.mark.parametrize("path", MANIFESTS, ids=named(MANIFESTS))
def test_manifests_are_what_kubernetes_says(path: Path) -> None:
    for document in documents(path):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_names_every_manifest() -> None:
    (reported,) = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert sorted([*reported["resources"], "kustomization.yaml"]) == [path.name for path in MANIFESTS]


# ── commands and settings ─────────────────────────────────────────────────────────────────────────────────────────
def commands() -> Iterator[tuple[str, list[str]]]:
    for line in re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        yield "Dockerfile", json.loads(line)
    for path in (DEPLOY / "compose.yaml", *MANIFESTS):
        for document in documents(path):
            for words in (*found(document, "command"), *found(document, "args")):
                if isinstance(words, list) and words[0] == "holdfast":
                    yield path.name, words
    texts = {path.name: path.read_text(encoding="utf-8") for path in UNITS}
    for name, text in {**texts, "workers.md": find_block("docs/workers.md", "[Service]").text}.items():
        for line in re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE):
            yield name, shlex.split(line)


def given(words: Sequence[str]) -> dict[str, Any]:
    """The options of the command these words mean, as click reads them; UsageError where it cannot."""
    command: click.Command = main
    context = None
    rest = list(words)
    while True:
        context = command.make_context(rest[0] if context else "holdfast", rest[1:] if context else rest, context)
        if not isinstance(command, click.Group):
            return context.params
        name, command_, rest_ = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None
        assert command_ is not None
        command, rest = command_, [name, *rest_]


def test_every_command_is_one_of_ours() -> None:
    places = []
    for place, (program, *words) in commands():
        assert Path(program).name == "holdfast", place
        for name, value in given(words).items():
            if value is not None and name in SETTINGS:
                SETTINGS[name].kind.parse(name, value)
        places.append(place)
    assert set(places) == {
        "Dockerfile",
        "compose.yaml",
        "migrate.yaml",
        "api.yaml",
        "worker.yaml",
        *map(_name, UNITS),
        "workers.md",
    }


def _name(path: Path) -> str:
    return path.name


def test_a_command_that_is_none_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        given(["worker", "start", "--proceses", "2"])
    with pytest.raises(click.UsageError):
        given(["serve"])


def variables() -> Iterator[tuple[str, str]]:
    for path in (DEPLOY / "compose.yaml", *MANIFESTS):
        for document in documents(path):
            tables = [*found(document, "environment"), document.get("data"), document.get("stringData")]
            for table in tables:
                if isinstance(table, dict):
                    yield from table.items()
            for listed in found(document, "env"):
                yield from ((each["name"], each["value"]) for each in listed if "value" in each)
    for text in (path.read_text(encoding="utf-8") for path in DOCKERFILES[:1]):
        yield from re.findall(r"\b(HOLDFAST_\w+)=(\S+)", text)


def test_every_variable_is_a_setting_and_its_value_is_valid() -> None:
    known = {setting.variable: name for name, setting in SETTINGS.items()}
    reported = [(name, value) for name, value in variables() if name.startswith("HOLDFAST_")]
    assert len(reported) > 10
    for name, value in reported:
        assert name in known, name
        SETTINGS[known[name]].kind.parse(known[name], value)


def test_first_process_of_a_worker_container_reaps_orphans() -> None:
    """The worker does not: what command jobs leave behind would stay as zombies."""
    (compose,) = documents(DEPLOY / "compose.yaml")
    assert compose["services"]["worker"]["init"] is True
    (share,) = found(documents(DEPLOY / "kubernetes" / "worker.yaml"), "shareProcessNamespace")
    assert share is True


def test_every_supervisor_waits_longer_than_the_grace_period() -> None:
    waits = [
        Settings.load(environ={}, grace=each).grace.total_seconds()
        for each in found(documents(DEPLOY / "compose.yaml"), "stop_grace_period")
    ]
    for path in MANIFESTS:
        waits += list(found(documents(path), "terminationGracePeriodSeconds"))
    for path in UNITS:
        waits.append(int(unit(path)["Service"]["TimeoutStopSec"]))
    assert len(waits) == 6
    assert min(waits) >= GRACE + AFTERWARDS
    (settings, _secret) = documents(DEPLOY / "kubernetes" / "settings.yaml")
    assert settings["data"]["HOLDFAST_GRACE"] == SETTINGS["grace"].kind.show(Settings.load(environ={}).grace)


def test_the_api_may_read_its_keys_as_they_are_mounted(tmp_path: Path) -> None:
    deployment = documents(DEPLOY / "kubernetes" / "api.yaml")[0]
    (secret,) = found(deployment, "secret")
    given = secret.get("defaultMode", 0o644) | 0o440  # fsGroup adds that
    keys = tmp_path / "keys.toml"
    keys.touch()
    keys.chmod(given)
    assert list(found(deployment, "fsGroup"))
    assert read_keys(keys) == {}


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # its keys are spelled with capitals
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser


@pytest.mark.parametrize("path", UNITS, ids=named(UNITS))
def test_units_stop_as_ours_want_to_be_stopped(path: Path) -> None:
    reported = unit(path)
    assert reported.sections() == ["Unit", "Service", "Install"]
    service = reported["Service"]
    assert (service["KillSignal"], service["KillMode"], service["Restart"]) == ("SIGTERM", "mixed", "always")
    assert service["User"] == "holdfast"


@pytest.mark.parametrize("path", UNITS, ids=named(UNITS))
def test_readme_runs_commands_as_the_unit_does(path: Path) -> None:
    service = unit(path)["Service"]
    script = find_block("deploy/README.md", "#!/bin/sh").text.splitlines()
    assert script[2:] == [
        service["Environment"],
        f". {service['EnvironmentFile'].removeprefix('-')}",
        f"cd {service['WorkingDirectory']}",
        f'exec runuser -u {service["User"]} -- {service["ExecStart"].split()[0]} "$@"',
    ]
    steps = find_block("deploy/README.md", "sudo holdfast keys").text
    for command in re.findall(r"^sudo holdfast (.*)$", steps, re.MULTILINE):
        given(shlex.split(command))


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────────────────────
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8"))["groups"]
BOARD = json.loads((DEPLOY / "grafana" / "holdfast.json").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}


def expressions() -> list[tuple[str, str]]:
    reported = [(rule.get("alert") or rule["record"], rule["expr"]) for group in RULES for rule in group["rules"]]
    reported += [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]
    (scaler,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    reported += [("scaler", query) for query in found(scaler, "query")]
    return [*reported, ("metrics.md", find_block("docs/metrics.md", "max(").text)]


def series() -> dict[str, set[str]]:
    """Every series Prometheus would know, with its labels."""
    scraped = {"instance", "job"}
    known: dict[str, set[str]] = {name: set() for name in RECORDED} | {"up": scraped}
    for family in FAMILIES:
        ends = {"_bucket": {"le"}, "_sum": set(), "_count": set()} if family.kind == "histogram" else {"": set()}
        for end, more in ends.items():
            known[f"holdfast_{family.name}{end}"] = {*family.labels, *more, *scraped}
    return known


@pytest.mark.parametrize(("place", "text"), expressions(), ids=[place for place, _ in expressions()])
def test_every_expression_is_promql_over_series_that_there_are(place: str, text: str) -> None:
    promql_parser.parse(text.replace("$__rate_interval", "5m"))
    known = series()
    names = set(re.findall(r"\b(?:holdfast[_:][\w:]+|up\b(?={))", text))
    assert names, place
    assert names <= set(known)
    labels = set().union(*(known[name] for name in names))
    grouped = {each.strip() for group in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", text) for each in group.split(",")}
    matched = {each for group in re.findall(r"\{([^}]*)\}", text) for each in re.findall(r"(\w+)\s*[=!]", group)}
    assert grouped | matched <= labels | ({"queue"} if any(":" in name for name in names) else set())


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_every_alert_says_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert set(rule["annotations"]) == {"summary", "runbook"}
    assert rule["labels"]["severity"] in {"page", "ticket"}
    for command in re.findall(r"`(holdfast [a-z][^`]*)`", rule["annotations"]["runbook"]):
        given(re.sub(r"\{\{[^}]*\}\}", "x", command).split()[1:])


def test_alert_and_group_names_are_unique() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    groups = [group["name"] for group in RULES]
    assert len(set(groups)) == len(groups)


def test_the_dashboards_panels_have_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_worker_listens_where_it_is_asked() -> None:
    """The port of probes and scrapes is the port of the command."""
    (worker, _budget) = documents(DEPLOY / "kubernetes" / "worker.yaml")
    (ports,) = found(worker, "ports")
    (annotations,) = found(worker, "annotations")
    (args,) = found(worker, "args")
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    asked = next(found(scrape, "dns_sd_configs"))[0]["port"]
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert ports[0]["containerPort"] == int(annotations["prometheus.io/port"]) == int(given(args[1:])["metrics_port"])
    assert f"HOLDFAST_METRICS_PORT={asked}" in text
    assert {each["port"] for each in found(worker, "httpGet")} == {ports[0]["name"]}


@pytest.mark.parametrize("path", DOCKERFILES, ids=named(DOCKERFILES))
def test_image_has_every_file_that_the_package_is_built_of(path: Path) -> None:
    copies = re.findall(r"^COPY (.*) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE)
    copied = {name for names in copies for name in names.split()}
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    build = hatch["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "README.md", "LICENSE", *build["packages"], *build["force-include"]}
    assert "." in copied or needed - copied == set()
    if path.parent == DEPLOY:
        ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        assert needed - {line.removeprefix("!") for line in ignored} == set()


def policies() -> dict[str, dict[str, Any]]:
    """The policies there are, by the component whose pods they are of."""
    reported = [each["spec"] for each in documents(DEPLOY / "kubernetes" / "network.yaml")]
    return {each["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each for each in reported}


@pytest.mark.parametrize("component", ["api", "worker"])
def test_keyless_port_is_reachable_only_by_listed_peers(component: str) -> None:
    deployment = documents(DEPLOY / "kubernetes" / f"{component}.yaml")[0]
    policy = policies()[component]
    assert policy["podSelector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]  # one without `from` would let in everybody
    assert rule["ports"] == [
        {"protocol": "TCP", "port": each[0]["containerPort"]} for each in found(deployment, "ports")
    ]
    assert rule["from"]
    for peer in rule["from"]:  # an empty selector stands for every pod, or every namespace
        assert all(selector["matchLabels"] for selector in peer.values())
        assert "podSelector" in peer
    assert {"name": "HOLDFAST_METRICS_OPEN", "value": "true"} in next(found(deployment, "env"))


def test_prometheus_is_let_in_where_the_scaler_asks_it() -> None:
    (scaler,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    (address,) = found(scaler, "serverAddress")
    for policy in policies().values():
        (namespace,) = found(policy["ingress"], "namespaceSelector")
        assert f".{namespace['matchLabels']['kubernetes.io/metadata.name']}:" in address
