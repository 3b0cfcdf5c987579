"""What is deployed on Kubernetes names ports, paths, flags, keys and metrics that exist."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from router.admin import Admin
from router.config import DrainSettings, decode_config, split_address
from router.discovery.slice import SERVICE_LABEL
from warmroute.cli import build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "warmroute"
PLAIN = ROOT / "deploy" / "kubernetes"
DOCUMENTS: list[dict[str, Any]] = [
    document
    for path in sorted(PLAIN.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document
]
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def of(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in DOCUMENTS if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in DOCUMENTS:
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


ROUTER = of("Deployment", "warmroute")["spec"]["template"]["spec"]
CONFIG = decode_config(yaml.safe_load(of("ConfigMap", "warmroute")["data"]["warmroute.yaml"]))
OURS = [
    pytest.param(container, id=f"{name}/{container['name']}")
    for name, pod in pods()
    for container in pod["containers"]
    if container["image"].startswith("warmroute:")
]
ALL = [
    pytest.param(container, id=f"{name}/{container['name']}")
    for name, pod in pods()
    for container in pod["containers"]
]


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_every_document_says_what_it_is() -> None:
    assert all(one["apiVersion"] and one["kind"] and one["metadata"]["name"] for one in DOCUMENTS)
    names = [(one["kind"], one["metadata"]["name"]) for one in DOCUMENTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("container", OURS)
def test_the_arguments_of_a_container_are_understood_by_the_command_line(
    container: dict[str, Any],
) -> None:
    arguments = container["args"]
    options = build_parser(arguments[0]).parse_args(arguments)
    assert options.command in {"serve", "sidecar"}


def test_the_router_reads_the_file_that_is_mounted() -> None:
    (container,) = ROUTER["containers"]
    path = Path(container["args"][container["args"].index("--config") + 1])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (volume,) = [one for one in ROUTER["volumes"] if one["name"] == mounts[str(path.parent)]]
    assert path.name in of("ConfigMap", volume["configMap"]["name"])["data"]


def test_the_ports_of_the_router_are_those_that_it_listens_on() -> None:
    (container,) = ROUTER["containers"]
    assert CONFIG.admin is not None
    assert ports_of(container) == {
        "http": split_address("listen", CONFIG.listen)[1],
        "admin": split_address("admin", CONFIG.admin)[1],
    }


@pytest.mark.parametrize("container", ALL)
@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_a_probe_asks_a_port_that_the_container_has(container: dict[str, Any], probe: str) -> None:
    told = container.get(probe, {})
    asked = told.get("httpGet") or told.get("tcpSocket")
    if asked is not None:
        assert asked["port"] in ports_of(container)


def test_a_probe_of_the_router_asks_a_path_that_it_answers() -> None:
    (container,) = ROUTER["containers"]
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    paths = [probe["httpGet"]["path"] for probe in probes]
    assert paths == ["/livez", "/livez", "/readyz"]
    assert all(hasattr(Admin, path.removeprefix("/")) for path in paths)


def test_a_router_has_the_time_that_its_drain_takes() -> None:
    (container,) = ROUTER["containers"]
    kind, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert kind == "sleep"
    assert CONFIG.drain == DrainSettings()
    least_s = int(seconds) + CONFIG.drain.accept_s + CONFIG.drain.grace_s
    assert ROUTER["terminationGracePeriodSeconds"] >= math.ceil(least_s) + 5


@pytest.mark.parametrize("name", ["warmroute", "warmroute-valkey"])
def test_a_pod_of_ours_is_nobody_and_writes_nowhere(name: str) -> None:
    pod = of("Deployment", name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"memory"} <= set(container["resources"]["limits"])


def test_the_account_may_do_what_discovery_asks_for_and_no_more() -> None:
    source = CONFIG.discovery.kubernetes
    assert source is not None
    role = of("Role", "warmroute")
    assert role["metadata"]["namespace"] == source.namespace
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (subject,) = of("RoleBinding", "warmroute")["subjects"]
    assert subject["name"] == ROUTER["serviceAccountName"]
    assert ROUTER["automountServiceAccountToken"] is True
    assert SERVICE_LABEL == "kubernetes.io/service-name"


def test_the_service_of_the_engines_is_the_one_that_is_watched() -> None:
    source = CONFIG.discovery.kubernetes
    assert source is not None
    service = of("Service", source.service)
    assert service["metadata"]["namespace"] == source.namespace
    assert source.port in {port["name"] for port in service["spec"]["ports"]}
    engine = of("Deployment", "vllm")["spec"]["template"]
    assert service["spec"]["selector"].items() <= engine["metadata"]["labels"].items()
    assert VALUES["engines"]["podLabels"].items() <= engine["metadata"]["labels"].items()
    assert VALUES["sidecars"]["podLabels"].items() <= engine["metadata"]["labels"].items()
    assert ports_of(engine["spec"]["containers"][0])["http"] == VALUES["engines"]["podPort"]


@pytest.mark.parametrize("name", ["warmroute", "warmroute-admin", "warmroute-valkey", "vllm"])
def test_a_service_leads_to_a_port_of_its_pods(name: str) -> None:
    spec = of("Service", name)["spec"]
    templates = [one["spec"]["template"] for one in DOCUMENTS if one["kind"] == "Deployment"]
    (template,) = [
        one for one in templates if spec["selector"].items() <= one["metadata"]["labels"].items()
    ]
    known = {port for one in template["spec"]["containers"] for port in ports_of(one)}
    assert {port["targetPort"] for port in spec["ports"]} <= known


def test_the_store_is_reached_by_routers_and_sidecars_only() -> None:
    rules = of("NetworkPolicy", "warmroute-valkey")["spec"]["ingress"]
    (rule,) = rules
    assert rule["ports"] == [{"protocol": "TCP", "port": "redis"}]
    assert len(rule["from"]) == 2


def test_the_secret_has_what_routers_and_sidecars_read() -> None:
    keys = of("Secret", "warmroute-state")["stringData"]
    for container in (one.values[0] for one in OURS):
        assert isinstance(container, dict)
        environment = {one["name"]: one for one in container["env"]}
        told = environment["WARMROUTE_REDIS"]["valueFrom"]["secretKeyRef"]
        assert told == {"name": "warmroute-state", "key": "redis-url"}
    host = keys["redis-url"].removeprefix("redis://").partition(":")[0]
    assert of("Service", host)["spec"]["ports"][0]["port"] == 6379


def test_the_scaler_goes_by_metrics_that_routers_have() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for metric in VALUES["autoscaling"]["metrics"]:
        assert f"| `{metric['name']}` | gauge |" in page


def test_the_schema_knows_every_value_and_no_other() -> None:
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)
    for key, told in VALUES.items():
        known = SCHEMA["properties"][key]
        if isinstance(told, dict) and known.get("additionalProperties") is False:
            assert set(known["properties"]) == set(told), key
    decode_config(VALUES["config"])


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
