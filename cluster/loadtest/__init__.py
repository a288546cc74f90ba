"""The load test: requests sent to an OpenAI-compatible server, timed, cut, summed up, compared."""
