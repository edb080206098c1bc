"""The manifests of the documentation, against the schemas of the resources that they create.

``data/kubernetes.json`` holds what these say about the fields that the manifests use, and the names of the others
beside them: RayService of KubeRay (August 2026), InferencePool and HTTPRoute of the gateway API's standard channel.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fly.config import Config
from fly.serve import Settings

FOLDER = Path(__file__).parent.parent / "docs" / "how-to" / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parent / "data" / "kubernetes.json").read_text())
MANIFESTS = {each["kind"]: each for path in FOLDER.glob("*.yaml") for each in yaml.safe_load_all(path.read_text())}


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_a_manifest_has_the_fields_of_its_kind(kind: str) -> None:
    manifest, judge = MANIFESTS[kind], jsonschema.Draft7Validator(SCHEMAS[kind])
    assert [each.message for each in judge.iter_errors(manifest)] == []
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["replicaCount"] = 3
    assert [each.message for each in judge.iter_errors(wrong)] != []


def test_the_service_of_ray_names_fields_that_exist() -> None:
    """``setup`` and ``settings`` refuse unknown fields; the rest of ``args`` is checked where Ray is installed."""
    (application,) = yaml.safe_load(MANIFESTS["RayService"]["spec"]["serveConfigV2"])["applications"]
    args: dict[str, Any] = application["args"]
    Config.model_validate(args["setup"])
    settings = Settings.model_validate(args["settings"])
    (group,) = MANIFESTS["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > settings.drain_timeout
    assert args["replicas"] == f"{group['minReplicas']}-{group['maxReplicas']}"


def test_pods_pool_and_route_belong_together() -> None:
    pods, pool, route = (MANIFESTS[kind] for kind in ("Deployment", "InferencePool", "HTTPRoute"))
    assert pods["spec"]["template"]["metadata"]["labels"] == pool["spec"]["selector"]["matchLabels"]
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [pool["spec"]["targetPorts"][0]["number"]]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
