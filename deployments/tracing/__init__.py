"""OpenTelemetry tracing: one trace per request, from the gateway to the threads in its engine.

The gateway makes the spans of the request, its wait, and each attempt at a replica
(`gateway/gateway_trace.py`). It sends the attempt's context in the request's terms. The
replica watches the threads and makes the engine's spans when the request ends there
(`replica/engine_trace.py`).
"""
