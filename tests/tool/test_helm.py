"""The chart, rendered by helm itself and held against the schemas of Kubernetes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from support.helm import CHART, MANIFEST, TOOLS, helm, rendered

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.heavy
EVERYTHING = (
    *("--set", "autoscaling.enabled=true"),
    *("--set", "existingEnvironmentSecret=keys"),
    *("--set", "state.existingSecret=store"),
    *("--set", "service.type=LoadBalancer"),
    *("--set", f"image.digest=sha256:{'0' * 64}"),
    *("--set", "engines.namespace=llm"),
)
CASES = [(), EVERYTHING, ("--set", "engines.service="), ("--set", "networkPolicy.enabled=false")]


def test_helm_finds_nothing_to_say_about_the_chart() -> None:
    told = helm("lint", "--strict", str(CHART))
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert MANIFEST.read_text() == rendered()


@pytest.mark.parametrize("settings", CASES)
def test_what_the_chart_makes_is_what_kubernetes_takes(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered(*settings))
    validate(path)


@pytest.mark.parametrize("name", sorted(path.name for path in MANIFEST.parent.glob("*.yaml")))
def test_a_plain_manifest_is_what_kubernetes_takes(name: str) -> None:
    validate(MANIFEST.parent / name)


def validate(path: Path) -> None:
    command = [str(TOOLS / "bin" / "kubernetes-validate"), "-k", "1.33", "--strict", str(path)]
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


def test_settings_of_the_configuration_reach_the_file() -> None:
    text = rendered(
        *("--set", "config.policy.kind=weighted"), *("--set-json", "config.drain.grace_s=30.5")
    )
    documents = {one["kind"]: one for one in yaml.safe_load_all(text) if one}
    config = yaml.safe_load(documents["ConfigMap"]["data"]["warmroute.yaml"])
    assert config["policy"] == {"kind": "weighted"}
    deployments = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Deployment"]
    graces = [
        one["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") for one in deployments
    ]
    assert 5 + 5 + 31 + 10 in graces


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--set", "replicas=0"), "replicas"),
        (("--set", "replicass=1"), "replicass"),
        (("--set", "valkey.enabled=false"), "state.url"),
        (("--set", "image.digest=sha256:12"), "digest"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rendered(*settings)
