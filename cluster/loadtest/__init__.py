"""Load test of an OpenAI-compatible server: send requests, measure times, report, compare runs."""
