"""The launcher with the API server, garbage collector, scheduler and kubelet of `make test-cluster`. What is played is KubeRay's operator:
these tests write its statuses and make the pods of its templates."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from server.schemas.events import WaitingBody
from tests.cluster.config import IMAGE
from tests.cluster.node import MARK
from tests.server.waiting import until
from tests.trainer.kuberay.definition import rayjob_definition
from tests.trainer.kuberay.specs import lay_out, spec_of
from tests.trainer.support.fake_server import FakeServer
from trainer.launch import TERMINATED
from trainer.launch.kuberay.api import Cluster
from trainer.launch.kuberay.job import JobFile, StandIn
from trainer.launch.kuberay.log import LogReader
from trainer.launch.kuberay.looking import waits_for
from trainer.launch.kuberay.manifest import Job, rayjob, settings_of
from trainer.launch.kuberay.preflight import _lost, cluster_facts

pytestmark = pytest.mark.skipif(MARK not in os.environ, reason="needs the real cluster of `make test-cluster`")
PATIENCE_S = 120
NAMESPACE = "lego-rl"
RBAC = Path(__file__).parents[3] / "docs" / "kubernetes-rbac.yaml"
Object = dict[str, Any]


class Real:
    """The cluster as its administrator sees it, and the account of docs/kubernetes-rbac.yaml."""

    def __init__(self, root: Path) -> None:
        config.load_kube_config(os.environ[MARK])
        self.core, self.extensions = client.CoreV1Api(), client.ApiextensionsV1Api()
        self.jobs = client.CustomObjectsApi()
        self._root = root
        self._admin = yaml.safe_load(Path(os.environ[MARK]).read_text())
        apis = {"Namespace": self.core.create_namespace}
        namespaced = {
            "ServiceAccount": self.core.create_namespaced_service_account,
            "Role": client.RbacAuthorizationV1Api().create_namespaced_role,
            "RoleBinding": client.RbacAuthorizationV1Api().create_namespaced_role_binding,
        }
        for item in yaml.safe_load_all(RBAC.read_text()):
            if item["kind"] in apis:
                apis[item["kind"]](item)
            elif item["kind"] in namespaced:
                namespaced[item["kind"]](NAMESPACE, item)
        self.claim("runs", "ReadWriteMany")

    def claim(self, name: str, mode: str) -> None:
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        self.core.create_namespaced_persistent_volume_claim(NAMESPACE, {"metadata": {"name": name}, "spec": spec})

    def define(self, definition: Object) -> None:
        self.undefine()
        self.extensions.create_custom_resource_definition(definition)
        until(self._served)

    def undefine(self) -> None:
        try:
            self.extensions.delete_custom_resource_definition("rayjobs.ray.io")
        except ApiException as error:
            assert error.status == 404
        until(lambda: not any(item.metadata.name == "rayjobs.ray.io" for item in self.extensions.list_custom_resource_definition().items))

    def _served(self) -> bool:
        try:
            self.list()
        except ApiException:
            return False
        return True

    def list(self) -> list[Object]:
        found: list[Object] = self.jobs.list_namespaced_custom_object("ray.io", "v1", NAMESPACE, "rayjobs")["items"]
        return found

    def status(self, name: str, **news: str) -> None:
        """As the operator would."""
        job = self.jobs.get_namespaced_custom_object("ray.io", "v1", NAMESPACE, "rayjobs", name)
        job["status"] = job.get("status", {}) | news
        self.jobs.replace_namespaced_custom_object_status("ray.io", "v1", NAMESPACE, "rayjobs", name, job)

    def kubeconfig(self, account: str) -> Path:
        """Of a service account, whose token the cluster's controller makes."""

        def token() -> str | None:
            for secret in self.core.list_namespaced_secret(NAMESPACE).items:
                if (secret.metadata.annotations or {}).get("kubernetes.io/service-account.name") == account and secret.data:
                    return base64.b64decode(secret.data["token"]).decode()
            return None

        place = self._root / f"kubeconfig-{account}"
        place.write_text(json.dumps(self._admin | {"users": [{"name": "u", "user": {"token": until(token)}}]}))
        return place


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    real = Real(tmp_path_factory.mktemp("real"))
    yield real
    real.undefine()
    real.core.delete_namespace(NAMESPACE)
    until(lambda: all(item.metadata.name != NAMESPACE for item in real.core.list_namespace().items))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer("an-event-token")
    yield server
    server.stop()


