"""vLLM's input processor: decides whether a request forks, and cleans prompts of control tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from apar_core.engine.answer_tree import TREE_ARG
from apar_core.engine.fork_adapter import fork_adapter_request
from apar_core.engine.logits_processors import bad_words
from apar_core.engine.replay import (
    PARAM,
    REPLAY,
    REPLAY_ARG,
    REPLAY_REQUEST_ARG,
    REPLAY_V2,
    ReplayRules,
    ReplayText,
    replay_text,
)
from apar_core.engine.request_follower import find_client
from apar_core.engine.server_metrics import announce
from apar_core.errors import RequestError
from apar_core.fork_parameters import EXTRA_ARG, HOLD_ARG, NO_TOKEN, ForkParameters, KeyTerms
from apar_core.formats.control_tokens import (
    ControlTokens,
    Markers,
    neutralise,
    refuse_control_tokens,
)
from apar_core.formats.resolved_format import (
    ResolvedFormat,
    find_format,
    refused_format,
    resolve,
)
from apar_core.formats.rules import block_rules
from apar_core.formats.shipped_formats import APAR_RELEASED, REFUSED
from apar_core.scheduler.constraints import constraint_error
from apar_core.scheduler.fork_scheduler import ForkMixin
from apar_core.scheduler.fork_settings import ForkSettings, fork_settings, generates
from apar_core.vllm_names import EngineCoreRequest, InputProcessor, add_bad_words, bad_words_of

logger = logging.getLogger(__name__)

ENABLED_ARG = "apar_enabled"
"""Key of `SamplingParams.extra_args`: whether the request may fork."""
MAX_THREADS_ARG = "apar_max_threads"
TOOLS_ARG = "apar_tools"
"""Key of `SamplingParams.extra_args`: whether the request may call tools; set by our HTTP layer."""
CLIENT_ARGS = frozenset({ENABLED_ARG, MAX_THREADS_ARG, REPLAY_REQUEST_ARG, TREE_ARG})
"""Our keys of `extra_args` that a client may set, through the HTTP field `vllm_xargs`."""
_OUR_PREFIX = "apar"
_NUMBER_LIMIT = 2**63
_WRAPPED = "_apar_says_whether_tools_may_be_called"


def forks(vllm_config: VllmConfig) -> bool:
    """Return whether an engine with this configuration forks."""
    if vllm_config.scheduler_config.scheduler_cls is None:
        return False
    scheduler_cls = vllm_config.scheduler_config.get_scheduler_cls()
    return isinstance(scheduler_cls, type) and issubclass(scheduler_cls, ForkMixin)


def bans_by_logits_processor(vllm_config: VllmConfig) -> bool:
    """Return whether control tokens are banned by our logits processor, not as bad words.

    vLLM's V1 model runner accepts no custom logits processor with speculative decoding. Bad words
    work everywhere, but take time per row.
    """
    return vllm_config.use_v2_model_runner or vllm_config.speculative_config is None


def replays(vllm_config: VllmConfig) -> bool:
    """Return whether an engine with this configuration can replay given tokens."""
    processors = vllm_config.model_config.logits_processors or ()
    return not {REPLAY, REPLAY_V2}.isdisjoint(processors)


class ForkInputProcessor(InputProcessor):
    """Writes each request's `ForkParameters`; acts like vLLM's own if the engine does not fork."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        # By the client's request id; None for a request without a key.
        self.key_terms: dict[str, KeyTerms | None] = {}
        self._is_forking = forks(vllm_config)
        self._explains = False
        exports = self._is_forking and fork_settings(vllm_config).metrics
        announce(vllm_config if exports else None)
        tokenizer: Any = self.tokenizer
        # None for an ordinary model, and for an engine that does not fork.
        self.format: ResolvedFormat | None = _format(vllm_config, tokenizer)
        # The forking scheduler uses the priority policy internally. Unless that policy was
        # configured, a client's priority must have no effect.
        self._ignores_priority = (
            self._is_forking and vllm_config.scheduler_config.policy != "priority"
        )
        # The V2 model runner has two limits on bad words, of which vLLM checks only one.
        self._limits_bad_words = self._is_forking and vllm_config.use_v2_model_runner
        self._replay_rules = (
            ReplayRules(vllm_config.model_config.get_vocab_size(), frozenset(self._end_ids()))
            if replays(vllm_config)
            else None
        )
        # Whether the engine core may send the tokens of several steps together.
        self._holds = self._is_forking and fork_settings(vllm_config).output_interval_s > 0
        if self.format is None:
            return
        _say_whether_tools_may_be_called()
        self._settings: ForkSettings = fork_settings(vllm_config)
        adapter = self._settings.fork_adapter
        self._fork_adapter = None if adapter is None else fork_adapter_request(adapter)
        self._spellings = self.format.spellings
        self._control_texts = self.format.texts
        # vLLM returns routed experts as rows of one token sequence, which a tree does not have.
        self._may_fork = not vllm_config.aux_output_config.enable_return_routed_experts
        self._bans_as_bad_words = not bans_by_logits_processor(vllm_config)
        definition = self.format.definition
        waits = definition.waits
        blocks = definition.model_dump_json() if waits else None
        if blocks is not None:
            # Now, for its errors, and because a long vocabulary takes a second.
            rules = block_rules(blocks, tokenizer)
            if self._replay_rules is not None:
                self._replay_rules = replace(self._replay_rules, blocks=rules)
        fork_id = self.format.trigger_id
        self._parameters = ForkParameters(
            fork_id=NO_TOKEN if waits or fork_id is None else fork_id,
            seed_ids=() if waits else self.format.seed_ids or (),
            banned_ids=self.format.banned_ids,
            enabled=self._settings.enabled,
            max_threads=self._settings.max_threads,
            max_forks=self._settings.max_forks,
            end_ids=self._end_ids(),
            blocks=blocks,
            separated=self._settings.separators == "on"
            or (
                self._settings.separators == "auto" and definition.trigger == APAR_RELEASED.trigger
            ),
            cut_tokens=definition.cut == "before",
            children_fork=definition.children_fork,
            replacement_ids=self.format.replacement_ids,
            call_ids=() if waits else self._call_ids(tokenizer.get_vocab()),
        )
        logger.info("%s", _start_line(self.format, self._settings))

    @property
    def control_tokens(self) -> ControlTokens | None:
        """Fork and child token; None if the checkpoint has no such pair."""
        return None if self.format is None else self.format.control_tokens

    def process_inputs(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        """Process a request. Raises VLLMValidationError (HTTP 400) for what is refused."""
        request = super().process_inputs(request_id, prompt, params, *args, **kwargs)
        terms = find_client(self.key_terms, request_id)
        if terms is not None and (terms.key is not None or terms.priority):
            request.priority = terms.priority
        elif self._ignores_priority:
            request.priority = 0
        if request.sampling_params is not None:
            self._check_arguments(request.sampling_params)
        if self.format is not None:
            self._clean_prompt(request, prompt, self.format)
            if request.sampling_params is not None:
                self._set_parameters(request, request.sampling_params, terms)
        if request.sampling_params is not None:
            self._set_replay(request, request.sampling_params)
            if self._limits_bad_words:
                _check_bad_words(request.sampling_params)
            if self._holds and _may_wait(request, request.sampling_params, terms):
                extra_args = request.sampling_params.extra_args or {}
                request.sampling_params.extra_args = extra_args | {HOLD_ARG: True}
        return request

    def explain_refusals(self) -> None:
        """Refuse what the engine could not use with the reason, instead of failing later.

        vLLM checks each constraint with the backend that suits it best, but compiles all of them
        with the backend of the first request: in a server, that of the warm-up.
        """
        self._explains = True
        constraints = self.vllm_config.structured_outputs_config
        if constraints.backend == "auto":
            constraints.backend = "xgrammar"

    def _validate_params(self, params: Any, *args: Any, **kwargs: Any) -> bool | None:
        """Validate; after `explain_refusals`, whatever fails is a VLLMValidationError."""
        if not self._explains:
            unchanged: bool | None = super()._validate_params(params, *args, **kwargs)
            return unchanged
        constrained = isinstance(params, SamplingParams) and params.structured_outputs is not None
        for name in params.__struct_fields__ if isinstance(params, SamplingParams) else ():
            value = getattr(params, name)
            # A larger one could not be sent to the engine core.
            if isinstance(value, int) and abs(value) >= _NUMBER_LIMIT:
                raise VLLMValidationError(f"`{name}` is out of range: {value}", parameter=name)
        if constrained:
            _refuse_large_integers(params.structured_outputs.json)
        try:
            checked: bool | None = super()._validate_params(params, *args, **kwargs)
        except VLLMError as error:
            is_vague = isinstance(error, VLLMValidationError) and error.parameter is None
            if not is_vague or not constrained:
                raise
            raise constraint_error(_reason(error)) from error
        except Exception as error:
            logger.warning("request refused: its parameters cannot be checked", exc_info=error)
            raise VLLMValidationError(
                f"The sampling parameters cannot be checked: {_reason(error)}"
            ) from error
        return checked

    def _check_arguments(self, params: SamplingParams) -> None:
        """Refuse our keys of `extra_args` that only our own code may set.

        An engine that does not fork keeps them, except fork parameters and replays, which are
        dropped.
        """
        checked: dict[str, Any] = {}
        for name, value in (params.extra_args or {}).items():
            if isinstance(value, ReplayText):
                checked[name] = str(value)
            elif not name.startswith(_OUR_PREFIX) or name in CLIENT_ARGS or name == TOOLS_ARG:
                checked[name] = value
            elif self._is_forking:
                raise VLLMValidationError(
                    f"vllm_xargs.{name} is internal: clients may set {sorted(CLIENT_ARGS)}.",
                    parameter=f"vllm_xargs.{name}",
                )
            elif name not in (EXTRA_ARG, REPLAY_ARG):
                checked[name] = value
        # A copy: the prompts of one HTTP request share these arguments.
        params.extra_args = checked or None
        if checked.get(TREE_ARG):
            _answer_in_one_piece(params)
        if self._is_forking and self.lora_config and params.prompt_logprobs is not None:
            # vLLM maps rows to adapters by request, but these logits have a row for each token of
            # the prompt. On a CPU that ends the engine: vLLM's issues 51594 and 29955.
            raise VLLMValidationError(
                "prompt_logprobs is not available from a model that is served with LoRA adapters.",
                parameter="prompt_logprobs",
                value=params.prompt_logprobs,
            )

    def _clean_prompt(
        self, request: EngineCoreRequest, prompt: Any, control_tokens: Markers
    ) -> None:
        """Spell out control tokens that came as text; refuse those that came as token ids."""
        token_ids = request.prompt_token_ids
        if token_ids is None or self._spellings.keys().isdisjoint(token_ids):
            return
        is_text = isinstance(prompt, str) or bool(prompt.get("prompt"))
        if not is_text or request.mm_features:
            try:
                refuse_control_tokens(token_ids, control_tokens)
            except RequestError as error:
                raise VLLMValidationError(str(error), parameter="prompt") from error
        plain = neutralise(token_ids, self._spellings)
        limit = self.model_config.max_model_len
        if len(plain) >= limit:
            raise VLLMValidationError(
                f"The prompt has {len(plain)} tokens after its control tokens are spelled out, "
                f"which leaves no room in a context of {limit} tokens.",
                parameter="prompt",
            )
        request.prompt_token_ids = plain
        params = request.sampling_params
        if params is not None and params.max_tokens is not None:
            params.max_tokens = min(params.max_tokens, limit - len(plain))

    def _set_parameters(
        self, request: EngineCoreRequest, params: SamplingParams, terms: KeyTerms | None
    ) -> None:
        self._refuse_control_ids(params)
        extra_args = dict(params.extra_args or {})
        by_default = self._settings.enabled
        if request.lora_request is not None:
            by_default = self._settings.adapters.get(request.lora_request.lora_name, by_default)
        wanted = _choice(extra_args, ENABLED_ARG, bool, by_default)
        if extra_args.pop(TOOLS_ARG, False) and not self._parameters.call_ids:
            wanted = False
        max_threads = _choice(extra_args, MAX_THREADS_ARG, int, self._settings.max_threads)
        if max_threads < 1:
            raise VLLMValidationError(
                f"apar.max_threads must be at least 1, got {max_threads}.",
                parameter="apar.max_threads",
                value=max_threads,
            )
        parameters = replace(
            self._parameters,
            key=None if terms is None else terms.key,
            key_max_threads=None if terms is None else terms.key_max_threads,
            deadline_at_s=None if terms is None else terms.deadline_at_s,
            enabled=bool(wanted) and self._may_fork and _can_fork(request, params),
            max_threads=min(max_threads, self._settings.max_threads),
        )
        if parameters.enabled and request.lora_request is None:
            request.lora_request = self._fork_adapter
        extra_args[EXTRA_ARG] = parameters.to_extra_arg()
        params.extra_args = extra_args
        if self._bans_as_bad_words and parameters.blocks is None:
            add_bad_words(params, bad_words(parameters))

    def _refuse_control_ids(self, params: SamplingParams) -> None:
        """Refuse control tokens by id: a client could end threads or force forks with them."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            named = self._spellings.keys() & set(getattr(params, name) or ())
            if named:
                texts = ", ".join(
                    f"{each} ({self._control_texts[each]!r})" for each in sorted(named)
                )
                raise VLLMValidationError(
                    f"`{name}` holds ids of control tokens, which only the model may generate: "
                    f"{texts}. Leave them out.",
                    parameter=name,
                )

    def _set_replay(self, request: EngineCoreRequest, params: SamplingParams) -> None:
        """Check the client's replay, if any, and write it for the logits processor."""
        if REPLAY_REQUEST_ARG not in (params.extra_args or {}):
            return
        # A copy: the prompts of one HTTP request share these arguments.
        extra_args = dict(params.extra_args or {})
        text = extra_args.pop(REPLAY_REQUEST_ARG)
        try:
            if self._replay_rules is None:
                raise RequestError(
                    f"`{PARAM}` is not allowed: this model is configured without `replay: true`"
                )
            if params.structured_outputs is not None:
                raise RequestError(f"`{PARAM}` cannot be combined with structured outputs")
            prompt_ids = request.prompt_token_ids
            if prompt_ids is None:
                prompt_ids = [0] * (
                    0 if request.prompt_embeds is None else len(request.prompt_embeds)
                )
            scripts = self._replay_rules.parse(
                text,
                ForkParameters.from_extra_args(extra_args),
                prompt_ids=prompt_ids,
                # Read now: vLLM may fit the context to the memory while the engine starts.
                context_tokens=self.model_config.max_model_len,
                max_tokens=params.max_tokens,
            )
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=PARAM) from error
        params.extra_args = {**extra_args, REPLAY_ARG: replay_text(scripts)}

    def _call_ids(self, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tokens with which a tool call begins; empty if tools prevent forks.

        In an engine that speculates, the bans do not know a thread's earlier tokens, and so not
        whether it is within a call.
        """
        if self.vllm_config.speculative_config is not None:
            return ()
        starts = self._settings.tool_call_starts
        for start in starts:
            if start not in vocabulary:
                logger.warning(
                    "tool_call_starts: %r is not one token of the model: requests with tools do "
                    "not fork",
                    start,
                )
                return ()
        return tuple(vocabulary[start] for start in starts)

    def _end_ids(self) -> tuple[int, ...]:
        generation_ids = self.generation_config_fields.get("eos_token_id")
        ids = [generation_ids] if isinstance(generation_ids, int) else list(generation_ids or ())
        eos_token_id = self.renderer.get_eos_token_id()
        return tuple(sorted({*ids, *([] if eos_token_id is None else [eos_token_id])}))


def _format(vllm_config: VllmConfig, tokenizer: Any) -> ResolvedFormat | None:
    """Return the checkpoint's format; None if it has none or the engine does not fork."""
    if not forks(vllm_config) or not generates(vllm_config) or tokenizer is None:
        return None
    facts = {"model": vllm_config.model_config.model}
    vocabulary = tokenizer.get_vocab()
    found = find_format(vocabulary, fork_settings(vllm_config).parallel_format)
    if found is None:
        if (refused := refused_format(vocabulary)) is not None:
            logger.warning(
                "format %r cannot be served, as %s: serving an ordinary model, without forks",
                refused,
                REFUSED[refused],
                extra=facts,
            )
            return None
        logger.warning(
            "checkpoint has no control tokens: serving it as an ordinary model, without forks",
            extra=facts,
        )
        return None
    return resolve(found.definition, tokenizer)


def _start_line(marked: ResolvedFormat, settings: ForkSettings) -> str:
    """Return what an engine's log says about its forks when it starts."""
    tokens = ", ".join(f"{text!r} is {token_id}" for token_id, text in sorted(marked.texts.items()))
    limits = [
        f"{settings.max_threads} threads and {settings.max_forks} forks a request",
        f"{settings.max_replica_threads} threads in all" if settings.max_replica_threads else None,
        f"{settings.max_requests} requests" if settings.max_requests else None,
    ]
    policy = f"policy {settings.policy}"
    if settings.policy == "adaptive":
        policy += f" ({settings.token_time_ms:g} ms a token)"
    wants = "unless they say otherwise" if settings.enabled else "if they ask for it"
    return (
        f"forks: format {marked.definition.name}; control tokens: {tokens or 'none'}; at most "
        f"{', '.join(filter(None, limits))}; {policy}; requests fork {wants}"
    )


def _reason(error: BaseException) -> str:
    """Return the text of an error, and of its cause if it does not repeat it."""
    text = str(error) or type(error).__name__
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text.rstrip('. ')}: {cause}"
    return text


