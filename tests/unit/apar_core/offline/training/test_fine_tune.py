"""Fine-tuning of a small model, from its folder to a servable checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from apar_core.errors import DataError, TrainingError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.formats.resolved_format import find_format
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.data.example_file import STRUCTURED_FILE, UNSTRUCTURED_FILE
from apar_core.offline.data.joined import MARKERS
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.training import pretrained
from apar_core.offline.training.fine_tune import TrainingResult, adapted, fine_tune
from apar_core.offline.training.joined_encoder import MARKER_TOKENS
from apar_core.offline.training.pretrained import (
    CONTROL_TOKENS,
    add_tokens,
    load_model,
    load_tokenizer,
    prepare_weights,
    recipe_dtype,
)
from apar_core.offline.training.recipe import LoraSettings, TrainingRecipe
from apar_core.offline.training.tree_trainer import StepReport, build_optimizer
from tests.fakes.example_files import write_examples
from tests.unit.apar_core.offline.training.plain_tokenizer import plain_tokenizer

RECIPE = TrainingRecipe(
    batch_size=4, micro_batch_size=2, num_steps=4, learning_rate=1e-2, dtype="float32",
    context_length=512, validation_share=0.25, validate_every_steps=2, save_every_steps=2,
    log_every_steps=1, vocabulary_multiple=8,
)  # fmt: skip


def example(number: int, *, structured: bool) -> ExampleRecord:
    answer = (
        chain([(f"{i}. Tune:", ParagraphRecord(" play slowly.\n")) for i in range(1, 3)])
        if structured
        else ParagraphRecord("slowly " * (number + 1))
    )
    message = ChatMessage("user", f"Question {number}?")
    return ExampleRecord("ordered_list", (message,), answer, example_id=f"{structured}{number}")


@dataclass(frozen=True)
class Place:
    model: Path
    data: Path
    out: Path

    def train(self, *, to: str = "apar", resume: bool = False, **changes: object) -> TrainingResult:
        return fine_tune(
            str(self.model), self.data, self.out, RECIPE.model_copy(update=changes),
            format_name=to, resume=resume,
        )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def place(folder: Path, *, tied: bool) -> Place:
    torch.manual_seed(1)
    tokenizer = plain_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, structured in ((STRUCTURED_FILE, True), (UNSTRUCTURED_FILE, False)):
        examples = [example(i, structured=structured) for i in range(8)]
        write_examples(folder / "data" / name, examples)
    return Place(folder / "model", folder / "data", folder / "out")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_checkpoint_can_be_served(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    at = place(tmp_path, tied=tied)

    with caplog.at_level(logging.WARNING):
        result = at.train()

    tokenizer = AutoTokenizer.from_pretrained(at.out)
    model = AutoModelForCausalLM.from_pretrained(at.out)
    control = find_control_tokens(tokenizer.get_vocab())
    assert control is not None
    assert max(control.fork_id, control.child_id) < model.config.vocab_size
    assert model.config.vocab_size % 8 == 0
    assert model.config.use_cache
    assert model.config.dtype == torch.bfloat16
    assert all(weight.dtype == torch.bfloat16 for weight in weights_of(at.out).values())
    assert ("lm_head.weight" in weights_of(at.out)) != tied
    assert "has no chat template" in caplog.text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    assert prompt.startswith("<s> A chat between")
    assert prompt.endswith("USER: Hi ASSISTANT:")
    assert result.num_validation == 4
    assert result.validation_loss is not None
    assert list((at.out / "checkpoints" / "runs").rglob("events.*"))
    assert len({file.stat().st_mode for file in at.out.iterdir() if file.is_file()}) == 1


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = place(tmp_path / "whole", tied=False)
    whole.train()
    at = place(tmp_path / "halved", tied=False)

    def interrupt(report: StepReport) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fine_tune(str(at.model), at.data, at.out, RECIPE, on_step=interrupt)
    with pytest.raises(TrainingError, match="checkpoints of an earlier run"):
        at.train()
    with pytest.raises(TrainingError, match="another recipe: num_steps was 4 and is 8"):
        fine_tune(
            str(at.model), at.data, at.out, RECIPE.model_copy(update={"num_steps": 8}), resume=True
        )
    steps: list[int] = []
    fine_tune(
        str(at.model), at.data, at.out, RECIPE,
        resume=True, on_step=lambda report: steps.append(report.step),
    )  # fmt: skip

    assert steps == [3, 4]
    resumed = weights_of(at.out)
    for name, weight in weights_of(whole.out).items():
        assert torch.equal(resumed[name], weight), name


def test_the_last_step_is_validated_once(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)

    result = at.train()

    state = json.loads((at.out / "checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
    losses = {e["step"]: e["eval_loss"] for e in state["log_history"] if "eval_loss" in e}
    assert list(losses) == [2, 4]
    assert result.validation_loss == losses[4]
    assert len(list((at.out / "checkpoints" / "runs").rglob("events.*"))) == 1


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)

    at.train(save_every_steps=1, keep_checkpoints=3)

    kept = sorted(path.name for path in (at.out / "checkpoints").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_loader_processes_do_not_change_the_result(tmp_path: Path) -> None:
    alone = place(tmp_path / "alone", tied=True)
    alone.train()
    helped = place(tmp_path / "helped", tied=True)

    helped.train(num_loaders=1)

    expected = weights_of(alone.out)
    assert all(torch.equal(expected[name], w) for name, w in weights_of(helped.out).items())


def test_the_seed_determines_split_draws_and_new_rows(tmp_path: Path) -> None:
    first = place(tmp_path / "first", tied=True)
    first.train()
    other = place(tmp_path / "other", tied=True)

    other.train(seed=5)

    ours, theirs = weights_of(first.out), weights_of(other.out)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapters_are_merged_and_only_control_rows_of_the_embeddings_learn(
    tmp_path: Path, tied: bool
) -> None:
    at = place(tmp_path, tied=tied)
    before = weights_of(at.model)

    at.train(lora=LoraSettings(rank=2, alpha=4))

    after = weights_of(at.out)
    assert set(after) == set(before)
    control = find_control_tokens(AutoTokenizer.from_pretrained(at.out).get_vocab())
    assert control is not None
    rows = after["model.embed_tokens.weight"]
    old = before["model.embed_tokens.weight"]
    assert torch.equal(rows[: len(old)], old.bfloat16())
    assert not torch.equal(rows[control.fork_id], rows[control.child_id])
    changed = [
        name for name in before
        if "proj" in name and not torch.equal(before[name].bfloat16(), after[name])
    ]  # fmt: skip
    assert len(changed) == 7


def test_transformers_gets_the_model_merged_with_the_adapter_in_its_folder(
    tmp_path: Path, tied: bool
) -> None:
    at = place(tmp_path, tied=tied)
    at.train(lora=LoraSettings(rank=2, alpha=4, merge=False))
    merged = replace(at, out=tmp_path / "merged")
    merged.train(lora=LoraSettings(rank=2, alpha=4))

    found = load_causal_model(at.out, dtype=torch.float32).state_dict()

    expected = weights_of(merged.out)
    assert expected.keys() <= found.keys()
    for name, weight in expected.items():
        # Both round to bfloat16 once, the base before and the merged model after the sum.
        torch.testing.assert_close(found[name], weight.float(), rtol=2e-2, atol=2e-3)
    base = weights_of(at.out)
    assert any(not found[name].equal(weight.float()) for name, weight in base.items())


def test_a_checkpoint_of_threadweaver_is_recognised(tmp_path: Path, tied: bool) -> None:
    at = place(tmp_path, tied=tied)

    result = at.train(to="threadweaver")

    tokenizer = AutoTokenizer.from_pretrained(at.out)
    found = find_format(tokenizer.get_vocab())
    assert found is not None
    assert found.definition.name == "threadweaver"
    assert MARKERS[0] in tokenizer.all_special_tokens
    assert AutoModelForCausalLM.from_pretrained(at.out).config.vocab_size % 8 == 0
    assert ("lm_head.weight" in weights_of(at.out)) != tied
    assert (result.counts.whole, result.counts.dropped) == (16, 0)


def test_the_rows_of_markers_go_into_the_base_of_an_unmerged_adapter(
    tmp_path: Path, tied: bool
) -> None:
    merged, beside = (place(tmp_path / name, tied=tied) for name in ("merged", "beside"))

    for at, merge in ((merged, True), (beside, False)):
        at.train(to="threadweaver", lora=LoraSettings(rank=2, alpha=4, merge=merge))

    factors = load_file(beside.out / "adapter" / "adapter_model.safetensors")
    # vLLM has places for adapters of embeddings and heads in few architectures only.
    assert all(".layers." in name for name in factors)
    before = weights_of(beside.model)
    ids = MARKER_TOKENS.ids(AutoTokenizer.from_pretrained(beside.out).get_vocab())
    for name in ("model.embed_tokens", *([] if tied else ["lm_head"])):
        rows, expected = (weights_of(at.out)[f"{name}.weight"] for at in (beside, merged))
        assert torch.equal(rows, expected)
        old = before[f"{name}.weight"].bfloat16()
        assert torch.equal(rows[: len(old)], old)
        assert min(ids) >= len(old)


def test_a_run_is_not_resumed_in_another_format(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)
    at.train(num_steps=1, save_every_steps=1)

    with pytest.raises(TrainingError, match=r"format has changed \(was apar, is threadweaver\)"):
        at.train(to="threadweaver", resume=True, num_steps=1, save_every_steps=1)

    # As an earlier version recorded it.
    recorded = at.out / "checkpoints" / "inputs.json"
    inputs = json.loads(recorded.read_text())
    recorded.write_text(json.dumps({name: inputs[name] for name in inputs if name != "format"}))
    with pytest.raises(TrainingError, match=r"format has changed \(was apar, is threadweaver\)"):
        at.train(to="threadweaver", resume=True, num_steps=1, save_every_steps=1)
    at.train(resume=True, num_steps=1, save_every_steps=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": Path("/nowhere/model")}, TrainingError, "no such model folder: /nowhere/model"),
        ({"model": Path("nowhere/model")}, TrainingError, "no tokenizer in 'nowhere/model'"),
        ({"data": Path("nowhere/data")}, DataError, "nowhere/data does not exist"),
    ],
)
def test_missing_inputs_are_named(
    tmp_path: Path, change: dict[str, Path], error: type[Exception], message: str
) -> None:
    at = place(tmp_path, tied=True)
    changed = Place(**({"model": at.model, "data": at.data, "out": at.out} | change))

    with pytest.raises(error, match=message):
        changed.train()


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)
    (at.model / "tokenizer.json").unlink()

    with pytest.raises(TrainingError, match=r"no tokenizer in .*serialization file") as raised:
        at.train()
    assert "\n" not in str(raised.value)


def test_rows_that_exceed_positions_or_context_are_refused(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)

    with pytest.raises(TrainingError, match="context_length 513 exceeds the model's 512"):
        at.train(context_length=513)
    with pytest.raises(TrainingError, match=r"no example in .* fits 5 tokens"):
        at.train(context_length=5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "gemma3",
            "layer_types: 1 of 2 sliding_attention with sliding_window 256, less than 512 tokens",
        ),
        ("qwen3_next", "layer_types: 1 of 2 linear_attention"),
    ],
)
def test_a_model_without_full_attention_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    at = place(tmp_path, tied=True)
    sizes: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 512,
    }  # fmt: skip
    model: PreTrainedModel
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=256))
    else:
        kinds = ["linear_attention", "full_attention"]
        experts: dict[str, Any] = {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
        }
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **experts, layer_types=kinds))
    model.save_pretrained(at.model)

    with pytest.raises(TrainingError) as raised:
        at.train()
    assert f"model {str(at.model)!r} has {message}" in str(raised.value)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4)], ids=["whole", "lora"])
def test_adamw_updates_float32_and_frozen_weights_stay_in_the_recipes_dtype(
    tmp_path: Path, tied: bool, lora: LoraSettings | None
) -> None:
    at = place(tmp_path, tied=tied)
    recipe = RECIPE.model_copy(update={"dtype": "bfloat16", "lora": lora})
    tokenizer = load_tokenizer(str(at.model))
    model = load_model(str(at.model), recipe_dtype(recipe), torch.device("cpu"))
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
    add_tokens(model, tokenizer, CONTROL_TOKENS, multiple=8, seed=0)
    ids = CONTROL_TOKENS.ids(tokenizer.get_vocab())
    trained = model if lora is None else adapted(model, lora, ids)

    prepare_weights(trained)

    updated = [
        part for group in build_optimizer(trained, recipe).param_groups for part in group["params"]
    ]
    assert {part.dtype for part in updated} == {torch.float32}
    frozen = [part for part in trained.parameters() if not part.requires_grad]
    assert {part.dtype for part in frozen} == (set() if lora is None else {torch.bfloat16})
    before = weights_of(at.model)
    at.train(dtype="bfloat16", lora=lora)
    after = weights_of(at.out)
    assert all(weight.isfinite().all() for weight in after.values())
    changed = [
        name for name in before if "proj" in name and not after[name].equal(before[name].bfloat16())
    ]
    assert len(changed) == 7


def test_processes_that_receive_shards_load_no_weights(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = place(tmp_path, tied=tied)
    tokenizer, cpu = load_tokenizer(str(at.model)), torch.device("cpu")
    loaded = load_model(str(at.model), torch.bfloat16, cpu)
    add_tokens(loaded, tokenizer, CONTROL_TOKENS, multiple=8, seed=0)
    monkeypatch.setattr(pretrained, "is_fsdp_enabled", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)

    empty = load_model(str(at.model), torch.bfloat16, cpu)
    add_tokens(empty, load_tokenizer(str(at.model)), CONTROL_TOKENS, multiple=8, seed=0)
    assert all(part.is_meta for part in empty.parameters())
    prepare_weights(empty)

    shapes = {name: part.shape for name, part in loaded.named_parameters()}
    assert {name: part.shape for name, part in empty.named_parameters()} == shapes
    assert len({part.data_ptr() for part in empty.parameters()}) == len(shapes)
    assert {(part.dtype, part.device) for part in empty.parameters()} == {(torch.float32, cpu)}
    # accelerate does not send buffers missing in checkpoints, such as rotary frequencies.
    for name, buffer in loaded.named_buffers():
        torch.testing.assert_close(empty.get_buffer(name), buffer, rtol=0, atol=0)


def test_packed_rows_train_the_same_weights_with_less_padding(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)
    # With a short prompt, several trees fit into a row of 512 tokens.
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
    recipe = RECIPE.model_copy(update={"num_steps": 1})
    reports: list[StepReport] = []

    def train(name: str, **changes: object) -> TrainingResult:
        return fine_tune(
            str(at.model), at.data, tmp_path / name, recipe.model_copy(update=changes),
            chat_template=template, on_step=reports.append,
        )  # fmt: skip

    alone, packed = train("alone"), train("packed", pack_trees=True)

    assert packed.validation_loss == pytest.approx(alone.validation_loss, abs=1e-4)
    assert reports[1].loss == pytest.approx(reports[0].loss, abs=1e-5)
    assert reports[1].num_trees == reports[0].num_trees == 4
    shares = [report.padding_share for report in reports]
    assert shares == pytest.approx([alone.padding.share, packed.padding.share])
    one_tree_per_row = packed.padding.one_tree_per_row
    assert alone.padding.share == alone.padding.one_tree_per_row == one_tree_per_row
    assert packed.padding.share != one_tree_per_row


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)

    with pytest.raises(TrainingError, match="nothing to resume"):
        fine_tune(str(at.model), at.data, at.out, RECIPE, resume=True)


def test_a_chat_template_can_be_given(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")

    fine_tune(str(at.model), at.data, at.out, RECIPE, chat_template=template)

    assert AutoTokenizer.from_pretrained(at.out).chat_template == template.read_text()
    with pytest.raises(TrainingError, match=r"chat template .* cannot be read"):
        fine_tune(str(at.model), at.data, tmp_path, RECIPE, chat_template=tmp_path / "no.jinja")


def test_the_checkpoint_stops_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    at = place(tmp_path, tied=True)
    tokenizer = AutoTokenizer.from_pretrained(at.model)
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<turn_end>{% endfor %}")
    with pytest.raises(TrainingError, match="writes '<turn_end>' after an assistant's turn"):
        fine_tune(str(at.model), at.data, at.out, RECIPE, chat_template=template)
    tokenizer.add_tokens(["<turn_end>"], special_tokens=True)
    tokenizer.save_pretrained(at.model)
    weights = LlamaForCausalLM.from_pretrained(at.model)
    weights.resize_token_embeddings(len(tokenizer))
    weights.save_pretrained(at.model)

    fine_tune(str(at.model), at.data, at.out, RECIPE, chat_template=template)

    stops = json.loads((at.out / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [1, tokenizer.convert_tokens_to_ids("<turn_end>")]
