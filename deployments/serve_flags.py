"""Ray Serve's environment variables, which every node of a cluster needs."""

NAMESPACE = "apar"
LOOPBACK = "127.0.0.1"
"""Address of everything on a private cluster except HAProxy's port for clients."""

APPLICATION_FLAGS = {
    # Removes headers that let a client change Ray Serve's timeout and disconnect handling.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.client_headers:middlewares",
    # The default of 4 MiB is less than `limits.max_body_bytes`, and answers may be even larger. The
    # gateway limits bodies itself, so this is gRPC's maximum.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
"""Ray Serve's settings for the processes of the application."""

SERVE_FLAGS = APPLICATION_FLAGS | {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A restarted controller replaces replicas that died with the last one.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "deployments.serve_controller:prepare",
}
"""Ray Serve's settings that every node of a cluster needs, private or not."""

HAPROXY_SETTINGS = {
    # A request that a dying gateway has not begun to answer goes to another one. HAProxy keeps it
    # for that as long as it fits into a buffer of 16 KiB.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Not more: a request could be what kills the gateways.
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    # At each change of the gateways a new HAProxy takes over, and the old one finishes its streams.
    # With the default, it would cut those that last two minutes more.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # A check is due each second and fails after another one. After three failed ones in a row, at
    # most 4.5 s, a hung gateway gets no further requests; with the defaults (5s, 2), after 15 s. A
    # gateway that merely is late must stand still for 3.5 s to be taken for hung. Its open answers
    # continue in any case.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
    # A killed HAProxy is replaced at once, see `cluster.haproxy_standby`.
    "APAR_HAPROXY_STANDBY": "1",
}
"""Settings that keep requests alive when gateways and HAProxy come and go."""
