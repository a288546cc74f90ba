"""Alert rules, but for those of the objectives."""

from cluster.metrics import catalogue
from dashboards.prometheus import external, recording
from dashboards.prometheus.promql import rate, selector
from dashboards.prometheus.recording import latency_quantile
from dashboards.prometheus.rule import AlertRule, Severity
from dashboards.prometheus.settings import JOB, RuleSettings

_MODEL = "{{ $labels.model }}"
_REPLICA = "{{ $labels.replica }}"
_PERCENT = "{{ $value | humanizePercentage }}"
_NO_ROOM = '"overloaded|queue_timeout|no_replica"'
_NUMBER = '{{ $value | printf "%.0f" }}'


def replicas(settings: RuleSettings) -> list[AlertRule]:
    """Whether there are the replicas that there should be."""
    return [
        AlertRule(
            "AparNoReplica",
            Severity.PAGE,
            # A model that may sleep wants none; AparNothingGenerated tells if it does not wake up.
            f"{recording.REPLICAS} == 0\nand {recording.REPLICAS_WANTED} > 0",
            60,
            f"No replica of {_MODEL} takes requests",
            f"{_NUMBER} replicas of {_MODEL} take requests; nobody is served.",
        ),
        AlertRule(
            "AparReplicaMissing",
            Severity.TICKET,
            f"{recording.REPLICAS_WANTED} - {recording.REPLICAS} > 0",
            300,
            f"{_MODEL} has fewer replicas than it should",
            f"{_NUMBER} replicas of {_MODEL} are missing.",
        ),
        AlertRule(
            "AparReplicaRestarts",
            Severity.TICKET,
            f"{recording.RESTARTS} > {settings.replica_restarts}",
            0,
            f"Replicas of {_MODEL} die again and again",
            f"{_NUMBER} replicas of {_MODEL} were lost and started again within 30 minutes.",
        ),
        AlertRule(
            "AparReplicaStuck",
            Severity.PAGE,
            f"max by (model, replica) ({selector(catalogue.REPLICA_REQUESTS)}) > 0\n"
            f"unless {rate(catalogue.ENGINE_STEPS, '2m', recording.REPLICA)} > 0",
            180,
            f"A replica of {_MODEL} holds requests and makes no steps",
            f"Replica {_REPLICA} of {_MODEL} holds {_NUMBER} requests, and its engine has made no "
            "step in 2 minutes.",
        ),
    ]


def serving(settings: RuleSettings) -> list[AlertRule]:
    """Whether requests are answered, and how long they wait for that."""
    queue = recording.REQUESTS_QUEUED
    return [
        AlertRule(
            "AparNothingGenerated",
            Severity.PAGE,
            f"{recording.REQUESTS_RUNNING} + {queue} > 0\nunless {recording.GENERATED_TOKENS} > 0",
            180,
            f"{_MODEL} has requests and generates nothing",
            f"{_NUMBER} requests of {_MODEL} wait or run, and no token comes.",
        ),
        AlertRule(
            "AparQueueGrowing",
            Severity.TICKET,
            f"deriv({queue}[10m]) * 600 > {settings.queue_growth_requests}\n"
            f"and min_over_time({queue}[10m]) > 0",
            300,
            f"The queue of {_MODEL} grows",
            f"{_NUMBER} more requests wait for {_MODEL} than 10 minutes ago; it never ran empty.",
        ),
        AlertRule(
            "AparQueueTimeHigh",
            Severity.TICKET,
            f"{latency_quantile(catalogue.QUEUE_TIME, 'p90')} > {settings.queue_time_s:g}",
            600,
            f"Requests of {_MODEL} wait long for a replica",
            f"A tenth of the requests of {_MODEL} waits {{{{ $value | humanizeDuration }}}} or "
            "longer for a replica.",
        ),
    ]