def _refuse_large_integers(schema: object) -> None:
    """Refuse a JSON schema with an integer that could not be sent to the engine core."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int) and abs(part) >= _NUMBER_LIMIT:
            raise constraint_error(f"{part} does not fit into 64 bits")


def _check_bad_words(params: SamplingParams) -> None:
    """Refuse more tokens in bad words than the V2 worker accepts, which would end the engine."""
    number = sum(map(len, bad_words_of(params)))
    limit = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if number > limit:
        raise VLLMValidationError(
            f"bad_words has {number} tokens, more than the {limit} that this engine allows.",
            parameter="bad_words",
            value=number,
        )


def _can_fork(request: EngineCoreRequest, params: SamplingParams) -> bool:
    """Return whether every sampling parameter keeps its meaning if the request forks.

    Grammars and forced lengths apply to one sequence of tokens, not to a tree of threads.
    """
    return not (
        params.structured_outputs is not None
        or params.max_tokens == 1
        or params.min_tokens > 0
        or params.ignore_eos
        or request.prompt_embeds is not None
        or request.resumable
    )


def _may_wait(request: EngineCoreRequest, params: SamplingParams, terms: KeyTerms | None) -> bool:
    """Return whether a request's tokens may arrive here some steps late.

    Not if they are needed to end it: with stop strings, which are found here, and with a deadline,
    at which the answer is what has arrived. Log-probabilities come with each step.
    """
    return not (
        params.output_kind == RequestOutputKind.CUMULATIVE
        or params.stop
        or params.num_logprobs is not None
        or request.resumable
        or (terms is not None and terms.deadline_at_s is not None)
    )


def _answer_in_one_piece(params: SamplingParams) -> None:
    """Let vLLM return a request's answer as one output, which then has its tree.

    vLLM may merge the outputs of a stream, and would drop it. Refuses streams.
    """
    if params.output_kind == RequestOutputKind.DELTA:
        raise VLLMValidationError(
            f"{TREE_ARG} is for whole answers: leave it out, or do not stream.",
            parameter=f"vllm_xargs.{TREE_ARG}",
        )
    params.output_kind = RequestOutputKind.FINAL_ONLY


def _choice(extra_args: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = extra_args.pop(name, None)
    # Rows of a table have every row's columns.
    value = default if value is None else value
    # HTTP's `vllm_xargs` carries booleans as numbers.
    if isinstance(value, (kind, int)) and not (kind is int and isinstance(value, bool)):
        return value
    field = name.replace("apar_", "apar.")
    raise VLLMValidationError(
        f"{field} must be of type {kind.__name__}, got {value!r}.", parameter=field, value=value
    )


def _say_whether_tools_may_be_called() -> None:
    """Let HTTP requests with tools say so; may be called more than once.

    A tool call is one token sequence, which a parser reads as it arrives. The engine does not see a
    request's tools, so vLLM's HTTP layer sets `apar_tools`. `LLM.chat` does not use that layer.
    """
    # Imported here: only processes with a forking engine need vLLM's HTTP layer.
    from apar_core.vllm_names import ChatCompletionRequest, ResponsesRequest

    for request_class in (ChatCompletionRequest, ResponsesRequest):
        to_sampling_params = request_class.to_sampling_params
        if not hasattr(to_sampling_params, _WRAPPED):
            wrapped = _with_tools_noted(to_sampling_params)
            setattr(request_class, to_sampling_params.__name__, wrapped)


def _with_tools_noted(to_sampling_params: Any) -> Any:
    @wraps(to_sampling_params)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = to_sampling_params(self, *args, **kwargs)
        if self.tools and self.tool_choice != "none":
            params.extra_args = {**(params.extra_args or {}), TOOLS_ARG: True}
        return params

    setattr(wrapped, _WRAPPED, True)
    return wrapped