def spec(real: Real, preset: str = "paper-qwen3.5-35b", account: str = "launcher", **more: Any) -> Any:
    return spec_of(preset, real.kubeconfig(account), **({"namespace": NAMESPACE} | more))


def troubles(real: Real, account: str = "launcher", **more: Any) -> list[str]:
    facts = cluster_facts(spec(real, account=account, **more))
    assert facts.version.startswith("v1.20")
    return [trouble.message for trouble in facts.troubles]


def test_without_kuberay_or_rights_the_check_says_so(real: Real) -> None:
    """The rights of docs/kubernetes-rbac.yaml are enough to be told."""
    real.undefine()
    assert troubles(real) == ["the cluster knows no RayJob"]
    needed = "create rayjobs, get rayjobs, list rayjobs, delete rayjobs, create secrets"
    (message,) = troubles(real, account="runner")
    assert message.startswith(f"in namespace lego-rl its account may not {needed}")
    (message,) = troubles(real, namespace="default")
    assert message.startswith(f"in namespace default its account may not {needed}")


def test_with_kuberay_the_check_says_what_is_missing_beside_it(real: Real) -> None:
    real.define(rayjob_definition(auth=False))
    until(lambda: troubles(real) == ["the cluster's rayjobs.ray.io (v1) does not know spec.rayClusterSpec.authOptions"])
    real.define(rayjob_definition())
    until(lambda: troubles(real) == [])
    assert real.list() == [], "nothing is kept"
    assert troubles(real, runs="nowhere") == ["there is no PersistentVolumeClaim nowhere in namespace lego-rl"]
    real.claim("one-node", "ReadWriteOnce")
    assert troubles(real, runs="one-node") == ["4 pods share PersistentVolumeClaim one-node, whose access modes are ReadWriteOnce"]


def test_a_field_of_a_wrong_type_is_refused_by_the_schema(real: Real) -> None:
    real.define(rayjob_definition())
    manifest = rayjob(spec(real), Job(run_id="typed", attempt=1, owner="o", sources="s"))
    manifest["spec"]["ttlSecondsAfterFinished"] = "soon"
    with pytest.raises(ApiException) as refused:
        real.jobs.create_namespaced_custom_object("ray.io", "v1", NAMESPACE, "rayjobs", manifest, dry_run="All")
    assert refused.value.status == 422 and "ttlSecondsAfterFinished" in str(refused.value.body)


