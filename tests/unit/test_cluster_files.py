"""The files under cluster/: against the schemas that Ray ships, against ours, and against each other.

Ray ships no schema of KubeRay's resources: of those, what has to fit together is checked here.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.runtime.placement import replica_placement

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
LAUNCHER = sorted((CLUSTER / "launcher").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", sorted(CLUSTER.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_file_is_yaml(path: Path) -> None:
    assert documents(path)


@pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: path.stem)
def test_launcher_files_are_what_ray_up_takes(path: Path) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    (config,) = documents(path)
    util.validate_config(util.prepare_config(config))
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy.middlewares" in commands[-1]
    assert len(LAUNCHER) == 2


def test_a_wrong_launcher_key_would_be_found() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    (config,) = documents(LAUNCHER[0])
    with pytest.raises(Exception, match="colour"):
        util.validate_config({**util.prepare_config(config), "colour": "red"})


@pytest.fixture
def service() -> dict[str, Any]:
    (service,) = documents(CLUSTER / "kuberay" / "rayservice.yaml")
    return service


@pytest.fixture
def app_config(service: dict[str, Any]) -> AppConfig:
    """Of the one application; the Serve configuration around it is checked by Ray's own schema."""
    schema = pytest.importorskip("ray.serve.schema")
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    deploy = schema.ServeDeploySchema.model_validate(document)
    (application,) = deploy.applications
    assert application.import_path == "deployments.app:build_app"
    assert deploy.http_options.host == "0.0.0.0"
    return parse_app_config(application.args)


def templates(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all("rayStartParams" in group for group in groups)
    return [group["template"]["spec"] for group in groups]


def test_the_ray_service_is_whole(service: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert all(group["minReplicas"] <= group["maxReplicas"] for group in cluster["workerGroupSpecs"])
    ray = pytest.importorskip("ray")
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
    images = {container["image"] for pod in templates(service) for container in pod["containers"]}
    assert len(images) == 1
    ports = {port["containerPort"] for pod in templates(service) for port in pod["containers"][0]["ports"]}
    assert {6379, 8265, 8000} <= ports


def test_its_replicas_fit_into_its_pods(service: dict[str, Any], app_config: AppConfig) -> None:
    (bundle,) = replica_placement(app_config).bundles
    _, worker = templates(service)
    cpus = float(worker["containers"][0]["resources"]["limits"]["cpu"])
    assert bundle["CPU"] <= cpus
    assert (app_config.engine.num_threads or 0) <= bundle["CPU"]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert app_config.serving.num_replicas <= group["replicas"]
    drain_s, life_s = 30, worker["terminationGracePeriodSeconds"]
    assert life_s > drain_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= app_config.serving.request_timeout_s


def test_its_keys_lie_where_every_pod_mounts_them(service: dict[str, Any], app_config: AppConfig) -> None:
    path = Path(str(app_config.security.api_keys_file))
    for pod in templates(service):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        names = {volume["name"] for volume in pod["volumes"]}
        assert mounts[str(path.parent)] in names


def test_its_state_lies_in_the_redis_beside_it(service: dict[str, Any]) -> None:
    redis = {one["kind"]: one for one in documents(CLUSTER / "kuberay" / "redis.yaml")}
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    assert redis["Service"]["metadata"]["name"] == host
    assert redis["Service"]["spec"]["ports"] == [{"port": int(port)}]
    pod = redis["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    assert pod["env"][0]["valueFrom"]["secretKeyRef"] == options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert "--appendonly yes" in pod["command"][-1]
    selected = redis["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selected == redis["StatefulSet"]["spec"]["template"]["metadata"]["labels"]


def test_grafana_finds_what_compose_mounts() -> None:
    (compose,) = documents(CLUSTER / "compose.yaml")
    services = compose["services"]
    mounts = [m for s in services.values() for m in s["volumes"] if isinstance(m, str)]
    inside = {target: CLUSTER / source for source, target, _ in (mount.split(":") for mount in mounts)}
    assert all(source.is_dir() for source in inside.values())
    grafana = services["grafana"]["environment"]
    home = Path(grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[str(home.parent)] / home.name).is_file()
    (provided,) = documents(CLUSTER / "grafana/provisioning/dashboards/dspark-ray.yaml")
    assert provided["providers"][0]["options"]["path"] in inside
    (sources,) = documents(CLUSTER / "grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"] == "${PROMETHEUS_URL}"
    listens = next(
        word for word in services["prometheus"]["command"] if word.startswith("--web.listen-address=")
    )
    assert grafana["PROMETHEUS_URL"] == "http://" + listens.removeprefix("--web.listen-address=")


def test_compose_has_the_folder_in_which_ray_says_where_its_metrics_are() -> None:
    (prometheus,) = documents(CLUSTER / "prometheus" / "prometheus.yaml")
    files = [
        path
        for job in prometheus["scrape_configs"]
        for found in job.get("file_sd_configs", ())
        for path in found["files"]
    ]
    (compose,) = documents(CLUSTER / "compose.yaml")
    (mount,) = (m for m in compose["services"]["prometheus"]["volumes"] if isinstance(m, dict))
    assert mount["source"] == mount["target"]  # a link in it leads to a place with the same name
    assert [str(Path(path).parent) for path in files] == [mount["target"]]
