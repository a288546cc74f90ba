"""vLLM engines without a model, in virtual time: everything is real but the duration of a step."""
