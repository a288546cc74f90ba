"""Alert rules, except those of the service level objectives."""

from dashboards.prometheus import recording
from dashboards.prometheus.rule import JOB, AlertRule, Severity, by, rate, selector, total
from dashboards.prometheus.settings import RuleSettings
from deployments.metrics import catalogue

_MODEL = "{{ $labels.model }}"
_REPLICA = "{{ $labels.replica }}"
_PERCENT = "{{ $value | humanizePercentage }}"
_NO_ROOM = '"overloaded|queue_timeout|no_replica"'
_NUMBER = '{{ $value | printf "%.0f" }}'


def replicas(settings: RuleSettings) -> list[AlertRule]:
    """Missing, crash-looping and stuck replicas."""
    return [
        AlertRule(
            "AparNoReplica",
            Severity.PAGE,
            # A model scaled to zero wants no replica; AparNothingGenerated fires if it does not
            # start.
            f"{recording.REPLICAS} == 0\nand {recording.REPLICAS_WANTED} > 0",
            60,
            f"No replica of {_MODEL} accepts requests",
            f"{_NUMBER} replicas of {_MODEL} accept requests; its clients get no answers.",
        ),
        AlertRule(
            "AparReplicaMissing",
            Severity.TICKET,
            f"{recording.REPLICAS_WANTED} - {recording.REPLICAS} > 0",
            300,
            f"{_MODEL} has fewer replicas than wanted",
            f"{_NUMBER} replicas of {_MODEL} are missing.",
        ),
        AlertRule(
            "AparReplicaRestarts",
            Severity.TICKET,
            f"{recording.RESTARTS} > {settings.replica_restarts}",
            0,
            f"Replicas of {_MODEL} are crash-looping",
            f"{_NUMBER} replicas of {_MODEL} were lost and restarted within 30 minutes.",
        ),
        AlertRule(
            "AparReplicaStuck",
            Severity.PAGE,
            f"{total(catalogue.REPLICA_REQUESTS, recording.REPLICA, how='max')} > 0\n"
            f"unless {rate(catalogue.ENGINE_STEPS, '2m', recording.REPLICA)} > 0",
            180,
            f"A replica of {_MODEL} is stuck",
            f"Replica {_REPLICA} of {_MODEL} has {_NUMBER} requests, but its engine has not "
            "completed a forward pass for 2 minutes.",
        ),
    ]


def serving(settings: RuleSettings) -> list[AlertRule]:
    """Stalled generation and queueing."""
    queue = recording.REQUESTS_QUEUED
    return [
        AlertRule(
            "AparNothingGenerated",
            Severity.PAGE,
            f"{recording.REQUESTS_RUNNING} + {queue} > 0\nunless {recording.GENERATED_TOKENS} > 0",
            180,
            f"{_MODEL} has requests but generates no tokens",
            f"{_NUMBER} requests of {_MODEL} are queued or running, but no tokens are generated.",
        ),
        AlertRule(
            "AparQueueGrowing",
            Severity.TICKET,
            f"deriv({queue}[10m]) * 600 > {settings.queue_growth_requests}\n"
            f"and min_over_time({queue}[10m]) > 0",
            300,
            f"The queue of {_MODEL} is growing",
            f"The queue of {_MODEL} grew by {_NUMBER} requests in 10 minutes without draining.",
        ),
        AlertRule(
            "AparQueueTimeHigh",
            Severity.TICKET,
            f"{recording.QUEUE_TIME} > {settings.queue_time_s:g}",
            600,
            f"Queue time of {_MODEL} is high",
            f"10 % of requests of {_MODEL} are queued for {{{{ $value | humanizeDuration }}}} or "
            "longer.",
        ),
    ]


def refusals(settings: RuleSettings) -> list[AlertRule]:
    """Requests that get an error instead of an answer."""
    return [
        AlertRule(
            "AparRequestsRejected",
            Severity.PAGE,
            f"sum {by('reason')} ({recording.REJECTED}{{reason=~{_NO_ROOM}}})"
            f" > {settings.rejected_requests}",
            300,
            "Requests are rejected for lack of capacity",
            f"{_NUMBER} requests were rejected in the last 10 minutes: {{{{ $labels.reason }}}}.",
        ),
        AlertRule(
            "AparAuthenticationFailures",
            Severity.TICKET,
            f'sum {by()} ({recording.REJECTED}{{reason="authentication"}})'
            f" > {settings.authentication_failures}",
            0,
            "Many requests have an invalid API key",
            f"{_NUMBER} requests in the last 10 minutes had an invalid API key or none.",
        ),
        AlertRule(
            "AparRequestsGivenUp",
            Severity.TICKET,
            f"{recording.GIVEN_UP} > 0",
            0,
            f"Requests of {_MODEL} failed because their replica was lost",
            f"{_NUMBER} requests of {_MODEL} failed within 10 minutes because their replica was "
            "lost and they could not be continued on another one.",
        ),
    ]


