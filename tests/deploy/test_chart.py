"""The chart: linted, rendered for many value sets, and what comes out checked against Kubernetes' own schemas."""

from __future__ import annotations

import asyncio
import copy
import pathlib
import shutil
import sys
from typing import Any

import pytest
import yaml
from aiohttp import web

from deploy.tools import CHART, FILES, REPOSITORY, bring
from epochgate.configuration import load
from epochgate.settings import Settings

Manifest = dict[str, Any]
EXAMPLE = REPOSITORY / "helm" / "examples" / "legacy-server"
VERSIONS = ("1.30", "1.34", "1.37")  # the oldest that the chart allows, and newer ones
OF_THE_OPERATOR = {"ServiceMonitor", "PrometheusRule"}  # not in the schemas of Kubernetes itself
SHARED = {"existingSecret": {"name": "epochgate-store"}}
PROMETHEUS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
POLICIES = [{"name": "mcp", "match": {"path": "/mcp"}, "mode": "observe"}]


def values(**more: Any) -> dict[str, Any]:
    return {"config": {"upstream": {"url": "http://mcp-server:3000"}}, **more}


SETS: dict[str, dict[str, Any]] = {
    "least": values(),
    "replicas": values(replicas=3, store=SHARED, service={"sessionAffinity": "ClientIP"}),
    "valkey-url": values(replicas=2, store={"url": "valkey://valkey:6379/0"}),
    "autoscaled": values(autoscaling={"enabled": True, "minReplicas": 2, "maxReplicas": 9}, store=SHARED),
    "watched": values(
        networkPolicy={"monitoring": PROMETHEUS},
        serviceMonitor={"enabled": True, "labels": {"release": "prometheus"}},
        prometheusRule={"enabled": True},
        dashboard={"enabled": True},
    ),
    "fenced-in": values(
        networkPolicy={
            "clients": [{"podSelector": {"matchLabels": {"app": "agent"}}}],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "mcp-server"}}}], "ports": [{"port": 3000}]}],
        },
        podDisruptionBudget={"maxUnavailable": "50%"},
        serviceAccount={"create": False, "name": "mine"},
    ),
    "bare": values(
        networkPolicy={"enabled": False}, podDisruptionBudget={"enabled": False}, resources={"limits": None}, replicas=0
    ),
    "everything": values(
        config={
            "upstream": {"url": "https://mcp.example/base", "host": "client"},
            "limits": {"sessions": 500},
            "log": {"level": "debug"},
            "policies": POLICIES,
        },
        image={"repository": "registry.example/epochgate", "digest": "sha256:" + "a" * 64},
        imagePullSecrets=[{"name": "pull"}],
        store={"url": "sqlite:///var/lib/epochgate/ledger.db"},
        extraVolumes=[{"name": "ledger", "persistentVolumeClaim": {"claimName": "ledger"}}],
        extraVolumeMounts=[{"name": "ledger", "mountPath": "/var/lib/epochgate"}],
        extraEnv=[{"name": "EPOCHGATE_LOG__FORMAT", "value": "console"}],
        drain={"graceSeconds": 2, "windowSeconds": 60},
        ports={"http": 8000, "admin": 9000},
        podAnnotations={"a": "b"},
        podLabels={"team": "agents"},
        nodeSelector={"kubernetes.io/os": "linux"},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        topologySpreadConstraints=[
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        priorityClassName="high",
        fullnameOverride="gate",
    ),
    "sidecar": values(mode="sidecar", replicas=5, dashboard={"enabled": True}),
}


def render(chart: pathlib.Path, given: dict[str, Any]) -> list[Manifest]:
    helm = bring("helm_python", "helm-python-sdk")
    with helm.Chart.load(str(chart)) as loaded:
        rendered = loaded.render(given, name="demo", namespace="agents")
    texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def kinds(manifests: list[Manifest]) -> list[str]:
    return sorted(manifest["kind"] for manifest in manifests)


def settings(manifests: list[Manifest], folder: pathlib.Path) -> Settings:
    """The configuration as the proxy itself reads it."""
    (text,) = [
        manifest["data"]["epochgate.yaml"] for manifest in manifests if "epochgate.yaml" in manifest.get("data", {})
    ]
    path = folder / "epochgate.yaml"
    path.write_text(text)
    return load(path, {}, {})


def check_restricted(pod: Manifest) -> None:
    """The Pod Security Standard `restricted`, and more: nothing is written to the root file system."""
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) - {"name"} <= {"configMap", "secret", "persistentVolumeClaim"} for volume in pod["volumes"])
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        context = pod.get("securityContext", {}) | container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        if container["name"] == "epochgate":
            assert context["readOnlyRootFilesystem"] is True