@pytest.mark.parametrize("preset", ["paper-qwen3.5-35b", "local"])
def test_every_pod_of_the_manifest_is_one_that_the_api_server_takes_whole(real: Real, preset: str) -> None:
    settings = {"mounts": [{"claim": "runs", "path": "/models", "sub_path": "models"}], "tolerated": ["gpu"], "pull_secrets": ["pull"]}
    manifest = rayjob(spec(real, preset, user=1000, node_selector={"gpu": "yes"}, **settings), Job("r", 1, "o", "s"))
    cluster = manifest["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], manifest["spec"]["submitterPodTemplate"]]
    templates += [group["template"] for group in cluster["workerGroupSpecs"]]
    for number, template in enumerate(templates):
        pod = {"metadata": template["metadata"] | {"name": f"p{number}"}, "spec": template["spec"]}
        kept = real.core.create_namespaced_pod(NAMESPACE, pod, dry_run="All")
        assert list(_lost(pod, client.ApiClient().sanitize_for_serialization(kept), "pod")) == []


def submitter(real: Real, template: Object, name: str, *words: str) -> None:
    """The pod that KubeRay would make, with an image that the node has."""
    ours = {"image": IMAGE, "imagePullPolicy": "Never", "command": ["bash", "-c", "\n".join(words)]}
    create(real, template, name, ours)


def create(real: Real, template: Object, name: str, container: Object) -> None:
    pod = {"metadata": template["metadata"] | {"name": name}}
    pod["spec"] = template["spec"] | {"containers": [template["spec"]["containers"][0] | container]}
    real.core.create_namespaced_pod(NAMESPACE, pod)


def over(real: Real, name: str) -> bool:
    return bool(real.core.read_namespaced_pod(name, NAMESPACE).status.phase == "Succeeded")


def test_a_submitters_log_comes_in_pieces_from_its_kubelet(real: Real) -> None:
    job = Job("logged", 1, "o", "s")
    cluster = Cluster.connect(settings_of(spec(real, "local")))
    reader = LogReader(cluster, job, "")
    assert reader.new_lines() == []
    template = rayjob(spec(real, "local"), job)["spec"]["submitterPodTemplate"]
    submitter(real, template, "logged", "echo one", "echo two", "sleep 2", "printf three", "sleep 1", "echo ' four'", "seq 5 3000")
    found: list[str] = []
    while not over(real, "logged"):
        found += reader.new_lines()
        time.sleep(0.2)
    found += reader.new_lines()
    assert found == ["one", "two", "three four", *map(str, range(5, 3001))]
    assert LogReader(cluster, job, reader.last).new_lines() == []
    real.core.delete_namespaced_pod("logged", NAMESPACE, grace_period_seconds=0)


def test_the_schedulers_and_the_kubelets_words_become_the_reason(real: Real) -> None:
    job = Job("waits", 1, "o", "s")
    template = rayjob(spec(real, "local"), job)["spec"]["submitterPodTemplate"]
    cluster, status = Cluster.connect(settings_of(spec(real, "local"))), {"status": {"jobDeploymentStatus": "Initializing"}}

    def reason(**container: Any) -> str:
        create(real, template, "waits", container)
        words = str(until(lambda: "; " in (said := waits_for(status, cluster.items("pods", job.selector), [])) and said))
        real.core.delete_namespaced_pod("waits", NAMESPACE, grace_period_seconds=0)
        until(lambda: not cluster.items("pods", job.selector))
        return words

    gpus = {"nvidia.com/gpu": "8"}
    words = reason(resources={"requests": gpus, "limits": gpus})
    assert words.startswith("0 of 1 pods are ready; pod waits: Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu")
    assert "ErrImageNeverPull" in reason(image="localhost/not/there:1", imagePullPolicy="Never")


class Following:
    def __init__(self, root: Path, real: Real, server: FakeServer) -> None:
        run, file = lay_out(root, spec(real, "local"), server.url)
        self.told, self.code = threading.Event(), -1
        self._one = StandIn(Cluster.connect(settings_of(file.spec)), run, file, JobFile(owner="test", attempt=1), self.told, 0.2)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self._one.run()

    def end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.code


def test_a_job_is_asked_for_followed_and_seen_off(
    real: Real, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real.define(rayjob_definition())
    one = Following(tmp_path / "r1", real, server)
    (job,) = until(real.list)
    name = job["metadata"]["name"]
    wanted = rayjob(spec(real, "local"), JobFile(owner="test", attempt=1).job("r1"))
    assert job["spec"] == wanted["spec"], "what is kept is what was asked for"
    until(lambda: any("no operator" in body.reason for body in server.bodies() if isinstance(body, WaitingBody)))
    secret = until(lambda: next((s for s in real.core.list_namespaced_secret(NAMESPACE).items if s.metadata.name == name), None))
    assert json.loads(base64.b64decode(secret.data["run.json"]))["event_token"] == "an-event-token"
    real.status(name, jobDeploymentStatus="Initializing", rayClusterName=f"{name}-ray")
    submitter(real, job["spec"]["submitterPodTemplate"], name, "echo one", "echo two")
    until(lambda: over(real, name))
    real.status(name, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    assert one.end() == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in ("one", "two")] == ["one", "two"]
    assert real.list() == []
    until(lambda: all(secret.metadata.name != name for secret in real.core.list_namespaced_secret(NAMESPACE).items))
    real.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)


def test_cancelling_deletes_only_our_own_job(real: Real, server: FakeServer, tmp_path: Path) -> None:
    real.define(rayjob_definition())
    one = Following(tmp_path / "r2", real, server)
    (job,) = until(real.list)
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    cluster = Cluster.connect(settings_of(spec(real, "local")))
    assert cluster.delete("rayjobs", name, "00000000-0000-0000-0000-000000000000") is False
    assert [job["metadata"]["uid"] for job in real.list()] == [uid], "another uid is another job"
    one.told.set()
    assert one.end() == TERMINATED and real.list() == []
    assert cluster.delete("rayjobs", name, uid) is False