def refusals(settings: RuleSettings) -> list[AlertRule]:
    """Requests that get an error instead of an answer."""
    return [
        AlertRule(
            "AparRequestsRejected",
            Severity.PAGE,
            f"sum by (reason) ({recording.REJECTED}{{reason=~{_NO_ROOM}}})"
            f" > {settings.rejected_requests}",
            300,
            "Requests are refused for want of room",
            f"{_NUMBER} requests of the last 10 minutes were refused: {{{{ $labels.reason }}}}.",
        ),
        AlertRule(
            "AparAuthenticationFailures",
            Severity.TICKET,
            f'sum ({recording.REJECTED}{{reason="authentication"}})'
            f" > {settings.authentication_failures}",
            0,
            "Many requests have a wrong API key",
            f"{_NUMBER} requests of the last 10 minutes had a wrong API key or none.",
        ),
        AlertRule(
            "AparRequestsGivenUp",
            Severity.TICKET,
            f"{recording.GIVEN_UP} > 0",
            0,
            f"Requests of {_MODEL} were lost with their replica",
            f"{_NUMBER} requests of {_MODEL} ended with an error within 10 minutes, because their "
            "replica was lost and they could not go on elsewhere.",
        ),
    ]


def engine(settings: RuleSettings) -> list[AlertRule]:
    """KV cache and forks."""
    threads = recording.THREADS
    return [
        AlertRule(
            "AparKvCacheNearlyFull",
            Severity.TICKET,
            f"{recording.REPLICA_KV_CACHE_USAGE} > {settings.kv_cache_usage:g}",
            600,
            f"The KV cache of a replica of {_MODEL} is nearly full",
            f"{_PERCENT} of the KV blocks of replica {_REPLICA} of {_MODEL} are in use.",
        ),
        AlertRule(
            "AparPreemptions",
            Severity.TICKET,
            f"sum by (model_name, ReplicaId) (rate({external.PREEMPTIONS}[10m]))"
            f" > {settings.preemptions_per_s:g}",
            300,
            "The engine of a replica of {{ $labels.model_name }} takes threads back",
            "Replica {{ $labels.ReplicaId }} of {{ $labels.model_name }} preempts {{ $value | "
            'printf "%.2f" }} threads a second for want of KV blocks; each is computed again.',
        ),
        AlertRule(
            "AparForksRefused",
            Severity.TICKET,
            f"{recording.FORKS_REFUSED} > {settings.refused_forks:g}",
            900,
            f"Forks of {_MODEL} are refused",
            f"{_PERCENT} of the forks of {_MODEL} open no thread: their requests have used up "
            "their forks or tokens, or the model's context is full.",
        ),
        AlertRule(
            "AparForksDelayed",
            Severity.TICKET,
            f'sum by (model) ({threads}{{state="deferred"}})\n'
            f'  / (sum by (model) ({threads}{{state="running"}}) > 0)'
            f" > {settings.deferred_threads:g}",
            900,
            f"Forks of {_MODEL} wait for long",
            f'For each running thread of {_MODEL}, {{{{ $value | printf "%.2f" }}}} forks are held '
            "back by a cap.",
        ),
    ]


def processes() -> list[AlertRule]:
    """Whether processes use the settings that they were given, and can write their logs."""
    return [
        AlertRule(
            "AparLogLinesDropped",
            Severity.TICKET,
            f"sum by (instance) (increase({selector(catalogue.LOG_LINES_DROPPED)}[10m])) > 0",
            0,
            "Log lines are lost on {{ $labels.instance }}",
            f"{_NUMBER} lines of the last 10 minutes were not logged, because the disk hung.",
        ),
        AlertRule(
            "AparSettingsRefused",
            Severity.TICKET,
            f"sum by (source) ({selector(catalogue.SETTINGS_REFUSED)}) > 0",
            60,
            "A gateway uses older settings than those it was given",
            f"{_NUMBER} gateways cannot use their {{{{ $labels.source }}}}, and go on with the "
            "settings before it.",
        ),
    ]


def monitoring() -> list[AlertRule]:
    """Whether the metrics themselves come."""
    return [
        AlertRule(
            "AparMetricsAbsent",
            Severity.PAGE,
            f"absent({selector(catalogue.REPLICAS_WANTED)})",
            300,
            "No cluster tells anything",
            "No gateway has exported anything for 5 minutes (absent is {{ $value }}): the cluster "
            "is down, exports nothing, or cannot be found.",
        ),
        AlertRule(
            "AparTargetDown",
            Severity.TICKET,
            f'up{{job="{JOB}"}} == 0',
            300,
            "A node's metrics cannot be read",
            "Prometheus cannot read {{ $labels.instance }} (up is {{ $value }}); its replicas may "
            "serve, but nobody sees them.",
        ),
    ]