def engine(settings: RuleSettings) -> list[AlertRule]:
    """KV cache and forks."""
    threads = recording.THREADS
    return [
        AlertRule(
            "AparKvCacheNearlyFull",
            Severity.TICKET,
            f"{recording.KV_CACHE_USAGE} > {settings.kv_cache_usage:g}",
            600,
            f"The KV cache of a replica of {_MODEL} is nearly full",
            f"Replica {_REPLICA} of {_MODEL} uses {_PERCENT} of its KV blocks.",
        ),
        AlertRule(
            "AparPreemptions",
            Severity.TICKET,
            f"{rate(catalogue.PREEMPTIONS, '10m', ('model_name', 'replica'))}"
            f" > {settings.preemptions_per_s:g}",
            300,
            "KV-cache preemptions of {{ $labels.model_name }} are high",
            "Replica {{ $labels.replica }} of {{ $labels.model_name }} preempts {{ $value | "
            'printf "%.2f" }} threads per second for lack of KV blocks and recomputes them.',
        ),
        AlertRule(
            "AparForksRefused",
            Severity.TICKET,
            f"{recording.FORKS_REFUSED} > {settings.refused_forks:g}",
            900,
            f"Many forks of {_MODEL} are refused",
            f"{_PERCENT} of forks of {_MODEL} are refused: the request reached its limit of forks "
            "or tokens, or the model's context is full.",
        ),
        AlertRule(
            "AparForksDelayed",
            Severity.TICKET,
            f'sum {by("model")} ({threads}{{state="deferred"}})\n'
            f'  / (sum {by("model")} ({threads}{{state="running"}}) > 0)'
            f" > {settings.deferred_threads:g}",
            900,
            f"Many forks of {_MODEL} are delayed",
            f'{{{{ $value | printf "%.2f" }}}} forks per running thread of {_MODEL} are held '
            "back by a cap.",
        ),
    ]


def processes() -> list[AlertRule]:
    """Lost log lines and rejected settings."""
    return [
        AlertRule(
            "AparLogLinesDropped",
            Severity.TICKET,
            f"sum {by('instance')} (increase({selector(catalogue.LOG_LINES_DROPPED)}[10m])) > 0",
            0,
            "Log lines are dropped on {{ $labels.instance }}",
            f"{_NUMBER} log lines were dropped in the last 10 minutes because the disk hung.",
        ),
        AlertRule(
            "AparSettingsRefused",
            Severity.TICKET,
            f"{total(catalogue.SETTINGS_REFUSED, ('source',))} > 0",
            60,
            "A gateway rejected its newest settings",
            f"{_NUMBER} gateways rejected their newest {{{{ $labels.source }}}} and keep the older "
            "settings.",
        ),
    ]


def monitoring() -> list[AlertRule]:
    """Missing metrics."""
    wanted = catalogue.REPLICAS_WANTED
    seen = f"last_over_time({selector(wanted)}[6h])"
    return [
        AlertRule(
            "AparMetricsAbsent",
            Severity.PAGE,
            # `absent` has no labels and would merge clusters; it is for the case of none at all.
            f"(group {by()} ({seen}) unless {total(wanted, (), how='group')})\nor absent({seen})",
            300,
            "No metrics from {{ with $labels.cluster }}cluster {{ . }}{{ else }}any cluster"
            "{{ end }}",
            "No gateway has exported metrics for 5 minutes (absent is {{ $value }}): the cluster "
            "is down, its metrics are disabled, or Prometheus cannot find it.",
        ),
        AlertRule(
            "AparTargetDown",
            Severity.TICKET,
            # A node that never answered has no gateway and no replica.
            f'up{{job="{JOB}"}} == 0 and max_over_time(up{{job="{JOB}"}}[1d]) > 0',
            300,
            "Metrics of a node cannot be scraped",
            "Prometheus cannot scrape {{ $labels.instance }} (up is {{ $value }}). Its replicas "
            "may still serve requests.",
        ),
    ]
