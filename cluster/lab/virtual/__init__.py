"""vLLM engines without a model, in virtual time: only the duration of a step is modeled."""
