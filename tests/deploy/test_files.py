"""The files of ``examples/deploy`` say what the command, its doors and ``cellrt.ray`` understand."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from cellrt.cli import app
from cellrt.definition.aot.store import CACHE_VARIABLE, find_compiler
from cellrt.ray.scaling import Scaling
from cellrt.serve.app import make_app
from cellrt.serve.backend import Backend
from cellrt.serve.inference import InferenceService
from cellrt.serve.measures import Measures
from cellrt.serve.server_settings import Settings

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "deploy"
ROOT = FOLDER.parent.parent
COMPILING_S = 300
"""What the scheduler takes at the first start on two cores, and some more."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def instructions() -> dict[str, list[str]]:
    """The Dockerfile's instructions by name, each on one line and without comments."""
    text = "\n".join(
        line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.strip().startswith("#")
    )
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest)
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What ``cellrt serve`` makes of arguments; exits if it does not take them."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", list(arguments)).params)


def get_routes() -> list[str]:
    """What answers to GET."""
    app: Any = make_app(InferenceService(Backend(Settings()), Measures(is_shared=False)))
    while not hasattr(app, "routes"):
        app = app._app
    return [route.path for route in app.routes if "GET" in (getattr(route, "methods", None) or ())]


def test_the_container_runs_the_command_as_nobody_in_particular() -> None:
    found = instructions()
    entry, arguments = json.loads(found["ENTRYPOINT"][0]), json.loads(found["CMD"][0])
    assert entry == ["cellrt", "serve"] and parsed(arguments)["models"] == ["g2p"]
    assert int(found["USER"][0]) > 0
    order = list(found)
    assert order.index("USER") < order.index("ENTRYPOINT")


def test_the_container_s_environment_says_what_options_say_too() -> None:
    environment = dict(pair.split("=", 1) for line in instructions()["ENV"] for pair in shlex.split(line))
    options = {f"CELLRT_SERVE_{name.upper()}" for name in parsed(["g2p"])}
    assert {name for name in environment if name.startswith("CELLRT_SERVE_")} <= options
    assert environment[CACHE_VARIABLE] == environment["NUMBA_CACHE_DIR"]  # one folder to keep
    assert instructions()["EXPOSE"] == [environment["CELLRT_SERVE_PORT"]]


def test_the_container_s_health_is_that_of_the_server() -> None:
    (check,) = instructions()["HEALTHCHECK"]
    command = json.loads(check.partition("CMD")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    assert int(re.findall(r"--start-period=(\d+)s", check)[0]) >= COMPILING_S
    assert re.findall(r"\}(/\S+?)'", command[2]) == ["/v2/health/ready"] and "/v2/health/ready" in get_routes()


def test_the_container_has_the_compiler_that_cells_are_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    found = instructions()
    assert f"COMPILER={find_compiler()}" in found["ARG"]
    (install,) = (line for line in found["RUN"] if "apt-get install" in line)
    assert "${COMPILER}" in install and "cellrt check" in found["RUN"][-1]


def test_the_models_that_the_container_mounts_are_there() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    ((folder, mounted, model),) = re.findall(r'--volume "\$PWD/(\S+):(/\S+):ro" cellrt (\S+)', text)
    assert (ROOT / folder / Path(model).relative_to(mounted)).is_file()


def test_the_container_installs_extras_and_versions_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = (line for line in instructions()["RUN"] if line.startswith("pip install"))
    (named,) = re.findall(r"/src\[([a-z,]+)\]", install)
    assert set(named.split(",")) <= extras.keys()
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "g2p-en" in pinned


def probed(container: dict[str, Any]) -> set[int | str]:
    """Check the probes of a container; return the ports that they ask."""
    ports = set()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        ports.add(probe["port"])
        assert probe["path"] in get_routes()
        assert container[name]["timeoutSeconds"] > 2  # what a busy front end takes
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= COMPILING_S
    return ports


def test_compose_s_service_is_the_container_with_options_of_the_server() -> None:
    (file,) = documents("compose.yaml")
    (service,) = file["services"].values()
    assert (FOLDER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    options = {f"CELLRT_SERVE_{name.upper()}" for name in parsed(["g2p"])}
    assert service["environment"].keys() <= options
    environment = dict(pair.split("=", 1) for line in instructions()["ENV"] for pair in shlex.split(line))
    assert [port.partition(":")[2] for port in service["ports"]] == [environment["CELLRT_SERVE_PORT"]]
    models, compiled = (volume.split(":") for volume in service["volumes"])
    (model,) = parsed(service["command"])["models"]
    assert (FOLDER / models[0] / Path(model).relative_to(models[1])).is_file()
    assert compiled[0] in file["volumes"] and compiled[1] == environment["NUMBA_CACHE_DIR"]
    assert int(service["stop_grace_period"].rstrip("s")) >= float(service["environment"]["CELLRT_SERVE_DRAIN_S"]) + 15


def test_kubernetes_runs_and_probes_the_server_as_it_is() -> None:
    deployment, service, budget = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    settings = parsed(container["args"])
    (port,) = container["ports"]
    environment = dict(pair.split("=", 1) for line in instructions()["ENV"] for pair in shlex.split(line))
    assert str(port["containerPort"]) == environment["CELLRT_SERVE_PORT"]
    assert probed(container) == {port["name"]} == {each["targetPort"] for each in service["spec"]["ports"]}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == environment["CELLRT_SERVE_PORT"]
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in get_routes()
    labels = pod["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= settings["drain_s"] + 15
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (mount,) = container["volumeMounts"]
    assert [Path(model).parent.as_posix() for model in settings["models"]] == [mount["mountPath"]]
    assert (ROOT / "examples" / "models" / Path(settings["models"][0]).name).is_file()


def test_kserve_s_runtime_is_started_and_probed_as_the_server_has_it() -> None:
    runtime, service = documents("kserve.yaml")
    (container,) = runtime["spec"]["containers"]
    settings = parsed(container["args"])
    assert (settings["host"], settings["models"]) == ("0.0.0.0", ["/mnt/models/model.py"])
    assert {container["ports"][0]["containerPort"], settings["port"]} == probed(container)
    assert container["securityContext"]["runAsNonRoot"] is True
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] >= settings["drain_s"] + 15


def test_kserve_s_service_is_of_the_runtime() -> None:
    runtime, service = documents("kserve.yaml")
    model = service["spec"]["predictor"]["model"]
    assert (runtime["kind"], service["kind"]) == ("ServingRuntime", "InferenceService")
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["storageUri"].partition("://")[0] in ("pvc", "s3", "gs", "https")


def test_ray_s_configuration_is_what_the_application_takes() -> None:
    ((one,),) = ([*each["applications"]] for each in documents("ray.yaml"))
    assert one["import_path"] == "cellrt.ray:build"
    arguments = dict(one["args"])
    Scaling(**arguments.pop("replicas"))
    known = {"models", "fronts", "resources", *inspect.signature(Settings).parameters}
    assert arguments.keys() <= known
    for source in arguments["models"]:
        module, _, attribute = source.partition(":")
        assert hasattr(__import__(module, fromlist=[attribute]), attribute)
