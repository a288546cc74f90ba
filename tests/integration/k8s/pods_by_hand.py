"""Pods of an overlay without Kubernetes: Linux namespaces made as its pod templates say.

Each has an address of its own, a read-only root file system with the template's volumes, the
template's user without capabilities, its environment, and the command that KubeRay would run.
What is not made: seccomp, memory and CPU limits, network policies, and KubeRay itself.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from cluster.haproxy import write_haproxy_wrapper
from tests.fakes.overlays import Object, Pod, of_kind

REPOSITORY = Path(__file__).parents[3]
NETWORK = "10.231.7"
BRIDGE = "apark8s"
TOKEN = "0123456789abcdef" * 4
GCS_PORT = 6379
START_S = 120.0
STOP_S = 30.0
# Runs as root in new mount and process namespaces; $1 is an empty folder, $2 the user.
_ENTRY = """
set -e
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mkdir -p etc/apar/keys opt/apar
echo "apar:x:$2:$2::/tmp:/usr/sbin/nologin" >> etc/passwd
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none dev/shm
mount -t tmpfs -o mode=1777 none tmp
# The interpreter may lie in root's home, which nobody else may enter.
[ -d root ] && mount -t tmpfs -o mode=0755 none root
if [ -d /root/.pyenv ]; then mkdir root/.pyenv; mount --bind /root/.pyenv root/.pyenv; fi
mount --bind "$3" etc/apar/keys
mount --bind "$4" opt/apar
mount -o remount,ro,bind etc/apar/keys
mount -o remount,ro,bind opt/apar
# As in a slim image: engines find no compiler.
for program in usr/bin/gcc usr/bin/cc usr/bin/g++ usr/bin/c++; do
    [ -e "$program" ] && mount --bind /dev/null "$program"
done
mount -o remount,ro .
exec chroot . /usr/bin/setpriv --reuid "$2" --regid "$2" --clear-groups --no-new-privs \\
    --bounding-set=-all --inh-caps=-all /bin/bash -c -- "cd /tmp; $5"