@pytest.fixture
def example(tmp_path: pathlib.Path) -> pathlib.Path:
    """The example with its dependency in place, as `helm dependency build` leaves it."""
    chart = tmp_path / "helm" / "examples" / "legacy-server"
    shutil.copytree(EXAMPLE, chart)
    shutil.copytree(CHART, chart / "charts" / "epochgate")
    return chart


@pytest.mark.parametrize("name", SETS)
def test_value_set_passes_the_linter(name: str) -> None:
    report = bring("helm_python", "helm-python-sdk").lint(str(CHART), SETS[name], strict=True)
    assert report["errors"] == []
    assert report["total_charts_linted"] == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_value_set_renders_what_kubernetes_accepts(name: str, version: str) -> None:
    kubernetes = bring("kubernetes_validate", "kubernetes-validate")
    manifests = render(CHART, SETS[name])
    for manifest in manifests:
        if manifest["kind"] not in OF_THE_OPERATOR:
            kubernetes.validate(manifest, version, strict=True)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SETS)
def test_value_set_gives_a_configuration_that_the_proxy_takes(name: str, tmp_path: pathlib.Path) -> None:
    given = SETS[name]
    taken = settings(render(CHART, given), tmp_path)
    assert str(taken.upstream.url) == given["config"]["upstream"]["url"]
    assert taken.listen.port == given.get("ports", {"http": 8080})["http"]
    assert taken.admin.listen.port == given.get("ports", {"admin": 9090})["admin"]


@pytest.mark.parametrize("name", [name for name in SETS if name != "sidecar"])
def test_gateway_is_restricted_and_has_time_to_drain(name: str, tmp_path: pathlib.Path) -> None:
    manifests = render(CHART, SETS[name])
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    check_restricted(pod)
    drain = settings(manifests, tmp_path).drain
    assert pod["terminationGracePeriodSeconds"] > drain.grace + drain.window
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_gateway_mounts_the_folder_so_that_a_change_is_seen() -> None:
    container = only(render(CHART, SETS["least"]), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "epochgate-config")
    assert mount["mountPath"] == "/etc/epochgate"
    assert "subPath" not in mount
    assert container["args"] == ["serve", "--config", "/etc/epochgate/epochgate.yaml"]


def test_least_values_give_the_parts_that_need_no_operator() -> None:
    assert kinds(render(CHART, SETS["least"])) == [
        *("ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount")
    ]


def test_autoscaler_owns_the_number_of_replicas() -> None:
    manifests = render(CHART, SETS["autoscaled"])
    assert "replicas" not in only(manifests, "Deployment")["spec"]
    scaler = only(manifests, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 9)
    assert scaler["scaleTargetRef"]["name"] == only(manifests, "Deployment")["metadata"]["name"]


def test_store_url_comes_from_the_secret_alone() -> None:
    manifests = render(CHART, SETS["replicas"])
    container = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    reference = {"secretKeyRef": {"name": "epochgate-store", "key": "url"}}
    assert container["env"] == [{"name": "EPOCHGATE_STORE__URL", "valueFrom": reference}]
    assert "store" not in yaml.safe_load(only(manifests, "ConfigMap")["data"]["epochgate.yaml"])


def test_clients_do_not_reach_the_admin_port() -> None:
    manifests = render(CHART, SETS["watched"])
    services = {
        manifest["metadata"]["name"]: manifest["spec"] for manifest in manifests if manifest["kind"] == "Service"
    }
    assert [port["targetPort"] for port in services["demo-epochgate"]["ports"]] == ["epochgate"]
    assert services["demo-epochgate-admin"]["clusterIP"] == "None"
    rules = only(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert [(rule["ports"][0]["port"], rule.get("from")) for rule in rules] == [
        ("epochgate", None),
        ("epochgate-admin", PROMETHEUS),
    ]
    closed = only(render(CHART, SETS["least"]), "NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in closed] == ["epochgate"]


def test_monitor_selects_the_admin_service() -> None:
    manifests = render(CHART, SETS["watched"])
    monitor = only(manifests, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    chosen = [m for m in manifests if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in chosen] == ["demo-epochgate-admin"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["port"] == chosen[0]["spec"]["ports"][0]["name"]


def test_rules_and_dashboard_are_those_of_the_files() -> None:
    manifests = render(CHART, SETS["watched"])
    assert only(manifests, "PrometheusRule")["spec"] == yaml.safe_load((FILES / "alerts.yaml").read_text())
    texts = [manifest["data"].get("epochgate.json") for manifest in manifests if manifest["kind"] == "ConfigMap"]
    assert [text.strip() for text in texts if text] == [(FILES / "dashboard.json").read_text().strip()]


def test_policy_change_restarts_no_pod_and_any_other_change_does() -> None:
    def checksum(**config: Any) -> str:
        given = values(config={"upstream": {"url": "http://mcp-server:3000"}, **config})
        template = only(render(CHART, given), "Deployment")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/epochgate"]
        return found

    assert checksum(policies=POLICIES) == checksum() == checksum(policies=[{"name": "mcp", "mode": "enforce"}])
    assert checksum(limits={"sessions": 5}) != checksum()


REFUSED = {
    "no-upstream": ({}, "config.upstream.url is not set"),
    "replicas-with-memory": (values(replicas=3), "replicas: 3 with store.url memory://: each replica would know only"),
    "autoscaling-with-memory": (values(autoscaling={"enabled": True}), "autoscaling.enabled with store.url memory://"),
    "replicas-with-sqlite": (values(replicas=2, store={"url": "sqlite:///l.db"}), "replicas: 2 with store.url sqlite:"),
    "workers-with-memory": (
        values(config={"upstream": {"url": "http://a:1"}, "workers": 2}),
        "config.workers: 2 with store.url memory://: each worker would know only its own sessions",
    ),
    "password-in-values": (values(store={"url": "valkey://:secret@valkey:6379/0"}), "store.existingSecret"),
    "listen": (values(config={"upstream": {"url": "http://a:1"}, "listen": "0.0.0.0:1"}), "set the value ports.http"),
    "admin-listen": (
        values(config={"upstream": {"url": "http://a:1"}, "admin": {"listen": "0.0.0.0:1"}}),
        "set the value ports.admin",
    ),
    "drain": (values(config={"upstream": {"url": "http://a:1"}, "drain": {}}), "set the value drain"),
    "closed-to-monitoring": (values(serviceMonitor={"enabled": True}), "networkPolicy.monitoring is empty"),
    "sidecar-unlabelled": (values(mode="sidecar", serviceMonitor={"enabled": True}), "sidecar.selectorLabels is empty"),
    "unknown-mode": (values(mode="daemon"), "/mode"),
    "unknown-key": (values(replica=3), "replica"),
    "drain-as-text": (values(drain={"graceSeconds": "5s"}), "graceSeconds"),
    "short-digest": (values(image={"digest": "sha256:12"}), "digest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_are_refused_with_the_remedy(name: str) -> None:
    given, message = REFUSED[name]
    helm = bring("helm_python", "helm-python-sdk")
    with pytest.raises(helm.HelmError) as refused:
        render(CHART, copy.deepcopy(given))
    assert message in str(refused.value)
    assert ":secret@" not in str(refused.value)


def test_sidecar_mode_alone_is_only_the_configuration() -> None:
    assert kinds(render(CHART, values(mode="sidecar"))) == ["ConfigMap"]


def test_sidecar_needs_the_mode_for_it(example: pathlib.Path) -> None:
    helm = bring("helm_python", "helm-python-sdk")
    with pytest.raises(helm.HelmError) as refused:
        render(example, {"epochgate": {"mode": "gateway"}})
    assert "set epochgate.mode to sidecar" in str(refused.value)


@pytest.mark.parametrize("more", [{}, {"epochgate": {"serviceMonitor": {"enabled": True}}}], ids=["plain", "watched"])
def test_example_puts_a_native_sidecar_before_the_server(
    example: pathlib.Path, more: Any, tmp_path: pathlib.Path
) -> None:
    kubernetes = bring("kubernetes_validate", "kubernetes-validate")
    report = bring("helm_python", "helm-python-sdk").lint(str(example), more, strict=True, with_subcharts=True)
    assert report["errors"] == []
    manifests = render(example, more)
    for manifest in manifests:
        for version in VERSIONS:
            if manifest["kind"] not in OF_THE_OPERATOR:
                kubernetes.validate(manifest, version, strict=True)
    template = only(manifests, "Deployment")["spec"]["template"]
    pod = template["spec"]
    check_restricted(pod)
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "/-/drain" in sidecar["lifecycle"]["preStop"]["exec"]["command"][-1]
    drain = settings(manifests, tmp_path).drain
    stays = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert stays == drain.grace + drain.window
    assert pod["terminationGracePeriodSeconds"] >= stays + 10
    assert pod["volumes"][0]["configMap"]["name"] == only(manifests, "ConfigMap")["metadata"]["name"]
    for service in [manifest for manifest in manifests if manifest["kind"] == "Service"]:
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        named = {port["name"] for port in sidecar["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


async def test_stopping_pod_asks_the_proxy_to_drain(example: pathlib.Path, aiohttp_server: Any) -> None:
    """The preStop command is run as it is rendered, against an admin side that notes what it is asked."""
    (sidecar,) = only(render(example, {}), "Deployment")["spec"]["template"]["spec"]["initContainers"]
    *_, code = sidecar["lifecycle"]["preStop"]["exec"]["command"]
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append((request.method, request.path))
        return web.Response(status=202)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", note)
    server = await aiohttp_server(application)
    command = await asyncio.create_subprocess_exec(sys.executable, "-c", code.replace("9090", str(server.port)))
    assert await asyncio.wait_for(command.wait(), 30) == 0
    assert asked == [("POST", "/-/drain")]