"""


def cannot_make_pods(*programs: str) -> str | None:
    """Return why this machine cannot run such pods, or None if it can."""
    if os.geteuid() != 0:
        return "only root may make network and mount namespaces"
    for program in ("ip", "unshare", "setpriv", "nsenter", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], check=False)
    return "namespaces cannot be made here" if tried.returncode else None


class HandMadePod:
    """One running pod."""

    def __init__(self, name: str, address: str, pod: Pod, environment: dict[str, str]) -> None:
        self.name = name
        self.address = address
        self.pod = pod
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: str, folders: tuple[Path, Path, Path], log: Path) -> None:
        """Run the command in the pod; `folders` are an empty one, the keys, and /opt/apar."""
        empty, keys, opt = folders
        user = str(self.pod.spec["securityContext"]["runAsUser"])
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *shlex.split(f"ip netns exec {self.name} unshare --mount --pid --fork"),
                    *("--kill-child", "bash", "-c", _ENTRY, "pod"),
                    *(str(empty), user, str(keys), str(opt), command),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the running pod, as `kubectl exec` does."""
        user = str(self.pod.spec["securityContext"]["runAsUser"])
        return subprocess.run(
            [
                *shlex.split(f"nsenter -t {self.first} -n -m -p -r -w setpriv --reuid {user}"),
                *shlex.split(f"--regid {user} --clear-groups --bounding-set=-all --"),
                *command,
            ],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def first(self) -> int:
        """Return the pid, outside the pod, of the pod's first process."""
        assert self.process is not None
        pid = self.process.pid
        [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def get(self, path: str, port: int | str) -> httpx.Response:
        """Request a page from a port of the pod, given by number or name."""
        number = self.pod.ports[port] if isinstance(port, str) else port
        return httpx.get(f"http://{self.address}:{number}{path}", timeout=5)

    def passes(self, probe: str) -> bool:
        """Return whether the pod passes a probe now."""
        get = self.pod.container[probe]["httpGet"]
        try:
            return self.get(get["path"], get["port"]).is_success
        except httpx.HTTPError:
            return False

    def wait_until(self, probe: str, passes: bool = True, timeout_s: float = START_S) -> None:
        """Wait until a probe passes, or fails."""
        deadline = time.monotonic() + timeout_s
        while self.passes(probe) != passes:
            assert time.monotonic() < deadline, f"{self.name}: {probe}"
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} has ended"
            time.sleep(0.5)

    def end(self) -> None:
        """Send SIGTERM to the pod's first process, and SIGKILL after a grace period."""
        if self.process is None or self.process.poll() is not None:
            return
        os.kill(self.first, signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the first process, and with it the pod's process namespace."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.first, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


class HandMadePods:
    """A cluster's pods on a bridge that this machine can reach."""

    def __init__(self, objects: list[Object], folder: Path, keys: str) -> None:
        self._objects = objects
        self._folder = folder
        self._running: list[HandMadePod] = []
        self.keys = folder / "keys"
        self.keys.mkdir()
        (self.keys / "keys.yaml").write_text(keys)
        self._opt = folder / "opt"
        self._opt.mkdir()
        write_haproxy_wrapper(self._opt / "haproxy")

    @property
    def head_address(self) -> str:
        """Return the address of the first pod."""
        return f"{NETWORK}.2"

    def start(self, pod: Pod, **environment: str) -> HandMadePod:
        """Start a pod of a template, the head first; `environment` adds to the template's."""
        number = len(self._running) + 2
        name, address = f"{BRIDGE}-{number}", f"{NETWORK}.{number}"
        made = HandMadePod(name, address, pod, self._environment(pod, address, number == 2))
        made.environment |= environment
        self._running.append(made)
        self.start_again(made)
        return made

    def start_again(self, pod: HandMadePod) -> None:
        """Start a pod by name, again if it has ended."""
        number = self._running.index(pod) + 2
        _connect(pod.name, number, pod.address)
        empty = self._folder / pod.name
        empty.mkdir(exist_ok=True)
        log = self._folder / f"{pod.name}.log"
        pod.start(self._command(pod.pod, number == 2), (empty, self.keys, self._opt), log)

    def keep_logs(self, folder: Path) -> None:
        """Copy the pods' output and Ray's logs."""
        for pod in self._running:
            kept = folder / pod.name
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            if (log := self._folder / f"{pod.name}.log").exists():
                shutil.copy(log, kept)
            if pod.process is not None and pod.process.poll() is None:
                # Not the link `session_latest`, which is absolute, so it leads out of the pod.
                for logs in Path(f"/proc/{pod.first}/root/tmp/ray").glob("session_2*/logs"):
                    subprocess.run(["cp", "-r", str(logs), str(kept)], check=False)

    def close(self) -> None:
        """End all pods, also those of a killed test, and remove their addresses."""
        for pod in reversed(self._running):
            pod.kill()
        names = _ip("netns", "list", check=False).split()
        for name in [each for each in names if each.startswith(BRIDGE)]:
            for pid in _ip("netns", "pids", name, check=False).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name, check=False)
        _ip("link", "del", BRIDGE, check=False)

    def _environment(self, pod: Pod, address: str, is_head: bool) -> dict[str, str]:
        """Return the template's environment with KubeRay's additions."""
        maps = {
            each["metadata"]["name"]: each["data"] for each in of_kind(self._objects, "ConfigMap")
        }
        made = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
        for source in pod.container["envFrom"]:
            made |= maps[source["configMapRef"]["name"]]
        host = "127.0.0.1" if is_head else self.head_address
        return made | {
            "POD_IP": address,
            "RAY_ADDRESS": f"{host}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            # Of this machine, where nothing outside can be reached and cores are few.
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(REPOSITORY),
            "LANG": "C.UTF-8",
        }

    def _command(self, pod: Pod, is_head: bool) -> str:
        """Return the command that KubeRay builds from `rayStartParams` and the limits."""
        limits = pod.container["resources"]["limits"]
        parameters = {"num-cpus": limits["cpu"]} | (pod.ray_start or {})
        parameters |= {"dashboard-agent-listen-port": str(pod.ports["agent"])}
        if not is_head:
            parameters["address"] = f"{self.head_address}:{GCS_PORT}"
        flags = " ".join(f"--{name}={value}" for name, value in sorted(parameters.items()))
        node = "--head" if is_head else ""
        return f"ulimit -n 65536; ray start {node} --block {flags}"


@contextmanager
def hand_made_pods(objects: list[Object], folder: Path, keys: str) -> Iterator[HandMadePods]:
    """Create a network for pods; remove it and all pods at the end."""
    pods = HandMadePods(objects, folder, keys)
    pods.close()  # What a killed test may have left.
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    try:
        yield pods
    finally:
        pods.close()


def _connect(name: str, number: int, address: str) -> None:
    """Connect a network namespace to the bridge."""
    outside = f"{BRIDGE}{number}"
    # A namespace goes when its last process has gone, and the address must be free before.
    _ip("link", "del", outside, check=False)
    _ip("netns", "del", name, check=False)
    _ip("netns", "add", name)
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", outside, "master", BRIDGE, "up")
    inside = ("-n", name)
    _ip(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "link", "set", "lo", "up")
    # Ray takes the address from which it would reach the internet.
    _ip(*inside, "route", "add", "default", "via", f"{NETWORK}.1")


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr}")
    return done.stdout
